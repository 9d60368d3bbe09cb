"""Starts the ranks of this machine by torchrun's own agent and turns what happens to them into one message."""

import json
import logging
import shutil
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pipeline_lib.base import fsio
from pipeline_lib.base.errors import Interrupted, PipelineError
from pipeline_lib.base.events import EventLog, read_events
from pipeline_lib.base.fsio import read_json, write_json
from pipeline_lib.base.manifest import verify
from pipeline_lib.base.stage import Job, StageFunction
from pipeline_lib.config.compile import run_digest
from pipeline_lib.train.checkpoint import newest_valid, sealed_steps
from pipeline_lib.train.dist import StopRequest
from pipeline_lib.train.rank import CHECKPOINTS, EVENTS_NAME, SUMMARY_NAME, read_plan

ERRORS = "errors"


class RankFailed(PipelineError):
    """A rank ended with a message of its own; its exit code becomes ours."""

    def __init__(self, message: str, exit_code: int) -> None:
        """Carry the rank's message and exit code."""
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Launch:
    """One attempt at a training run: `resume_from` is the checkpoint that it continues from, verified."""

    job: Job
    plan_dir: Path
    plan: dict[str, Any]
    run_dir: Path
    attempt: int
    resume_from: Path | None


def launcher(plan_dir: Path) -> StageFunction:
    """The training stage as the sealed plan in `plan_dir` places it."""

    def launch(job: Job) -> dict[str, Any]:
        verify(plan_dir)
        plan = read_plan(plan_dir)
        run_dir = job.store.run_dir(run_digest(job.spec))
        attempt = _next_attempt(run_dir)
        shutil.rmtree(run_dir / ERRORS, ignore_errors=True)
        resume_from = find_checkpoint(job, run_dir, plan["batch"]["steps"], attempt)
        _say_what_happens(job, plan, run_dir, resume_from, attempt)
        _run_ranks(Launch(job, plan_dir, plan, run_dir, attempt, resume_from))
        shutil.copyfile(plan_dir / "plan.json", job.out / "plan.json")
        shutil.copyfile(run_dir / EVENTS_NAME, job.out / EVENTS_NAME)
        return dict(read_json(job.out / SUMMARY_NAME))

    return launch


def _next_attempt(run_dir: Path) -> int:
    launched = [event for event in read_events(run_dir / EVENTS_NAME) if event.get("event") == "run.launched"]
    return 1 + len(launched)


def find_checkpoint(job: Job, run_dir: Path, last_step: int, attempt: int) -> Path | None:
    """The newest checkpoint up to `last_step` that verifies, before any rank waits for another.

    Damaged ones are set aside and reported.
    """
    folder = run_dir / CHECKPOINTS
    fsio.sweep(folder, "step-")
    events = EventLog(run_dir / EVENTS_NAME, attempt=attempt)

    def reject(path: Path, reason: str) -> None:
        job.say(f"train: a damaged checkpoint is set aside as {path} ({reason})")
        events.emit("checkpoint.rejected", path=str(path), reason=reason)

    return newest_valid(folder, last_step, reject)


def _say_what_happens(job: Job, plan: dict[str, Any], run_dir: Path, resume_from: Path | None, attempt: int) -> None:
    cluster, chosen = plan["cluster"], plan["chosen"]
    where = f"continuing from {resume_from.name}" if resume_from else "from the start"
    job.say(
        f"train: {chosen['strategy']} on {cluster['ranks']} {cluster['device']} ranks, "
        f"{plan['batch']['steps']} steps, {where} (attempt {attempt}; checkpoints in {run_dir / CHECKPOINTS})"
    )
    EventLog(run_dir / EVENTS_NAME, attempt=attempt).emit("run.launched", ranks=cluster["ranks"])


def _run_ranks(launch: Launch) -> None:
    job, run_dir = launch.job, launch.run_dir
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=launch.plan["cluster"]["ranks"],
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        signals_to_handle="SIGHUP,SIGQUIT",  # the agent kills ranks 30 s after a signal: too soon to save
    )
    arguments = ["-m", "pipeline_lib", "rank", "--spec", str(job.store.spec_path(job.spec.digest))]
    arguments += ["--plan", str(launch.plan_dir), "--out", str(job.out), "--attempt", str(launch.attempt)]
    if launch.resume_from is not None:
        arguments += ["--resume-from", str(launch.resume_from)]
    try:
        with _signals_passed_to_ranks():
            elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise _explain(rank, failure.exitcode, run_dir) from error
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        raise Interrupted(f"training stopped by {name}; {_how_to_continue(run_dir)}") from error


@contextmanager
def _signals_passed_to_ranks() -> Iterator[None]:
    """A request to stop goes to the ranks, which agree on a step, save and end by themselves."""

    def pass_on(_number: int, _frame: object) -> None:
        for rank in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                rank.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in StopRequest.SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(rank: int, exit_code: int, run_dir: Path) -> PipelineError:
    """The most telling of what the ranks left: a rank's own error before a peer's complaint about its absence.

    `rank` is the one that failed first; the others were ended by the agent for it.
    """
    reports = []
    for path in sorted((run_dir / ERRORS).glob("rank-*.json")):
        reports.append(json.loads(path.read_text(encoding="utf-8")))
    reports.sort(key=lambda report: (report["exit_code"] == Interrupted.exit_code, report["rank"]))
    if exit_code < 0 and (not reports or reports[0]["exit_code"] == Interrupted.exit_code):
        name = signal.Signals(-exit_code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return Interrupted(f"rank {rank} was killed by {name}{hint}; {_how_to_continue(run_dir)}")
    if reports:
        return RankFailed(f"rank {reports[0]['rank']}: {reports[0]['message']}", reports[0]["exit_code"])
    return RankFailed(f"rank {rank} ended with code {exit_code}; its output is above", max(1, exit_code))


def _how_to_continue(run_dir: Path) -> str:
    steps = sealed_steps(run_dir / CHECKPOINTS)
    saved = f"step {steps[-1][0]} is saved" if steps else "nothing was saved yet"
    return f"{saved}; run the same command again to continue"


def report_error(run_dir: Path, rank: int, error: PipelineError) -> None:
    """Called in a rank that fails: leave the message for the launcher, which shows one for all."""
    report = {"rank": rank, "exit_code": error.exit_code, "message": str(error)}
    write_json(run_dir / ERRORS / f"rank-{rank}.json", report)
