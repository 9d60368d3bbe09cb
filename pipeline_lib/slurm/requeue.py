"""A job that was interrupted is queued again, as long as that gets it on: SLURM itself does so only for lost nodes."""

import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import DiskFull, PipelineError
from pipeline_lib.base.events import EventLog, read_events
from pipeline_lib.base.redact import cut, redact
from pipeline_lib.base.stage import Say
from pipeline_lib.slurm.job import scontrol, show_job

REQUEUED, REFUSED = "run.requeued", "run.requeue_refused"
VAIN_ATTEMPTS = 3  # in a row, at the end of which nothing new was saved
_ENDED_WITHIN_S = 120.0
_REASON_CHARS = 500


@dataclass(frozen=True)
class Run:
    """A training that the SLURM job `job` makes. `saved_step` is 0 if nothing is saved yet."""

    job: int
    events_path: Path
    saved_step: int
    max_requeues: int


def queue_again(run: Run, error: PipelineError, say: Say) -> str:
    """Queue the job again, in which this runs and which `error` interrupted; SLURM then ends this process.

    Returns why it was not: others have ended it or queue it again, it was often enough, gets nowhere, or SLURM refused.
    """
    events = read_events(run.events_path)
    attempt = max((int(event.get("attempt", 0)) for event in events), default=0)
    brief = cut(redact(str(error)), _REASON_CHARS)
    try:
        log = EventLog(run.events_path, attempt=attempt)
        if (state := show_job(run.job).state) != "RUNNING":
            return f"others are ending SLURM job {run.job}, which is {state}"
        if reason := why_not(events, run):
            return reason
        log.emit(REQUEUED, job=run.job, step=run.saved_step, reason=brief)  # now: SLURM ends us when it is asked
        say(f"launch: {error}")
        say(f"launch: SLURM job {run.job} is to be queued again, and go on from step {run.saved_step} in some minutes")
    except PipelineError as silent:
        return str(silent)
    try:
        scontrol("requeue", str(run.job))
    except PipelineError as refused:
        with suppress(OSError, DiskFull):  # `refused` says more than a full disk
            log.emit(REFUSED, job=run.job, step=run.saved_step, reason=cut(redact(str(refused)), _REASON_CHARS))
        return str(refused)
    _wait_for_the_end()
    return f"SLURM did not end job {run.job}, which it was asked to queue again"


def why_not(events: Sequence[Mapping[str, Any]], run: Run) -> str | None:
    """Why the job is not queued again; None if it may be."""
    steps = _requeued_steps(events, run.job)
    if len(steps) >= run.max_requeues:
        return f"that was done {len(steps)} times, as often as cluster.max_requeues allows"
    if steps[1 - VAIN_ATTEMPTS :] == [run.saved_step] * (VAIN_ATTEMPTS - 1):
        return f"{VAIN_ATTEMPTS} attempts in a row ended at step {run.saved_step}, so something else is wrong"
    return None


def _requeued_steps(events: Sequence[Mapping[str, Any]], job: int) -> list[Any]:
    """What was saved each time that SLURM agreed to queue `job` again."""
    steps: list[Any] = []
    for event in events:
        if event.get("job") == job and event.get("event") == REQUEUED:
            steps.append(event.get("step"))
        elif event.get("job") == job and event.get("event") == REFUSED and steps:
            steps.pop()
    return steps


def _wait_for_the_end() -> None:
    """Until SLURM ends the job: who leaves before would make it look like a job that failed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_ENDED_WITHIN_S)
