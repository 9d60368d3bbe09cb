"""The training stage, around the ranks: what they continue from, who starts them, and what is kept of their work."""

import shutil
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from pipeline_lib.base import fsio
from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.base.events import EventLog, read_events
from pipeline_lib.base.fsio import read_json
from pipeline_lib.base.lifeline import OWNER_VARIABLE, describe_owner
from pipeline_lib.base.manifest import verify
from pipeline_lib.base.run_folder import (
    CHECKPOINTS,
    ERRORS,
    EVENTS_NAME,
    HEARTBEATS,
    PLAN_NAME,
    SUMMARY_NAME,
    newest_valid,
    sealed_steps,
)
from pipeline_lib.base.stage import Job, StageFunction
from pipeline_lib.config.compile import run_digest
from pipeline_lib.tracking.feed import trackers
from pipeline_lib.train.launch.attempt import Attempt
from pipeline_lib.train.launch.flight import FLIGHT
from pipeline_lib.train.launch.place import Place


def launcher(plan_dir: Path, environ: MutableMapping[str, str]) -> StageFunction:
    """The training stage as the sealed plan in `plan_dir` places it. `environ` is this process's own."""

    def launch(job: Job) -> dict[str, Any]:
        verify(plan_dir, job.store.verified)
        for sealed in job.inputs.values():
            sealed.folder()  # the ranks read all of it
        plan = read_json(plan_dir / PLAN_NAME)
        run_dir = job.store.run_dir(run_digest(job.spec))
        attempt = next_attempt(run_dir)
        place = Place.of(plan["cluster"], environ, str(plan_dir))
        for left in (ERRORS, HEARTBEATS, FLIGHT):
            shutil.rmtree(run_dir / left, ignore_errors=True)
        if place.device == "cuda":
            (run_dir / FLIGHT).mkdir(parents=True)  # torch makes none
        resume_from = find_checkpoint(job, run_dir, plan["batch"]["steps"], attempt)
        now = Attempt(job, plan_dir, plan, place, run_dir, attempt, resume_from)
        _tell(now)
        environ[OWNER_VARIABLE] = describe_owner()  # for all that this process starts
        with trackers(plan["tracking"], run_dir, plan_dir, job.say):
            now.run(environ)
        shutil.copyfile(plan_dir / PLAN_NAME, job.out / PLAN_NAME)
        shutil.copyfile(run_dir / EVENTS_NAME, job.out / EVENTS_NAME)
        return dict(read_json(job.out / SUMMARY_NAME))

    return launch


def next_attempt(run_dir: Path) -> int:
    """The number of the attempt that begins now, from 1."""
    launched = [event for event in read_events(run_dir / EVENTS_NAME) if event.get("event") == "run.launched"]
    return 1 + len(launched)


def find_checkpoint(job: Job, run_dir: Path, last_step: int, attempt: int) -> Path | None:
    """The newest checkpoint up to `last_step` that verifies, before any rank waits for another.

    Damaged ones are set aside and reported. Raises IntegrityError if there were some, and none is whole.
    """
    folder = run_dir / CHECKPOINTS
    fsio.sweep(folder, "step-")
    events = EventLog(run_dir / EVENTS_NAME, attempt=attempt)

    def reject(path: Path, reason: str) -> None:
        job.say(f"train: a damaged checkpoint is set aside as {path} ({reason})")
        events.emit("checkpoint.rejected", path=str(path), reason=reason)

    had_any = any(step <= last_step for step, _ in sealed_steps(folder))
    found = newest_valid(folder, last_step, reject)
    if had_any and found is None:
        raise IntegrityError(
            f"{folder}: every checkpoint is damaged, and they were set aside there as rejected-step-*; "
            "run the same command again to begin the training anew"
        )
    return found


def _tell(attempt: Attempt) -> None:
    """Say what happens now, and write it down."""
    plan, place, run_dir, resume_from = attempt.plan, attempt.place, attempt.run_dir, attempt.resume_from
    where = f"continuing from {resume_from.name}" if resume_from else "from the start"
    attempt.job.say(
        f"train: {plan['chosen']['strategy']} on {place.ranks} {place.device} ranks by {place}, "
        f"{plan['batch']['steps']} steps, {where} (attempt {attempt.number}; plan in {attempt.plan_dir / 'plan.txt'}, "
        f"checkpoints in {run_dir / CHECKPOINTS})"
    )
    EventLog(run_dir / EVENTS_NAME, attempt=attempt.number).emit(
        "run.launched",
        ranks=place.ranks,
        launcher=place.launcher,
        job=place.job.id if place.job else None,
        nodes=list(place.hosts),
    )
