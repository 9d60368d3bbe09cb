"""A Snakemake that was killed leaves its jobs in the queue: the next one waits for them, and submits no second copy."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from pipeline_lib.base.stage import Say
from pipeline_lib.slurm.queue import QueuedJob, of_digest, queued_jobs

_POLL_S = 2.0
_TELL_S = 60.0
_SILENCE_S = 300.0  # of the control daemon, before it is taken to know of no jobs


def wait_for_jobs(titles: Mapping[str, str], work_dir: Path, say: Say) -> None:
    """Wait until no job of ours in the queue makes one of the stage instances `titles`, by digest.

    Only those that were submitted from `work_dir`: those of other clones have locks, and other stores perhaps.
    """
    told_s, answered_s, waited = 0.0, time.monotonic(), False
    while True:
        jobs = queued_jobs()
        if jobs is None and time.monotonic() - answered_s < _SILENCE_S:
            time.sleep(_POLL_S)
            continue
        answered_s = time.monotonic()
        ours = {digest: found for digest, found in _ours(jobs or [], titles, work_dir)}
        if not ours:
            if waited:
                say("the jobs of the earlier snakemake have ended")
            return
        if time.monotonic() - told_s > _TELL_S or not waited:
            for digest, job in ours.items():
                say(f"waiting for SLURM job {job.id}, {job.shown}, of an earlier snakemake: {titles[digest]}")
            told_s, waited = time.monotonic(), True
        time.sleep(_POLL_S)


def _ours(jobs: list[QueuedJob], digests: Iterable[str], work_dir: Path) -> Iterable[tuple[str, QueuedJob]]:
    near = [job for job in jobs if Path(job.work_dir) == work_dir]
    return [(digest, found[0]) for digest in digests if (found := of_digest(near, digest))]
