"""What of ours waits or runs in SLURM's queue, as one call of squeue tells.

The executor plugin names its jobs by UUIDs and puts the rule and its wildcards, thus the digest of the stage
instance, into the comment: `rule_train_stage_wildcards_DIGEST`.
"""

import subprocess
from dataclasses import dataclass

RUNNING = "RUNNING"
PENDING = "PENDING"
_FORMAT = "%i|%T|%r|%S|%Z|%k"  # the comment last, since people may write anything into theirs


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue. `start` is when it began or is expected to, as squeue writes it ("N/A": not known)."""

    id: str
    state: str
    reason: str
    start: str
    work_dir: str
    comment: str

    @property
    def shown(self) -> str:
        """Its state, with SLURM's reason if it waits for one: `PENDING (Resources)`."""
        return f"{self.state} ({self.reason})" if self.state == PENDING and self.reason else self.state


def queued_jobs(timeout_s: float = 5.0) -> list[QueuedJob] | None:
    """All jobs in the queue that carry a comment; None if there is no SLURM here or it does not answer in time."""
    command = ["squeue", "--noheader", "--format", _FORMAT]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    jobs = (_parse(line) for line in done.stdout.decode(errors="replace").split("\n"))
    return [job for job in jobs if job is not None]


def of_digest(jobs: list[QueuedJob], *digests: str) -> list[QueuedJob]:
    """Those of `jobs` that work on a stage instance of `digests`: one that runs first, then those that wait."""
    found = [job for job in jobs if any(digest in job.comment for digest in digests)]
    return sorted(found, key=lambda job: (job.state != RUNNING, job.state != PENDING))


def _parse(line: str) -> QueuedJob | None:
    """The job that `line` tells of; None for lines that are none of ours."""
    fields = [field.strip() for field in line.split("|", 5)]
    if len(fields) < 6 or not fields[5] or fields[5] == "(null)":
        return None
    return QueuedJob(*fields)
