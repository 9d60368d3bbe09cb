"""Merging adapters trained on a 4-bit base: into that base, proven, or the original, unproven."""

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes import functional as bnb
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pipeline_lib.config.train import Lora, Train
from pipeline_lib.core.errors import TrainingError
from pipeline_lib.core.files import read_json
from pipeline_lib.core.stage import Job
from pipeline_lib.export.adapter import UNNAMED_BASE
from pipeline_lib.export.merge import run
from pipeline_lib.model.build import build_trainable, load_base
from pipeline_lib.model.probe import probe_logits, save_probe
from pipeline_lib.model.weights import load_weights
from tests.export.test_fold import BLOCK, TOKENS, leave_training, logits_of, stage_job
from tests.train.loading import SIZES, multimodal, write_random

CPU = torch.device("cpu")
WIDE: dict[str, Any] = {
    **SIZES,
    "hidden_size": 192,
    "intermediate_size": 320,
    "head_dim": 48,
    "vocab_size": 512,
}
LORA = Lora(rank=4, alpha=8, base="nf4", targets=("q_proj", "k_proj", "o_proj", "down_proj"))
TRAIN = Train(method="lora", precision="fp32", lora=LORA)


@pytest.fixture
def base(tmp_path: Path, tiny: Path) -> Path:
    """A model in several files, whose inputs are multiples of 64."""
    return write_wide(tmp_path / "base", "qwen3", tiny)


def write_wide(folder: Path, kind: str, tiny: Path) -> Path:
    if kind == "qwen3.5":
        model = multimodal({**WIDE, "linear_key_head_dim": 16, "linear_value_head_dim": 16})
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**WIDE, tie_word_embeddings=True))
    write_random(folder, model, torch.float32, max_shard_size="300KB")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((tiny / name).read_bytes())
    return folder


@pytest.fixture
def trained(base: Path, tmp_path: Path) -> nn.Module:
    """The model as it was trained, and what the training left."""
    model = build_trainable(base, TRAIN)
    load_weights(model, base, CPU, TRAIN.seed)
    leave_training(model, tmp_path / "trained")
    return model


def job_of(folder: Path, tmp_path: Path, said: list[str], **merge: Any) -> Job:
    job = stage_job(
        folder, tmp_path / "trained", TRAIN, tmp_path / f"out-{'-'.join(merge.values())}"
    )
    return replace(job, spec=replace(job.spec, settings=merge), say=said.append)


def weights_of(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def dequantized(weight: Tensor) -> Tensor:
    codes, state = bnb.quantize_4bit(
        weight, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    return bnb.dequantize_4bit(codes, state)


def test_the_trained_base_is_merged_and_proven(
    base: Path, tmp_path: Path, trained: nn.Module
) -> None:
    said: list[str] = []
    job = job_of(base, tmp_path, said)
    parity = run(job)
    assert parity["relative_difference"] < 1e-5
    assert "from the trained model's" in said[-1]
    assert "QLoRA (base in 4 bits: NF4) fine-tuning" in (job.out / "README.md").read_text()
    stored, merged = weights_of(base), weights_of(job.out)
    assert merged.keys() == stored.keys()
    up, down, norm = (
        f"model.layers.1.{name}.weight"
        for name in ("mlp.up_proj", "mlp.down_proj", "input_layernorm")
    )
    assert torch.equal(merged[up], dequantized(stored[up]))  # quantized, without an adapter
    assert not torch.equal(merged[down], dequantized(stored[down]))
    assert torch.equal(merged[norm], stored[norm])
    torch.testing.assert_close(
        logits_of(load_base(job.out, torch.float32)), logits_of(trained), rtol=1e-4, atol=1e-4
    )


def test_another_base_than_the_trained_one_is_refused(
    base: Path, tmp_path: Path, trained: nn.Module
) -> None:
    save_probe(
        tmp_path / "trained", BLOCK, probe_logits(load_base(base, torch.float32), BLOCK, CPU)
    )
    with pytest.raises(TrainingError, match="is not the trained one"):
        run(job_of(base, tmp_path, []))


def test_the_original_base_is_merged_and_nothing_is_claimed(
    base: Path, tmp_path: Path, trained: nn.Module
) -> None:
    said: list[str] = []
    job = job_of(base, tmp_path, said, base="original")
    assert run(job).keys() == {"unproven"}
    assert "logits were not compared" in said[-1]
    assert read_json(job.out / "parity.json").keys() == {"unproven"}
    card = (job.out / "README.md").read_text()
    assert (
        "This model is not proven to be the trained one: its adapters were trained on a base in 4 "
        "bits" in card
    )
    assert "reproduce" not in card
    up = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(weights_of(job.out)[up], weights_of(base)[up])
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = logits_of(PeftModel.from_pretrained(plain, job.out / "adapter"))
    torch.testing.assert_close(
        logits_of(load_base(job.out, torch.float32)), expected, rtol=1e-4, atol=1e-4
    )
    assert not torch.allclose(expected, logits_of(trained), atol=1e-2)


def loaded_by_the_card(folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model that the code in adapter/README.md loads."""
    card = (folder / "adapter" / "README.md").read_text()
    code = card.partition("```python\n")[2].partition("```")[0]
    assert code in (folder / "README.md").read_text()
    script = folder / "load.py"
    script.write_text(code.replace(UNNAMED_BASE, str(base)))
    monkeypatch.chdir(folder)
    return runpy.run_path(str(script))["model"].train()  # else some CPUs compute in bf16


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5"])
def test_the_adapter_is_the_trained_model_on_the_base_that_its_card_loads(
    kind: str, tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With transformers, bitsandbytes and peft alone; Qwen3.5 keeps some linears unquantized."""
    folder = write_wide(tmp_path / "base", kind, tiny)
    train = TRAIN.model_copy(update={"lora": LORA.model_copy(update={"targets": "all-linear"})})
    trained = build_trainable(folder, train)
    load_weights(trained, folder, CPU, train.seed)
    leave_training(trained, tmp_path / "trained")
    job = stage_job(folder, tmp_path / "trained", train, tmp_path / "out")
    run(job)
    model = loaded_by_the_card(job.out, folder, monkeypatch)
    names = {
        name.rpartition(".")[2]
        for name, each in model.named_modules()
        if type(each).__name__ == "Linear4bit"
    }
    assert not names & {"in_proj_a", "in_proj_b", "lm_head"}
    with torch.no_grad():
        found = model(TOKENS).logits
    expected = logits_of(trained)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
