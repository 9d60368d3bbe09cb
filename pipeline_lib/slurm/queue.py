"""Our jobs in SLURM's queue, by `squeue`, and the wait for those of an earlier snakemake.

The executor plugin names jobs by UUIDs. It puts the rule and its wildcards, thus the digest of the
stage instance, into the comment: `rule_train_stage_wildcards_DIGEST`. A killed Snakemake leaves its
jobs in the queue; the next one waits for them instead of submitting a second copy.
"""

import re
import subprocess
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.stage import Say

RUNNING = "RUNNING"
PENDING = "PENDING"
_FORMAT = "%i|%T|%r|%S|%Z|%k"  # the comment last, since it may contain anything
_POLL_S = 5.0
_TELL_S = 60.0
_SILENCE_S = 300.0  # without an answer, after which the queue is taken to be empty
# Reasons that do not go away with time: limits of a partition, and limits that a single job
# exceeds.
_STUCK = re.compile(
    r"held|neversatisfied|invalid|badconstraints|partition\w*limit|perjob|pernode|maxmemperlimit",
    re.IGNORECASE,
)
# all other limits, of a user, an account or a QOS
_QUOTA = re.compile(r"^(QOS|Assoc)?(Grp|Max)|Limit$")


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue.

    `start` is its actual or expected start as squeue prints it, "N/A" if not known.
    """

    id: str
    state: str
    reason: str
    start: str
    work_dir: str
    comment: str

    @property
    def shown(self) -> str:
        """The state, with SLURM's reason if the job is pending: `PENDING (Resources)`."""
        if self.state == PENDING and self.reason:
            return f"{self.state} ({self.reason})"
        return self.state


def queued_jobs(timeout_s: float = 5.0) -> list[QueuedJob] | None:
    """Return all queued jobs with a comment; None without SLURM or an answer in time."""
    command = ["squeue", "--noheader", "--format", _FORMAT]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    jobs = []
    for line in done.stdout.decode(errors="replace").split("\n"):
        fields = [field.strip() for field in line.split("|", 5)]
        if len(fields) == 6 and fields[5] not in ("", "(null)"):
            jobs.append(QueuedJob(*fields))
    return jobs


def of_digest(jobs: list[QueuedJob], *digests: str) -> list[QueuedJob]:
    """Return the jobs on a stage instance of `digests`: running ones first, then pending ones."""
    found = [job for job in jobs if any(digest in job.comment for digest in digests)]
    return sorted(found, key=lambda job: (job.state != RUNNING, job.state != PENDING))


def wait_for_jobs(titles: Mapping[str, str], work_dir: Path, say: Say) -> None:
    """Wait until no queued job of ours makes a stage instance in `titles`, given by digest.

    Only jobs submitted from `work_dir` count: jobs of other clones have locks, and may use other
    stores. Raises ConfigError for a job that will never start.
    """
    told_s = time.monotonic() - _TELL_S
    answered_s = told_s
    has_waited = False
    while True:
        jobs = queued_jobs()
        if jobs is not None:
            answered_s = time.monotonic()
        ours = _jobs_by_digest(jobs or [], titles, work_dir)
        is_known = jobs is not None or time.monotonic() - answered_s > _SILENCE_S
        if not ours and is_known:
            if has_waited:
                say("the jobs of the earlier snakemake have ended")
            return
        _refuse_stuck(ours.values())
        if time.monotonic() - told_s >= _TELL_S:
            for digest, job in ours.items():
                say(_waiting_for(job, titles[digest]))
            if jobs is None:
                say("squeue does not answer; waiting for it")
            told_s = time.monotonic()
        has_waited = has_waited or bool(ours)
        time.sleep(_POLL_S)


def _jobs_by_digest(
    jobs: list[QueuedJob], digests: Iterable[str], work_dir: Path
) -> dict[str, QueuedJob]:
    """Return the job that makes each of `digests`, if one submitted from `work_dir` does."""
    near = [job for job in jobs if Path(job.work_dir) == work_dir]
    found = {}
    for digest in digests:
        its_jobs = of_digest(near, digest)
        if its_jobs:
            found[digest] = its_jobs[0]
    return found


def _refuse_stuck(jobs: Iterable[QueuedJob]) -> None:
    """Raise ConfigError for a job that does not start without the user."""
    for job in jobs:
        if job.state == PENDING and _STUCK.search(job.reason):
            remedy = f"`scontrol release {job.id}` or `scancel {job.id}`"
            problem = f"it will not start by itself ({job.reason}): {remedy}"
            raise ConfigError(f"SLURM job {job.id} of an earlier snakemake", [problem])


def _waiting_for(job: QueuedJob, title: str) -> str:
    text = f"waiting for SLURM job {job.id}, {job.shown}, of an earlier snakemake: {title}"
    if job.state == PENDING and _QUOTA.search(job.reason):
        text += "; a quota is used up, and the job starts when other jobs have ended"
    return text
