"""Many experiments in one DAG: what they share is made once, and one that fails stops none of the others."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.pipeline.conftest import Project, executed

SHARED = ["download", "download", "shard", "tokenize"]
OWN = ["evaluate", "merge", "plan", "report", "train"]
TOO_HIGH = "1.0e+30"  # no loss of it is finite


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Project, str]:
    """A sweep of three learning rates, the last of which fails, and what was said."""
    project = Project(tmp_path_factory.mktemp("swept"))
    project.config.write_text(f"{project.config.read_text()}sweep: {{train.lr: [1.0e-3, 4.0e-3, {TOO_HIGH}]}}\n")
    done = project.snakemake("--keep-going", check=False)
    assert done.returncode != 0
    return project, done.stdout


def lines_of(output: str) -> list[list[str]]:
    """The cells of the table of outcomes."""
    lines = re.findall(r"^(?:experiment|small-lr=\S+)  +.+$", output, re.MULTILINE)
    return [re.split(r"  +", line) for line in lines]


def test_what_is_shared_is_made_once_and_a_failure_stops_no_other(swept: tuple[Project, str]) -> None:
    project, output = swept
    made = Counter(executed(output))
    assert made == Counter(
        {"download": 2, "tokenize": 1, "shard": 1, "plan": 3, "train": 3, **dict.fromkeys(OWN[:2], 2)}
    ) + Counter(report=2)
    for name in ("small-lr=0.001", "small-lr=0.004"):
        assert (project.root / "results" / name / "report.html").exists()
        assert (project.root / "results" / name / "model" / "config.json").exists()


def test_the_table_at_the_end_has_the_best_first_and_names_the_log_of_what_failed(swept: tuple[Project, str]) -> None:
    project, output = swept
    head, best, second, failed = lines_of(output)
    assert head == ["experiment", "state", "final loss", "held-out loss", "log"]
    assert [best[0], second[0]] == ["small-lr=0.004", "small-lr=0.001"]
    assert best[1] == second[1] == "done"
    assert float(best[3]) < float(second[3])
    assert failed[:2] == ["small-lr=1e30", "failed: train"]
    assert "error:" in (project.root / failed[-1]).read_text()
    assert "3 experiments: 2 done, 1 failed" in output


def test_without_the_one_that_failed_nothing_is_left_to_do(swept: tuple[Project, str]) -> None:
    project, _ = swept
    before = project.config.read_text()
    project.config.write_text(before.replace(f", {TOO_HIGH}", ""))
    output = project.snakemake().stdout
    table = project.run("python", "-m", "pipeline_lib", "summary").stdout
    project.config.write_text(before)
    assert "Nothing to be done" in output
    assert [line[:2] for line in lines_of(table)[1:]] == [["small-lr=0.004", "done"], ["small-lr=0.001", "done"]]


def test_commands_know_the_experiments_of_a_sweep(swept: tuple[Project, str]) -> None:
    project, _ = swept

    def command(*words: str, check: bool = True) -> str:
        return project.run("python", "-m", "pipeline_lib", *words, check=check).stdout

    assert f"no problems; 3 experiments have {len(SHARED) + 3 * len(OWN)} stages" in command("check")
    assert "3 experiments: 2 done, 1 not done" in command("summary")
    assert "Experiment small-lr=0.004" in command("summary", "--experiment", "small-lr=0.004")
    assert "a sweep of 3 experiments; name one with --experiment NAME: small-lr=0.001" in command(
        "publish", check=False
    )
    command("publish", "--experiment", "small-lr=0.004")
    resolved = project.root / "results" / "current" / "config.yaml"
    assert "experiment: small-lr=0.004\n" in resolved.read_text()
    assert f"{resolved.relative_to(project.root)}: no problems; experiment 'small-lr=0.004'" in command(
        "check", "results/current/config.yaml"
    )
    assert "plan of small-lr=0.001" in (shown := command("plan"))
    assert "the first of 3 experiments" in shown


def test_a_dry_run_of_twenty_shows_all_and_freezes_each(project: Project) -> None:
    sweep = "sweep: {train.lr: [1.0e-3, 2.0e-3, 3.0e-3, 4.0e-3, 5.0e-3], train.seed: [1, 2, 3, 4]}\n"
    project.config.write_text(project.config.read_text() + sweep)
    output = project.snakemake("-n").stdout
    assert executed(output) == sorted(SHARED + 20 * OWN)
    assert "small-lr=0.001-seed=1: tokenize (1 sources, up to 128 tokens a sample, shared with 19 more)" in output
    frozen = [json.loads(path.read_text()) for path in (project.store.root / "experiments").glob("*.json")]
    assert sorted(one["config"]["experiment"] for one in frozen) == sorted(
        f"small-lr=0.00{lr}-seed={seed}" for lr in range(1, 6) for seed in range(1, 5)
    )
    assert all(len(one["parts"]) == len(SHARED) + len(OWN) for one in frozen)
    [listed] = (project.store.root / "sweeps").glob("*.json")
    names = json.loads(listed.read_text())["experiments"]
    assert {Path(name).name for name in names} == {path.name for path in (project.store.root / "experiments").iterdir()}
    assert "error" not in project.snakemake("--profile", "slurm", "-n").stdout.lower().replace("errors/", "")
