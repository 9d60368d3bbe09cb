"""Two steps of the real run, through save, stop, resume, merge and load; and its continuation."""

import json
import re
from collections.abc import Iterator

import pytest

from tests.pipeline.conftest import Project, executed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_processes")]


@pytest.fixture(scope="module")
def rehearsed(small: Project, tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, str]:
    """A project that was rehearsed, and what was said."""
    project = small.copy_to(tmp_path_factory.mktemp("rehearsed") / "project")
    project.forget_training()
    return project, project.snakemake("rehearse").stdout


@pytest.fixture
def project(rehearsed: tuple[Project, str]) -> Iterator[Project]:
    """The same, its config given back afterwards."""
    before = rehearsed[0].config.read_text()
    yield rehearsed[0]
    rehearsed[0].config.write_text(before)


def events(project: Project, name: str) -> list[int]:
    """The steps of the events of that name of the finished training."""
    lines = (project.sealed("train") / "events.jsonl").read_text().splitlines()
    return [event["step"] for event in map(json.loads, lines) if event["event"] == name]


def test_it_trains_twice_merges_loads_and_says_what_the_run_would_cost(
    rehearsed: tuple[Project, str],
) -> None:
    project, output = rehearsed
    assert executed(output) == ["merge", "train", "train"]
    assert "small: train (rehearsal: to step 1, saved)" in output
    assert re.search(
        r"^  resume, train to step 2 +[\d.]+ m?s +continued from step 1$", output, re.MULTILINE
    )
    assert re.search(
        r"^  load with transformers +[\d.]+ m?s +\d+ tokens are answered with: \S",
        output,
        re.MULTILINE,
    )
    assert re.search(
        r"^  time of a step +predicted .+ \(.+ to .+\) +measured [\d.]+ m?s", output, re.MULTILINE
    )
    [steps] = re.findall(r"^  steps +(\d+)$", output, re.MULTILINE)
    plan = json.loads((project.sealed("plan") / "plan.json").read_text())
    assert int(steps) == plan["batch"]["steps"] > 2
    assert re.search(
        r"^  CPU core-hours +[\d.]+ \([\d.]+ to [\d.]+\) on 1 CPU core$", output, re.MULTILINE
    )
    assert re.search(
        r"^  disk for checkpoints +[\d.]+ MB for 3 of \d+ kB; .+ are free$", output, re.MULTILINE
    )


def test_only_checkpoints_stay_and_all_is_not_changed(project: Project) -> None:
    assert not list(project.store.root.glob("train/*"))
    assert not list(project.store.root.glob("merge/*"))
    assert sorted(path.name for path in project.root.glob("runs/*/checkpoints/*")) == [
        "step-00000001",
        "step-00000002",
    ]
    assert executed(project.snakemake("-n").stdout) == [
        "evaluate",
        "evaluate",
        "merge",
        "report",
        "train",
    ]
    assert "has 10 stages" in project.run("python", "-m", "pipeline_lib", "check").stdout


def test_again_it_shows_what_was_found_and_trains_nothing(project: Project) -> None:
    output = project.snakemake("rehearse").stdout
    assert executed(output) == []
    assert "nothing to rehearse: already trained to step 2" in output
    assert "load with transformers" in output


def test_a_run_of_two_steps_is_not_rehearsed(project: Project) -> None:
    project.edit("global_batch_tokens: 2048", "global_batch_tokens: 16384")
    project.edit("epochs: 2", "epochs: 1")
    for _ in range(2):
        output = project.snakemake("rehearse").stdout
        assert re.search(
            r"^nothing to rehearse: the whole run has (2 steps|1 step)$", output, re.MULTILINE
        )
    assert executed(output) == [], "now that the plan knows"
    assert not list(project.store.root.glob("merge/*"))


def test_a_phase_that_fails_ends_it_and_the_same_command_continues(project: Project) -> None:
    project.edit("epochs: 2", "epochs: 2, seed: 7")
    proof = project.root / "pipeline_lib/export/proof.py"
    text = proof.read_text()
    assert "\nLOGIT_TOLERANCE = 1e-4" in text
    # which nothing meets
    proof.write_text(text.replace("\nLOGIT_TOLERANCE = 1e-4", "\nLOGIT_TOLERANCE = -1.0"))
    failed = project.snakemake("rehearse", check=False)
    proof.write_text(text)
    assert failed.returncode != 0
    assert "the exported model is not the trained one" in failed.stdout
    assert len(list(project.store.root.glob("train/*.ok"))) == 2, "what was trained waits"
    output = project.snakemake("rehearse").stdout
    assert executed(output) == ["merge"]
    assert "the whole run" in output
    assert not list(project.store.root.glob("train/*.ok"))


def test_the_run_continues_from_the_rehearsal_and_comes_out_as_if_there_had_been_none(
    project: Project, small: Project
) -> None:
    """The last of this module: it finishes the run."""
    project.snakemake(project.target("merge"))
    assert events(project, "run.resumed") == [1, 2]
    assert events(small, "run.resumed") == []
    assert project.weights() == small.weights()
    assert "nothing to rehearse: the training is done" in project.snakemake("rehearse").stdout
