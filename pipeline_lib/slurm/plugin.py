"""What Snakemake's SLURM plugin (2.8) lacks, made up for from outside: functions replaced in it.

Snakemake holds its executor's class by the time that rules are read, so that no subclass can take
its place.
"""

from pathlib import Path
from typing import Any

import snakemake_executor_plugin_slurm as plugin
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo


def outlive_a_silent_controller() -> None:
    """Let the plugin keep what it knows of the controller's memory of finished jobs.

    At each look at its jobs it asks for MinJobAge. It takes a controller that does not answer for
    one without such a memory, and turns to sacct; where that has nothing to say either, it forgets
    its jobs and waits for ever. It has no setting for this. What was known when the jobs were about
    to be submitted stays known.
    """
    known_s = plugin.get_min_job_age()
    ask = plugin.get_min_job_age
    plugin.get_min_job_age = lambda: ask() or known_s


def submit_only_what_is_missing() -> None:
    """Let the plugin submit no job whose outputs came to be after Snakemake had decided to run it.

    The job of a training makes those of its merge and evaluation (`launch/following.py`). Snakemake
    itself looks again only behind a checkpoint, and then at the whole DAG, for each training.
    """
    submit = plugin.Executor.run_jobs

    def run_jobs(executor: Any, jobs: list[Any]) -> None:
        missing = []
        for job in jobs:
            if not is_made(job):
                missing.append(job)
                continue
            if job.benchmark:  # Snakemake expects it of every job that has run
                benchmark = Path(job.benchmark)
                benchmark.parent.mkdir(parents=True, exist_ok=True)
                benchmark.touch()
            executor.run_job_pre(job)
            executor.report_job_success(SubmittedJobInfo(job))
        if missing:
            submit(executor, missing)

    plugin.Executor.run_jobs = run_jobs


def is_made(job: Any) -> bool:
    """Return whether all outputs of Snakemake's `job` exist."""
    return all(Path(output).exists() for output in job.output)
