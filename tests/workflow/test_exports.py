"""What a format has no place for is refused before anything is spent."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.schema import Config
from pipeline_lib.core.errors import ConfigError, DataError
from pipeline_lib.core.store import Store
from pipeline_lib.export.quantizer import quantize
from pipeline_lib.workflow.exports import on_export
from pipeline_lib.workflow.findings import refuse_wrong

QWEN3_MOE: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "vocab_size": 576, "hidden_size": 32, "intermediate_size": 64},
    **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}


def config_of(model: dict[str, Any], export: tuple[str, ...] = ("gguf-f16", "gguf-q8_0")) -> Config:
    sections = {
        "experiment": "exported",
        "model": model,
        "data": {"train": [{"source": "pydoc"}]},
        "export": export,
    }
    return Config.model_validate_json(json.dumps(sections))


def refused(config: Config, store: Store) -> str:
    return "".join(finding.text for finding in on_export(config, store))


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [
        ("Qwen/Qwen3-8B", False),
        ("Qwen/Qwen3-30B-A3B", False),
        ("Qwen/Qwen2.5-7B", False),
        ("Qwen/Qwen3.5-0.8B", True),
    ],
)
def test_hybrids_are_refused_by_name(name: str, is_refused: bool, tmp_path: Path) -> None:
    model = {"source": "huggingface", "name": name}
    text = refused(config_of(model), Store(tmp_path))
    assert ("gated delta rule (Qwen3.5)" in text) == is_refused
    assert bool(text) == is_refused
    assert not refused(config_of(model, export=()), Store(tmp_path))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"norm_topk_prob": True}, ""),
        ({"norm_topk_prob": False}, "norm_topk_prob: false"),
        ({"norm_topk_prob": True, "decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"norm_topk_prob": True, "mlp_only_layers": [1]}, "mlp_only_layers"),
    ],
)
def test_experts_that_llama_cpp_computes_otherwise_are_refused(
    keys: dict[str, Any], named: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_MOE, **keys}))
    config = config_of({"source": "local", "path": str(tmp_path)})
    text = refused(config, Store(tmp_path / "store"))
    assert bool(text) == bool(named)
    assert named in text


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("Qwen/Qwen3-8B", ""),
        ("Qwen/Qwen3-30B-A3B", "experts"),
        ("Qwen/Qwen3.5-0.8B", "gated delta rule (Qwen3.5)"),
    ],
)
def test_fp8_is_refused_by_name_and_by_itself(name: str, named: str, tmp_path: Path) -> None:
    config = config_of({"source": "huggingface", "name": name}, ("gguf-f16", "fp8"))
    refusals = [finding.text for finding in on_export(config, Store(tmp_path))]
    of_fp8 = [text for text in refusals if "remove fp8" in text]
    assert bool(of_fp8) == bool(named)
    assert named in "".join(of_fp8)


@pytest.mark.skipif(find_spec("llama_cpp") is not None, reason="the extra llamacpp is installed")
def test_four_bits_are_refused_without_the_quantizer(tmp_path: Path) -> None:
    config = config_of({"source": "huggingface", "name": "Qwen/Qwen3-8B"}, ("gguf-q4_k_m",))
    assert "install the extra `llamacpp`" in refused(config, Store(tmp_path))
    with pytest.raises(DataError, match="install the extra `llamacpp`"):
        quantize(tmp_path / "source", tmp_path / "target")


def test_a_check_says_it(tmp_path: Path) -> None:
    config = config_of({"source": "huggingface", "name": "Qwen/Qwen3.5-0.8B"})
    with pytest.raises(ConfigError, match="export: GGUF, as llama.cpp reads it, has no names for"):
        refuse_wrong(config, Store(tmp_path))
