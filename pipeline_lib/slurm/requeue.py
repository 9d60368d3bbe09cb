"""Requeueing of an interrupted SLURM job, as long as it makes progress.

SLURM itself requeues only after the loss of a node.
"""

import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.core.errors import DiskFull, PipelineError
from pipeline_lib.core.events import EventLog, EventName, read_events
from pipeline_lib.core.stage import Say
from pipeline_lib.core.text import reason_of
from pipeline_lib.core.units import count
from pipeline_lib.slurm.job import scontrol, show_job
from pipeline_lib.slurm.queue import RUNNING

VAIN_ATTEMPTS = 3  # in a row that saved nothing new
_ENDED_WITHIN_S = 120.0


@dataclass(frozen=True)
class TrainingJob:
    """A training in the SLURM job `job`. `saved_step` is 0 if nothing is saved yet."""

    job: int
    events_path: Path
    saved_step: int
    max_requeues: int


def queue_again(run: TrainingJob, error: PipelineError, say: Say) -> str:
    """Requeue the SLURM job of this process, which `error` interrupted.

    SLURM then ends this process. Returns the reason if the job is not requeued: it is no longer
    running, the limit is reached, it makes no progress, or SLURM refused or did not answer.
    """
    events = read_events(run.events_path)
    attempt = max((int(event.get("attempt", 0)) for event in events), default=0)
    brief = reason_of(error)
    try:
        log = EventLog(run.events_path, attempt=attempt)
        if (state := show_job(run.job).fields["JobState"]) != RUNNING:
            return f"SLURM job {run.job} is being ended already: it is {state}"
        if reason := why_not(events, run):
            return reason
        # Before the request, which ends this process.
        log.emit(EventName.RUN_REQUEUED, job=run.job, step=run.saved_step, reason=brief)
        say(f"launch: {error}")
        say(
            f"launch: SLURM job {run.job} will be queued again, to continue from step "
            f"{run.saved_step} in some minutes"
        )
    except PipelineError as silent:
        return str(silent)
    try:
        scontrol("requeue", str(run.job))
    except PipelineError as refused:
        brief = reason_of(refused)
        with suppress(OSError, DiskFull):  # `refused` matters more than a full disk
            log.emit(EventName.RUN_REQUEUE_REFUSED, job=run.job, step=run.saved_step, reason=brief)
        return str(refused)
    # Wait for SLURM to end the job: a process that exits earlier makes it look like a failed job.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_ENDED_WITHIN_S)
    return f"SLURM was asked to queue job {run.job} again, and did not end it"


def why_not(events: Sequence[Mapping[str, Any]], run: TrainingJob) -> str | None:
    """Return why the job must not be requeued; None if it may be."""
    steps: list[Any] = []  # the saved step of each time that SLURM agreed to requeue the job
    for event in events:
        if event.get("job") != run.job:
            continue
        if event.get("event") == EventName.RUN_REQUEUED:
            steps.append(event.get("step"))
        elif event.get("event") == EventName.RUN_REQUEUE_REFUSED and steps:
            steps.pop()
    if len(steps) >= run.max_requeues:
        allowed = count(run.max_requeues, "times")
        return f"cluster.max_requeues allows {allowed}, and that is reached"
    if steps[1 - VAIN_ATTEMPTS :] == [run.saved_step] * (VAIN_ATTEMPTS - 1):
        attempts = f"{VAIN_ATTEMPTS} attempts in a row ended at step {run.saved_step}"
        return f"{attempts}, so something else is wrong"
    return None
