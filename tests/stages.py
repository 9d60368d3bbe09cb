"""Runs the stages of an experiment one after the other by their own command, without Snakemake."""

import subprocess
import sys
from pathlib import Path

from pipeline_lib.config.compile import Experiment, open_experiment
from pipeline_lib.core.store import Store

ROOT = Path(__file__).resolve().parent.parent


def run_stages(config: Path, store: Store, last: str = "report") -> Experiment:
    """Run every stage up to `last`, in the order of the specs; raises CalledProcessError with the output."""
    experiment = open_experiment(config, store)
    store.write_specs(experiment.specs.values())
    for part, spec in experiment.specs.items():
        command = [sys.executable, "-m", "pipeline_lib", spec.stage, "--spec", str(store.spec_path(spec.digest))]
        if spec.stage == "train":
            command += ["--plan", str(store.pointer(experiment.ref("plan")))]
        subprocess.run(command, cwd=ROOT, check=True)
        if part == last:
            break
    return experiment
