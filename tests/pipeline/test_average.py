"""The mean of the last checkpoints through real Snakemake: merged, proven, and judged."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.pipeline.conftest import Project, executed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_processes")]


def averaging(project: Project, train: str = "") -> None:
    project.edit("epochs: 2", f"max_steps: 6, keep_last: 5{train}")
    project.edit("save_every_steps: 3", "save_every_steps: 2")
    project.config.write_text(f"{project.config.read_text()}merge: {{average: {{last: 3}}}}\n")


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def test_the_mean_is_merged_and_the_better_of_it_and_the_last_is_named(project: Project) -> None:
    averaging(project)
    output = project.snakemake().stdout
    assert executed(output).count("merge") == 2
    merged = weights_in(project.root / "results/small/model")
    (run,) = (path.parent for path in project.root.glob("runs/*/checkpoints"))
    steps = {path.name: weights_in(path / "weights") for path in run.glob("checkpoints/step-*")}
    assert {"step-00000002", "step-00000004", "step-00000006"} <= set(steps)
    for name, values in merged.items():
        mean = torch.stack([tensors[name] for tensors in steps.values()]).mean(dim=0)
        assert torch.allclose(values.float(), mean, rtol=2**-8)  # of bf16
    parity = json.loads((project.sealed("merge") / "parity.json").read_text())
    assert parity["averaged_steps"] == [2, 4, 6]
    metrics = json.loads((project.sealed("evaluate") / "metrics.json").read_text())
    scores = metrics["eval"]
    assert scores["last"]["loss"] != scores["tuned"]["loss"]
    # the losses still fall steeply
    assert scores["last"]["loss"] < scores["tuned"]["loss"]
    better = "The last checkpoint is better than the mean of several"
    assert better in metrics["verdict"]["text"]
    assert better in output
    assert better in (project.sealed("report") / "report.html").read_text()
    summary = project.run("qwen3", "summary", "config/config.yaml").stdout
    assert "held-out loss, last checkpoint alone" in summary

    # without the section the last one is the model, and it is there already
    last = project.experiment().ref("last_merge")
    averaged = project.config.read_text()
    project.edit("merge: {average: {last: 3}}\n", "")
    assert project.experiment().ref("merge") == last
    assert executed(project.snakemake().stdout) == ["evaluate", "report"]

    # of a run that has fewer, and of checkpoints that are gone, a mean is refused
    project.config.write_text(averaged.replace("average: {last: 3", "average: {last: 4"))
    refused = project.snakemake(check=False).stdout
    assert "the run has 6 steps, too few for 4 checkpoints that are 2 apart" in refused
    project.config.write_text(averaged)
    shutil.rmtree(project.sealed("merge"))
    project.sealed("merge").with_suffix(".ok").unlink()
    shutil.rmtree(run / "checkpoints/step-00000002")
    refused = project.snakemake(check=False).stdout
    assert "has those after the steps 2, 4 and 6 in it" in refused
    assert "has none after 2" in refused


def test_a_mean_of_adapters_is_merged_and_leaves_no_adapter(project: Project) -> None:
    averaging(project, ", method: lora")
    project.snakemake("merge")
    folder = project.sealed("merge")
    assert json.loads((folder / "parity.json").read_text())["averaged_steps"] == [2, 4, 6]
    assert not (folder / "adapter").exists()
    assert (project.sealed("last_merge") / "adapter").is_dir()
    assert "the mean of those after the steps 2, 4, 6" in (folder / "README.md").read_text()
