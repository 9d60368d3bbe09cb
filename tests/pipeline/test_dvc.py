"""DVC records real runs of the pipeline and compares them."""

import csv
import io
import json
from pathlib import Path

import pytest

from tests.pipeline.conftest import Project, executed


@pytest.fixture
def repository(project: Project) -> Project:
    """The project as a git repository with its first commit, as a clone is."""
    project.environment |= {
        "VIRTUAL_ENV": str(Path(project.environment["PATH"].split(":")[0]).parent),
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "user.name",
        "GIT_CONFIG_VALUE_0": "test",
        "GIT_CONFIG_KEY_1": "user.email",
        "GIT_CONFIG_VALUE_1": "test@localhost",
    }
    (project.root / ".gitignore").write_text(
        "/store/\n/runs/\n/logs/\n/.snakemake/\n/results/*\n!/results/current/\n__pycache__/\n"
    )
    for command in (("init", "-q"), ("add", "-A"), ("commit", "-qm", "first")):
        project.git(*command)
    return project


def losses(project: Project) -> dict[str, float]:
    """The tuned loss of each recorded experiment by its learning rate."""
    rows = csv.DictReader(io.StringIO(project.run("dvc", "exp", "show", "--csv").stdout))
    return {row["train.lr"]: float(row["eval.tuned.loss"]) for row in rows if row["typ"].startswith("branch")}


def test_experiments_are_run_recorded_and_compared(repository: Project) -> None:
    repository.run("dvc", "exp", "run", "--name", "first")
    output = repository.run("dvc", "exp", "run", "--name", "second", "-S", "config/config.yaml:train.lr=5e-4").stdout
    assert executed(output) == ["evaluate", "merge", "plan", "report", "train"]
    recorded = losses(repository)
    assert len(recorded) == 2
    metrics = json.loads((repository.root / "results/current/metrics.json").read_text())
    assert recorded["0.0005"] == pytest.approx(metrics["eval"]["tuned"]["loss"], rel=1e-3)
    assert recorded["0.004"] < recorded["0.0005"]
    difference = json.loads(repository.run("dvc", "metrics", "diff", "first", "second", "--json").stdout)
    changed = difference["results/current/metrics.json"]["eval.tuned.loss"]
    assert changed["new"] - changed["old"] == pytest.approx(changed["diff"])
    repository.run("dvc", "plots", "diff", "first", "second")
    page = (repository.root / "dvc_plots/index.html").read_text()
    assert '"rev": "first"' in page
    assert '"rev": "second"' in page


def test_going_back_reruns_nothing_and_records_the_first_result_again(repository: Project) -> None:
    repository.run("dvc", "exp", "run", "--name", "first")
    first = (repository.root / "results/current/metrics.json").read_text()
    repository.run("dvc", "exp", "run", "--name", "second", "-S", "config/config.yaml:train.lr=5e-4")
    assert (repository.root / "results/current/metrics.json").read_text() != first
    output = repository.run("dvc", "exp", "run", "--name", "back", "-S", "config/config.yaml:train.lr=4e-3").stdout
    assert "Nothing to be done" in output
    assert (repository.root / "results/current/metrics.json").read_text() == first
