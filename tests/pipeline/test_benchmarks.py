"""Benchmarks through real Snakemake: both models asked, a verdict, and what another rule reruns."""

import json

import pytest

from pipeline_lib.core.files import write_jsonl
from pipeline_lib.records.benchmark import BenchmarkAnswer, Benchmarks, Overlaps
from pipeline_lib.records.record import read_record, read_records
from tests.pipeline.conftest import Project, executed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_processes")]

QUESTIONS = 40
ROWS = "{source: file, path: rows.jsonl}"
ASKED = """
  benchmarks:
    - {name: opening, path: opening.jsonl, score: contains, max_new_tokens: 4}
    - {name: nearest, path: nearest.jsonl, score: choice, few_shot: 2}
"""


def test_both_models_are_asked_and_a_verdict_is_told(project: Project) -> None:
    opening = [{"question": f"What does f{n} do?", "answer": "e"} for n in range(QUESTIONS)]
    in_rows = [f"How many of the {n} grey parrots sat on the old wall?" for n in range(6)]
    opening[:6] = [{"question": text, "answer": "e"} for text in in_rows]
    write_jsonl(project.root / "rows.jsonl", [{"prompt": t, "completion": "Two."} for t in in_rows])
    project.edit("{source: pydoc, max_rows: 400}", "{source: pydoc, max_rows: 400}, " + ROWS)
    write_jsonl(project.root / "opening.jsonl", opening)
    nearest = [{"question": "1 or 2?", "choices": ["1", "2"], "answer": n % 2} for n in range(10)]
    write_jsonl(project.root / "nearest.jsonl", nearest)
    project.edit("epochs: 2", "max_steps: 6")
    text = project.config.read_text()
    evaluate = "evaluate: {generations: 2, max_new_tokens: 8}\n"
    assert evaluate in text
    asked = f"evaluate:\n  generations: 2\n  max_new_tokens: 8{ASKED}"
    project.config.write_text(text.replace(evaluate, f"{asked}ship: {{keep: {{nearest: -0.9}}}}\n"))
    output = project.snakemake().stdout
    assert executed(output).count("benchmark") == 2
    assert executed(output).count("overlap") == 1
    sealed = project.sealed("benchmark")
    found = read_record(Benchmarks, sealed / "benchmark.json").compared
    assert list(found) == ["nearest", "opening"]
    assert {name: one.tuned.questions for name, one in found.items()} == {
        "opening": QUESTIONS,
        "nearest": 8,
    }
    # both models find the same choice more probable each time
    assert (found["nearest"].base.right, found["nearest"].tuned.right) == (4, 4)
    answers = read_records(BenchmarkAnswer, sealed / "answers.jsonl")
    assert len(answers) == QUESTIONS + 8
    unended = sum("unended" in answer.faults for answer in answers)
    assert found["opening"].tuned.faults.get("unended", 0) == unended
    page = (project.root / "results/small/report.html").read_text()
    assert "May it ship?" in page
    assert "Ship: nearest +0.0 points (" in page
    verdict = project.run("qwen3", "verdict", "config/config.yaml")
    assert verdict.stdout.splitlines()[0].startswith("ship.keep.nearest: nearest +0.0 points")
    summary = json.loads((project.sealed("report") / "summary.json").read_text())
    assert summary["benchmark"]["nearest"] == {"base": 0.5, "tuned": 0.5, "difference": 0.0}
    assert summary["ship"] == "ship"

    # what stands in the training rows is listed, and taken out beside
    overlaps = read_record(Overlaps, project.sealed("overlap") / "overlap.json").benchmarks
    touched = {one.prompt for one in overlaps["opening"].touched}
    assert touched
    assert touched <= set(in_rows)
    assert overlaps["opening"].too_short == QUESTIONS - 6
    assert not overlaps["nearest"].touched
    assert summary["benchmark"]["opening"]["clean"]["questions"] == QUESTIONS - len(touched)
    assert "opening, without those in the training rows" in page
    assert min(touched) in page
    told = project.run("qwen3", "summary", "config/config.yaml").stdout
    assert f"without {len(touched)} trained on" in told

    # a verdict computes nothing, and the report shows it when it is made again
    project.edit("keep: {nearest: -0.9}", "gain: {nearest: 0.05}")
    unknown = project.run("qwen3", "verdict", "config/config.yaml", check=False)
    assert unknown.returncode == 79
    assert "error: Not enough questions to tell: nearest +0.0 points (" in unknown.stdout
    project.edit("gain: {nearest: 0.05}", "gain: {nearest: 0.9}")
    refused = project.run("qwen3", "verdict", "config/config.yaml", check=False)
    assert refused.returncode == 77
    assert executed(project.snakemake().stdout) == ["report"]
    page = (project.root / "results/small/report.html").read_text()
    assert "Do not ship: nearest +0.0 points (" in page

    # nor is it pushed to a hub
    project.config.write_text(f"{project.config.read_text()}push: {{modelscope: org/name}}\n")
    refused = project.snakemake(check=False)
    assert refused.returncode != 0
    assert "push: nothing was uploaded: Do not ship: nearest +0.0 points (" in refused.stdout
