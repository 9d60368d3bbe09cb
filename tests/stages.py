"""Runs the stages of an experiment in turn without Snakemake: by command, or in this process."""

import subprocess
import sys
from pathlib import Path

import pytest

from pipeline_lib.config.compile import Experiment, open_experiment
from pipeline_lib.core.stage import run_stage
from pipeline_lib.core.store import Store
from pipeline_lib.data import download, pool, shard, tokenize
from pipeline_lib.hub import splits
from pipeline_lib.plan import stage as plan
from tests.processes import FORK

HERE = {"download": download.run, "tokenize": tokenize.run, "shard": shard.run, "plan": plan.run}
ROOT = Path(__file__).resolve().parent.parent


def run_stages(config: Path, store: Store, last: str = "report") -> Experiment:
    """Run each stage up to `last`, in the specs' order; raises CalledProcessError with output."""
    experiment = open_experiment(config, store)
    store.write_specs(experiment.specs.values())
    for part, spec in experiment.specs.items():
        command = [
            sys.executable,
            "-m",
            "pipeline_lib",
            spec.stage,
            "--spec",
            str(store.spec_path(spec.digest)),
        ]
        if spec.stage == "train":
            command += ["--plan", str(store.pointer(experiment.ref("plan")))]
        subprocess.run(command, cwd=ROOT, check=True)
        if part == last:
            break
    return experiment


def fork_workers(patch: pytest.MonkeyPatch) -> None:
    """Begin workers with all imports done, which take a spawned one 1 s, or 3 with `datasets`."""
    for module in (pool, splits):
        patch.setattr(module, "_CONTEXT", FORK)


def run_stages_here(config: Path, store: Store, last: str) -> Experiment:
    """Run each stage up to `last`, none that trains, in this process, to spare imports."""
    experiment = open_experiment(config, store)
    store.write_specs(experiment.specs.values())
    with pytest.MonkeyPatch.context() as patch:
        fork_workers(patch)
        for part, spec in experiment.specs.items():
            run_stage(HERE[spec.stage], spec, store, print)
            if part == last:
                break
    return experiment
