"""A model of another family than Qwen3 through Snakemake: trained, merged and evaluated.

It is merged into its base's folder.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline_lib.core.files import read_json
from tests.pipeline.conftest import Project
from tests.tiny import tiny_model
from tests.train.loading import SIZES, add_other_parts, multimodal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_processes")]

LORA = "train: {method: lora, strategy: fsdp, lora: {rank: 4, alpha: 16}, precision"


def write_qwen3_5(folder: Path, has_experts: bool) -> None:
    """A small Qwen3.5 with pictures and a multi-token head, and the tokenizer of the demo."""
    shutil.copytree(tiny_model(), folder)
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink()
    torch.manual_seed(0)
    model = multimodal({**SIZES, "vocab_size": 512, "max_position_embeddings": 1024}, has_experts)
    model.save_pretrained(folder, max_shard_size="60KB")
    add_other_parts(folder, torch.float32)


@pytest.mark.parametrize("has_experts", [False, True], ids=["dense", "experts"])
def test_qwen3_5_is_trained_merged_into_its_base_and_evaluated(
    project: Project, has_experts: bool
) -> None:
    write_qwen3_5(project.root / "base", has_experts)
    project.edit(
        "{source: tiny, vocab_tokens: 512, hidden_size: 32, layers: 2}",
        "{source: local, path: base}",
    )
    project.edit("train: {precision", LORA)
    project.edit("lr: 4.0e-3", "lr: 2.0e-2")
    ranks = "1 cpu rank" if has_experts else "2 cpu ranks"
    project.set_cluster(f"{{cpu_ranks: {ranks[0]}}}")
    output = project.snakemake(project.target("evaluate")).stdout
    assert f"fsdp on {ranks}" in output
    metrics = json.loads((project.sealed("evaluate") / "metrics.json").read_text())
    assert metrics["eval"]["tuned"]["loss"] < metrics["eval"]["base"]["loss"] - 0.1
    parity = json.loads((project.sealed("merge") / "parity.json").read_text())
    assert parity["relative_difference"] <= parity["tolerance"] == 1e-4

    base, merged = project.root / "base", project.sealed("merge")
    assert read_json(merged / "config.json") == read_json(base / "config.json")
    same = []
    for file in sorted(base.glob("*.safetensors")):
        stored, written = load_file(file), load_file(merged / file.name)
        assert stored.keys() == written.keys()
        same += [name for name in stored if torch.equal(stored[name], written[name])]
    assert any(name.startswith("mtp.") for name in same) and any(
        name.startswith("model.visual.") for name in same
    )
    changed = {name for file in base.glob("*.safetensors") for name in load_file(file)} - set(same)
    assert any("linear_attn.in_proj_qkv" in name for name in changed)
    assert not any("in_proj_a" in name or "in_proj_b" in name for name in changed)
    card = (merged / "README.md").read_text()
    assert "Tensors called `model.visual.*` and `mtp.*` are the base model's, bit for bit." in card
