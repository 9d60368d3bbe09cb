"""QLoRA through real Snakemake: the base in 4 bits shares data, is merged, proven and reported.

It is also evaluated.
"""

import json

import pytest

from tests.pipeline.conftest import Project, executed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_processes")]

LORA = "train: {method: lora, strategy: fsdp, lora: {rank: 8, alpha: 16"
AFTER_TRAINING = ["evaluate", "merge", "report"]


def test_a_base_in_four_bits_is_trained_merged_and_evaluated(project: Project) -> None:
    project.edit("hidden_size: 32", "hidden_size: 64")
    project.edit("train: {precision", f"{LORA}}}, precision")
    project.edit("lr: 4.0e-3", "lr: 1.0e-2")
    unquantized = project.experiment()
    project.edit("alpha: 16}", "alpha: 16, base: nf4}")
    quantized = project.experiment()
    changed = {part for part in quantized.specs if quantized.ref(part) != unquantized.ref(part)}
    assert changed == {"plan", "train", "merge", "evaluate", "report"}

    output = project.snakemake().stdout
    assert "fsdp on 1 cpu rank" in output
    metrics = json.loads((project.sealed("evaluate") / "metrics.json").read_text())
    assert metrics["eval"]["tuned"]["loss"] < metrics["eval"]["base"]["loss"] - 0.1
    parity = json.loads((project.sealed("merge") / "parity.json").read_text())
    assert parity["relative_difference"] <= parity["tolerance"] == 1e-4
    assert "base in nf4" in (project.root / "results/small/report.html").read_text()

    project.config.write_text(project.config.read_text() + "merge: {base: original}\n")
    output = project.snakemake().stdout
    assert executed(output) == AFTER_TRAINING
    assert "merge: its adapters were trained on a base in 4 bits" in output
    again = json.loads((project.sealed("evaluate") / "metrics.json").read_text())
    assert again["eval"]["base"] == metrics["eval"]["base"]
    assert again["eval"]["tuned"]["loss"] != metrics["eval"]["tuned"]["loss"]
    page = (project.root / "results/small/report.html").read_text()
    assert "The exported model is not proven to be the trained one" in page
    assert "not proven" in (project.root / "results/small/model/README.md").read_text()
