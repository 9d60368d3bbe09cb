"""The demo's model has learned: its answers to questions that it was not trained on are right."""

import json
import shutil

import pytest

from tests.pipeline.conftest import ROOT, Project

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.mark.slow
def test_its_answers_are_right(project: Project) -> None:
    for name in ("config.yaml", "demo.jsonl"):
        shutil.copy(ROOT / "config" / name, project.root / "config" / name)
    project.snakemake()
    lines = (project.sealed("evaluate") / "generations.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    right = [answer for answer in answers if answer["tuned"] == answer["reference"]]
    assert len(answers) == 6
    assert len(right) >= 5
