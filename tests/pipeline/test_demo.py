"""The demo's model has learned: its answers to questions that it was not trained on are right."""

import json
import shutil

import pytest

from pipeline_lib.records.benchmark import Benchmarks
from pipeline_lib.records.record import read_record
from tests.pipeline.conftest import ROOT, Project

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.mark.slow
def test_its_answers_are_right(project: Project) -> None:
    for name in ("config.yaml", "demo.jsonl", "demo-questions.jsonl"):
        shutil.copy(ROOT / "config" / name, project.root / "config" / name)
    output = project.snakemake().stdout
    lines = (project.sealed("evaluate") / "generations.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    right = [answer for answer in answers if answer["tuned"] == answer["reference"]]
    assert len(answers) == 6
    assert len(right) >= 5
    sealed = project.sealed("benchmark") / "benchmark.json"
    capitals = read_record(Benchmarks, sealed).compared["capitals"]
    assert capitals.base.right == 0
    assert capitals.tuned.right >= 40
    assert capitals.tuned.questions == 48
    assert "Ship: capitals +" in output
