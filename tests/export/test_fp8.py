"""A folder in FP8 is the merged model, by its proof and by transformers, or it is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from pipeline_lib.core.errors import DataError, TrainingError
from pipeline_lib.core.files import sha256_file
from pipeline_lib.core.spans import Spans
from pipeline_lib.export.fp8 import plan_folder
from pipeline_lib.export.fp8_proof import LOGIT_TOLERANCE, prove
from pipeline_lib.model.streaming import StreamedModel
from pipeline_lib.records.export import ExportParity
from tests.export.test_gguf import CPU, EXPERTS, READ_BY_ALL, SIZES, Exported, edit

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=128)),
}
UP = "model.layers.1.mlp.up_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(params=MODELS)
def merged(request: pytest.FixtureRequest, tmp_path: Path, tiny: Path) -> Exported:
    torch.manual_seed(0)
    return Exported(tmp_path, tiny, MODELS[request.param]())


@pytest.fixture
def qwen3(tmp_path: Path, tiny: Path) -> Exported:
    torch.manual_seed(0)
    return Exported(tmp_path, tiny, MODELS["qwen3"]())


def written(model: Exported, folder: Path | None = None) -> Path:
    """Write the FP8 folder of the model in `folder`, by default the merged one."""
    out = model.root / "fp8"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    plan_folder(folder or model.merged).write(out)
    return out


def proven(model: Exported, folder: Path) -> ExportParity:
    return prove(folder, model.merged, model.root, CPU, lambda _: None, Spans())


def test_a_folder_is_proven_and_its_bytes_are_the_same_each_time(merged: Exported) -> None:
    folder = written(merged)
    sha256 = sha256_file(folder / "model.safetensors")
    parity = proven(merged, folder)
    assert parity.value_difference == 0.0
    assert 0.0 < parity.relative_difference < LOGIT_TOLERANCE / 2
    assert parity.tensors["F8_E4M3"] == 14
    weights = load_file(folder / "model.safetensors")
    assert weights[UP].dtype == torch.float8_e4m3fn
    assert weights[f"{UP}_scale"].shape == (96, 1)
    assert weights["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert sha256_file(written(merged) / "model.safetensors") == sha256


def test_transformers_computes_what_the_proof_does(merged: Exported) -> None:
    folder = written(merged)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([merged.block.tokens.tolist()])
    with torch.no_grad():
        found = model(ids).logits[0]
    (exact,) = StreamedModel(merged.merged, torch.float32, CPU).probe_logits(
        merged.block, positions=torch.arange(ids.shape[1])
    )
    apart = float((found - exact).norm() / exact.norm())
    assert apart < LOGIT_TOLERANCE
    assert apart == pytest.approx(proven(merged, folder).relative_difference, rel=0.3)


def test_a_model_in_several_files_keeps_them(qwen3: Exported) -> None:
    model = AutoModelForCausalLM.from_pretrained(qwen3.merged, dtype=torch.bfloat16)
    (qwen3.merged / "model.safetensors").unlink()
    model.save_pretrained(qwen3.merged, max_shard_size="200KB")
    folder = written(qwen3)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index[UP] == index[f"{UP}_scale"]
    assert len(set(index.values())) > 1
    assert proven(qwen3, folder).value_difference == 0.0


def change(name: str, alter: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def changed(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors[name] = alter(tensors[name])
        save_file(tensors, path, {"format": "pt"})

    return changed


def activations_of_tensors(folder: Path) -> None:
    def alter(config: dict[str, Any]) -> None:
        group = config["quantization_config"]["config_groups"]["group_0"]
        group["input_activations"]["strategy"] = "tensor"

    edit(folder / "config.json", alter)


def lose_the_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def lose_the_stops(folder: Path) -> None:
    edit(folder / "generation_config.json", lambda config: config.pop("eos_token_id"))


def other_theta(folder: Path) -> None:
    edit(folder / "config.json", lambda config: config["rope_parameters"].update(rope_theta=4e4))


def forget_a_scale(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[f"{UP}_scale"]
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (change(f"{UP}_scale", lambda scale: scale * 1.02), f"{UP} differs"),
        (change(UP, lambda codes: codes.roll(1, dims=0)), f"{UP} differs"),
        (change(NORM, lambda norm: norm * 1.01), f"{NORM} differs"),
        (forget_a_scale, f"{UP}_scale is missing"),
        (activations_of_tensors, "another quantization_config"),
        (other_theta, "its config.json has other keys"),
        (lose_the_template, "another chat_template.jinja"),
        (lose_the_stops, "another generation_config.json"),
    ],
)
def test_a_folder_of_another_model_is_refused(
    qwen3: Exported, alter: Callable[[Path], None], message: str
) -> None:
    folder = written(qwen3)
    alter(folder)
    with pytest.raises(TrainingError, match=message):
        proven(qwen3, folder)


def test_a_row_of_zeros_and_one_of_a_single_value_survive(qwen3: Exported) -> None:
    def alter(weight: torch.Tensor) -> torch.Tensor:
        weight[3] = 0.0
        weight[5] = 7.0
        return weight

    change(UP, alter)(qwen3.merged)
    folder = written(qwen3)
    assert proven(qwen3, folder).value_difference == 0.0
    weights = load_file(folder / "model.safetensors")
    read = weights[UP].float() * weights[f"{UP}_scale"].float()
    assert not read[3].any()
    assert torch.allclose(read[5], torch.tensor(7.0), rtol=0.01)


def test_experts_are_refused_by_name(tmp_path: Path, tiny: Path) -> None:
    config = Qwen3MoeConfig(**SIZES, **READ_BY_ALL, **EXPERTS)
    model = Exported(tmp_path, tiny, Qwen3MoeForCausalLM(config))
    with pytest.raises(DataError, match="is not exported in FP8: it has experts"):
        plan_folder(model.merged)
