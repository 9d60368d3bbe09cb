"""A rewound training continues from the named checkpoint, and makes an undisturbed model."""

import json
from pathlib import Path

import pytest

from tests.pipeline.conftest import Project, executed

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.mark.slow
def test_the_next_snakemake_continues_from_the_named_step(small: Project, tmp_path: Path) -> None:
    project = small.copy_to(tmp_path / "project")
    project.forget_training()
    asked = project.config.read_text()
    project.edit("save_every_steps: 3", "save_every_steps: 3, keep_last: 9, until_step: 9")
    project.snakemake(project.target("train"))
    project.config.write_text(asked)
    command = ("python", "-m", "pipeline_lib", "rewind", "config/config.yaml", "--step")

    refused = project.run(*command, "4", check=False)
    assert (refused.returncode, "available steps: 3, 6, 9" in refused.stdout) == (2, True)
    project.run(*command, "3")
    assert "train" in executed(project.snakemake(project.target("merge")).stdout)

    events = [
        json.loads(line)
        for line in (project.sealed("train") / "events.jsonl").read_text().splitlines()
    ]
    assert [event["step"] for event in events if event["event"] == "run.resumed"] == [3]
    assert project.weights() == small.weights()
    finished = project.run(*command, "3", check=False)
    assert (finished.returncode, "this training is finished" in finished.stdout) == (1, True)
    assert "Traceback" not in refused.stdout + finished.stdout
