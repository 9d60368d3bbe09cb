"""The merge stage refuses what is not the trained model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from pipeline_lib.base.errors import DataError, IntegrityError, TrainingError
from pipeline_lib.config.schema import Lora, Train
from pipeline_lib.config.sources import TinyModel
from pipeline_lib.data.download.tiny import build_tiny
from pipeline_lib.data.tokenize.worker import Limits
from pipeline_lib.publish.merge import judge, merged_model, refuse_unfit_weights, stop_at_end_of_turn, stored_dtype
from pipeline_lib.train.checkpoint import save_tensors
from pipeline_lib.train.model import add_adapters, load_base
from pipeline_lib.train.optimizer import trainable
from tests.train.conftest import write_model

LORA = Train(method="lora", precision="fp32", lora=Lora(rank=4, alpha=8))
TOKENS = torch.arange(3, 23).unsqueeze(0)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_model(tmp_path / "base")
    return tmp_path / "base"


def logits_of(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits
    return found


def test_folded_adapters_say_what_the_adapted_model_said(base: Path, tmp_path: Path) -> None:
    adapted = add_adapters(load_base(base, torch.float32), LORA.lora, seed=0)
    with torch.no_grad():
        for name, parameter in trainable(adapted).items():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    save_tensors(tmp_path / "trained" / "weights", {name: p.detach() for name, p in trainable(adapted).items()})
    expected = logits_of(adapted)
    merged = merged_model(base, tmp_path / "trained", LORA)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    assert torch.allclose(logits_of(merged), expected, atol=1e-5)
    assert not torch.allclose(logits_of(load_base(base, torch.float32)), expected, atol=1e-2)


def test_tied_weights_stay_one_tensor_on_disk(base: Path, tmp_path: Path) -> None:
    model = load_base(base, torch.float32)
    save_tensors(tmp_path / "trained" / "weights", {name: p.detach() + 0.5 for name, p in trainable(model).items()})
    merged = merged_model(base, tmp_path / "trained", Train(precision="fp32"))
    merged.save_pretrained(tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert torch.equal(logits_of(loaded), logits_of(merged))


def test_a_missing_tensor_is_named(base: Path, tmp_path: Path) -> None:
    tensors = {name: p.detach() for name, p in trainable(load_base(base, torch.float32)).items()}
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_tensors(tmp_path / "trained" / "weights", tensors)
    with pytest.raises(IntegrityError, match="layers.1.mlp.up_proj.weight"):
        merged_model(base, tmp_path / "trained", Train(precision="fp32"))


def test_a_weight_that_is_not_finite_is_named(base: Path) -> None:
    model = load_base(base, torch.float32)
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.up_proj.weight")[0, 0] = float("nan")
    with pytest.raises(TrainingError, match="layers.0.mlp.up_proj.weight is not finite"):
        refuse_unfit_weights(model)


def test_logits_that_differ_are_refused_with_the_figures() -> None:
    expected = torch.randn(4, 10)
    assert judge(expected + 1e-6, expected, 1e-4)["relative_difference"] < 1e-4
    with pytest.raises(TrainingError, match="logits differ by .* tolerance 1e-04; nothing was published"):
        judge(expected * 1.01, expected, 1e-4)
    with pytest.raises(TrainingError, match="logits differ by nan"):
        judge(expected * float("nan"), expected, 1e-4)
    with pytest.raises(TrainingError, match="shape"):
        judge(expected[:2], expected, 1e-4)


@pytest.mark.parametrize("stops", [None, 0, [0]])
def test_generation_stops_where_turns_end(tmp_path: Path, stops: object) -> None:
    """Qwen3-Base names only <|endoftext|> (0 here); the tuned model ends its turns with <|im_end|>."""
    build_tiny(TinyModel(source="tiny", vocab_tokens=512, hidden_size=32, layers=1), tmp_path, lambda _: None)
    path = tmp_path / "generation_config.json"
    config = json.loads(path.read_text())
    end = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<|im_end|>")
    assert end in config["eos_token_id"]
    config.pop("eos_token_id")
    path.write_text(json.dumps({**config, "eos_token_id": stops} if stops is not None else config))
    stop_at_end_of_turn(tmp_path)
    assert json.loads(path.read_text())["eos_token_id"] == [end, *([0] if stops is not None else [])]


def test_a_template_that_never_ends_is_one_clear_error(tmp_path: Path) -> None:
    build_tiny(TinyModel(source="tiny", vocab_tokens=512, hidden_size=32, layers=1), tmp_path, lambda _: None)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(loop)
    with pytest.raises(DataError, match="rendering the chat template of .*: more than 0.5 s of CPU time"):
        stop_at_end_of_turn(tmp_path, Limits(cpu_s=0.5))


def test_the_exported_precision_is_the_base_models(base: Path) -> None:
    assert stored_dtype(base) == torch.float32
    config = base / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    assert stored_dtype(base) == torch.bfloat16
