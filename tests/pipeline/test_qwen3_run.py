"""A whole run by `qwen3 run`, from a folder that is no clone."""

import copy
from pathlib import Path

import pytest

from tests.pipeline.conftest import Project


@pytest.mark.slow
def test_it_says_each_stage_and_where_the_result_is(small: Project, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "my.yaml").write_text(small.config.read_text())
    project = copy.copy(small)
    project.root = folder

    first = project.run("qwen3", "run", "my.yaml", "evaluate.generations=1").stdout
    stages = [line for line in first.splitlines() if line.startswith("[")]
    of_all = [f"[{number}/{len(stages)}" for number in range(1, len(stages) + 1)]
    assert [line.partition("]")[0] for line in stages] == of_all
    name = f"{small.experiment().name}-generations=1"
    assert f"model    results/{name}/model" in first
    assert (folder / "results" / name / "model" / "config.json").exists()

    second = project.run("qwen3", "run", "my.yaml", "evaluate.generations=1").stdout
    assert "all stages are done: nothing was computed" in second
    assert [line for line in second.splitlines() if line.startswith("verdict")] == [
        line for line in first.splitlines() if line.startswith("verdict")
    ]

    planned = project.run("qwen3", "run", "my.yaml", "train.seed=9", "-n").stdout
    assert "train (" in planned
    assert not (folder / "results" / f"{small.experiment().name}-seed=9").exists()
