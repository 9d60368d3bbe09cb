"""dvc.yaml as dvc sees it: one stage without outs, and comparisons of results/current only."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent

# Stands for the pipeline: whatever the config says, publish it and a loss that depends on it.
STAND_IN = """
import json, shutil
from pathlib import Path
from pipeline_lib.config.load import load_config
config = load_config(Path("config/config.yaml"))
current = Path("results/current")
current.mkdir(parents=True, exist_ok=True)
shutil.copy("config/config.yaml", current)
(current / "metrics.json").write_text(json.dumps({"eval": {"tuned": {"loss": 2 + config.train.lr}}}))
rows = "".join(f"{step},{3 - step * config.train.lr},{config.train.lr},1000,1\\n" for step in (1, 2, 3))
(current / "curves.csv").write_text("step,loss,lr,tokens_per_s,grad_norm\\n" + rows)
"""


def read_yaml(path: Path) -> Any:
    return YAML(typ="safe").load(path)


def test_one_stage_without_outs_and_nothing_but_the_record_is_compared() -> None:
    document = read_yaml(ROOT / "dvc.yaml")
    assert list(document["stages"]) == ["pipeline"]
    stage = document["stages"]["pipeline"]
    assert not {"outs", "metrics", "plots"} & stage.keys()
    assert stage["always_changed"] is True
    assert all((ROOT / path).exists() for path in stage["deps"])
    plotted = {path for plot in document["plots"] for path in [*plot.popitem()[1]["y"]]}
    assert {*document["params"], *document["metrics"], *plotted} == {
        *("results/current/config.yaml", "results/current/metrics.json", "results/current/curves.csv"),
    }


class Clone:
    """A git repository with this project's dvc files and config, and a stand-in for the pipeline."""

    def __init__(self, root: Path) -> None:
        """Make it, with a first commit."""
        self.root = root
        self.environment = {
            **os.environ,
            "VIRTUAL_ENV": str(root / "env"),
            "PYTHONPATH": str(ROOT),
            "GIT_CONFIG_GLOBAL": "/dev/null",
        }
        for name in (".dvc/config", ".dvc/.gitignore", ".dvcignore", ".gitignore", "dvc.yaml", "config/config.yaml"):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
        for name in ("workflow", "pipeline_lib", "env/bin"):
            (root / name).mkdir(parents=True)
            (root / name / "keep").touch()
        (root / "Snakefile").touch()
        (root / "stand_in.py").write_text(STAND_IN)
        self._command("snakemake", "exit 0")
        self._command("python", f'shift 2; [ "$1" = publish ] && exec {sys.executable} stand_in.py')
        for arguments in (["init", "-q"], ["config", "user.name", "test"], ["config", "user.email", "test@localhost"]):
            self.run("git", *arguments)
        self.commit()

    def _command(self, name: str, script: str) -> None:
        path = self.root / "env" / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def run(self, *command: str) -> str:
        """Run `command` there; its output."""
        done = subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(f"{command} gave {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def dvc(self, *arguments: str) -> str:
        """Run dvc there; its output."""
        return self.run(str(BIN / "dvc"), *arguments)

    def commit(self) -> None:
        """Commit everything."""
        self.run("git", "add", "--all")
        self.run("git", "commit", "-q", "-m", "all")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Clone:
    """A clone where the default config ran and was committed, and then ran with another learning rate."""
    clone = Clone(tmp_path_factory.mktemp("clone"))
    clone.dvc("exp", "run", "--name", "first")
    clone.commit()
    clone.dvc("exp", "run", "--name", "second", "-S", "config/config.yaml:train.lr=5e-4")
    return clone


def test_an_overridden_number_reaches_the_strict_loader_as_a_number(clone: Clone) -> None:
    assert read_yaml(clone.root / "config/config.yaml")["train"]["lr"] == 5e-4
    assert json.loads((clone.root / "results/current/metrics.json").read_text())["eval"]["tuned"]["loss"] == 2.0005


def test_exp_show_tells_the_runs_apart(clone: Clone) -> None:
    rows = list(csv.DictReader(io.StringIO(clone.dvc("exp", "show", "--csv"))))
    found = {row["Experiment"] or row["rev"]: (row["train.lr"], row["eval.tuned.loss"]) for row in rows}
    assert found["second"] == ("0.0005", "2.0005")
    assert found["workspace"] == ("0.0005", "2.0005")
    assert ("0.003", "2.003") in found.values()


def test_metrics_params_and_plots_are_compared(clone: Clone) -> None:
    assert "-0.0025" in clone.dvc("metrics", "diff")
    assert json.loads(clone.dvc("params", "diff", "--json"))["results/current/config.yaml"]["train.lr"] == {
        "old": 0.003,
        "new": 0.0005,
        "diff": -0.0025,
    }
    plots = json.loads(clone.dvc("plots", "diff", "HEAD", "workspace", "--json"))
    assert not plots.get("errors")
    assert plots["data"].keys() == {"loss", "learning rate", "throughput"}
    assert all(len(drawn[0]["content"]["data"]["values"]) == 6 for drawn in plots["data"].values())


def test_a_run_without_any_change_publishes_again(clone: Clone) -> None:
    (clone.root / "results/current/metrics.json").unlink()
    clone.dvc("repro")
    assert (clone.root / "results/current/metrics.json").exists()
