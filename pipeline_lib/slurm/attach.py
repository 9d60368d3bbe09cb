"""A Snakemake that was killed leaves its jobs in the queue: the next one waits for them, and submits no second copy."""

import re
import time
from collections.abc import Mapping
from pathlib import Path

from pipeline_lib.base.errors import ConfigError
from pipeline_lib.base.stage import Say
from pipeline_lib.slurm.queue import PENDING, QueuedJob, of_digest, queued_jobs

_POLL_S = 5.0
_TELL_S = 60.0
_SILENCE_S = 300.0  # of the control daemon, before it is taken to know of no jobs
# Reasons that time does not end: of the limits those of a partition, and those that one job goes beyond by itself.
_STUCK = re.compile(
    r"held|neversatisfied|invalid|badconstraints|partition\w*limit|perjob|pernode|maxmemperlimit", re.IGNORECASE
)
_QUOTA = re.compile(r"^(QOS|Assoc)?(Grp|Max)|Limit$")  # all other limits: of a user, an account, a QOS


def wait_for_jobs(titles: Mapping[str, str], work_dir: Path, say: Say) -> None:
    """Wait until no job of ours in the queue makes one of the stage instances `titles`, by digest.

    Only those that were submitted from `work_dir`: those of other clones have locks, and other stores perhaps.
    Raises ConfigError for a job that will never begin.
    """
    told_s = answered_s = time.monotonic() - _TELL_S
    waited = False
    while True:
        jobs = queued_jobs()
        ours = _ours(jobs or [], titles, work_dir)
        if jobs is not None:
            answered_s = time.monotonic()
        if not ours and (jobs is not None or time.monotonic() - answered_s > _SILENCE_S):
            if waited:
                say("the jobs of the earlier snakemake have ended")
            return
        _refuse_stuck(ours)
        if time.monotonic() - told_s >= _TELL_S:
            for digest, job in ours.items():
                why = "; a quota is used up, and it begins when there is room again" if _waits_for_quota(job) else ""
                say(f"waiting for SLURM job {job.id}, {job.shown}, of an earlier snakemake: {titles[digest]}{why}")
            if jobs is None:
                say("waiting for squeue, which does not answer")
            told_s = time.monotonic()
        waited = waited or bool(ours)
        time.sleep(_POLL_S)


def _ours(jobs: list[QueuedJob], titles: Mapping[str, str], work_dir: Path) -> dict[str, QueuedJob]:
    near = [job for job in jobs if Path(job.work_dir) == work_dir]
    return {digest: found[0] for digest in titles if (found := of_digest(near, digest))}


def _waits_for_quota(job: QueuedJob) -> bool:
    return job.state == PENDING and _QUOTA.search(job.reason) is not None


def _refuse_stuck(jobs: Mapping[str, QueuedJob]) -> None:
    for job in jobs.values():
        if job.state == PENDING and _STUCK.search(job.reason):
            raise ConfigError(
                f"SLURM job {job.id} of an earlier snakemake",
                [f"it will not begin by itself ({job.reason}): `scontrol release {job.id}` or `scancel {job.id}`"],
            )
