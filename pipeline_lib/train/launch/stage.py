"""The training stage, around the ranks: what they continue from, who starts them, and what is kept of their work."""

import logging
import shutil
import signal
import sys
import uuid
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pipeline_lib.base import fsio
from pipeline_lib.base.errors import IntegrityError, Interrupted
from pipeline_lib.base.events import EventLog, read_events
from pipeline_lib.base.fsio import read_json
from pipeline_lib.base.lifeline import OWNER_VARIABLE, describe_owner
from pipeline_lib.base.manifest import verify
from pipeline_lib.base.stage import Job, StageFunction
from pipeline_lib.config.compile import run_digest
from pipeline_lib.tracking.feed import trackers
from pipeline_lib.train.checkpoint import newest_valid, sealed_steps
from pipeline_lib.train.launch.commands import RANK_MODULE, launcher_command
from pipeline_lib.train.launch.environment import launch_environment
from pipeline_lib.train.launch.outcome import ERRORS, explain, how_to_continue
from pipeline_lib.train.launch.ranks import run_launcher, stop_requests_passed_on
from pipeline_lib.train.rank import CHECKPOINTS, EVENTS_NAME, SUMMARY_NAME, read_plan


@dataclass(frozen=True)
class Launch:
    """One attempt at a training run: `resume_from` is the checkpoint that it continues from, verified."""

    job: Job
    plan_dir: Path
    plan: dict[str, Any]
    run_dir: Path
    attempt: int
    resume_from: Path | None

    @property
    def rank_arguments(self) -> list[str]:
        """What `python -m pipeline_lib rank` is told."""
        spec_path = self.job.store.spec_path(self.job.spec.digest)
        arguments = ["--spec", str(spec_path), "--plan", str(self.plan_dir), "--out", str(self.job.out)]
        arguments += ["--attempt", str(self.attempt)]
        return [*arguments, "--resume-from", str(self.resume_from)] if self.resume_from else arguments


def launcher(plan_dir: Path, environ: MutableMapping[str, str]) -> StageFunction:
    """The training stage as the sealed plan in `plan_dir` places it. `environ` is this process's own."""

    def launch(job: Job) -> dict[str, Any]:
        verify(plan_dir)
        plan = read_plan(plan_dir)
        run_dir = job.store.run_dir(run_digest(job.spec))
        attempt = _next_attempt(run_dir)
        shutil.rmtree(run_dir / ERRORS, ignore_errors=True)
        resume_from = find_checkpoint(job, run_dir, plan["batch"]["steps"], attempt)
        job.say((plan_dir / "plan.txt").read_text(encoding="utf-8").rstrip())
        _say_what_happens(job, plan, run_dir, resume_from, attempt)
        environ[OWNER_VARIABLE] = describe_owner()  # for all that this process starts
        with trackers(plan["tracking"], run_dir, plan_dir, job.say):
            _run_ranks(Launch(job, plan_dir, plan, run_dir, attempt, resume_from), environ)
        shutil.copyfile(plan_dir / "plan.json", job.out / "plan.json")
        shutil.copyfile(run_dir / EVENTS_NAME, job.out / EVENTS_NAME)
        return dict(read_json(job.out / SUMMARY_NAME))

    return launch


def _next_attempt(run_dir: Path) -> int:
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


def _say_what_happens(job: Job, plan: dict[str, Any], run_dir: Path, resume_from: Path | None, attempt: int) -> None:
    cluster, chosen = plan["cluster"], plan["chosen"]
    where = f"continuing from {resume_from.name}" if resume_from else "from the start"
    job.say(
        f"train: {chosen['strategy']} on {cluster['ranks']} {cluster['device']} ranks by {cluster['launcher']}, "
        f"{plan['batch']['steps']} steps, {where} (attempt {attempt}; checkpoints in {run_dir / CHECKPOINTS})"
    )
    EventLog(run_dir / EVENTS_NAME, attempt=attempt).emit(
        "run.launched", ranks=cluster["ranks"], launcher=cluster["launcher"]
    )


def _run_ranks(launch: Launch, environ: MutableMapping[str, str]) -> None:
    """Start the ranks and wait for them. Raises what `explain` makes of a failure."""
    name, ranks = launch.plan["cluster"]["launcher"], launch.plan["cluster"]["ranks"]
    made = launch_environment(environ, launch.plan)
    if name == "torchrun":
        environ.update(made)  # its agent, which runs in this process, hands down what it finds here
        _run_torchrun(launch)
        return
    command = launcher_command(launch.plan, made, launch.run_dir, launch.rank_arguments)
    exit_code = run_launcher(command, made, launch.job.out)
    if exit_code:
        raise explain(name, exit_code, None, ranks, launch.run_dir)


def _run_torchrun(launch: Launch) -> None:
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    ranks, run_dir = launch.plan["cluster"]["ranks"], launch.run_dir
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        signals_to_handle="SIGHUP,SIGQUIT",  # the agent kills ranks 30 s after a signal: too soon to save
    )
    try:
        with stop_requests_passed_on(launch.job.out):
            elastic_launch(config, sys.executable)("-m", *RANK_MODULE, *launch.rank_arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise explain("torchrun", failure.exitcode, rank, ranks, run_dir) from error
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        raise Interrupted(f"training stopped by {name}; {how_to_continue(run_dir)}") from error
