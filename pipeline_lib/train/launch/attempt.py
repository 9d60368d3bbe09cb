"""One attempt at a training run: its ranks are started where the plan and SLURM place them, and waited for."""

import logging
import signal
import sys
import uuid
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.base.errors import DiskFull, Interrupted, LockLost, PipelineError
from pipeline_lib.base.events import EventLog
from pipeline_lib.base.redact import cut, redact
from pipeline_lib.base.run_folder import EVENTS_NAME
from pipeline_lib.base.stage import Job
from pipeline_lib.slurm.sizing import warning_s
from pipeline_lib.train.launch.agent import SIGNALS_TO_HANDLE
from pipeline_lib.train.launch.commands import RANK_MODULE, launcher_command
from pipeline_lib.train.launch.environment import launch_environment
from pipeline_lib.train.launch.flight import find_hang
from pipeline_lib.train.launch.outcome import RanksLost, explain, how_to_continue, peer_is_lost
from pipeline_lib.train.launch.place import Place
from pipeline_lib.train.launch.ranks import frozen_ranks_ended, run_launcher, stop_requests_passed_on

REASON_CHARS = 500


@dataclass(frozen=True)
class Attempt:
    """One attempt at a training run: `resume_from` is the checkpoint that it continues from, verified."""

    job: Job
    plan_dir: Path
    plan: dict[str, Any]
    place: Place
    run_dir: Path
    number: int
    resume_from: Path | None

    @property
    def rank_arguments(self) -> list[str]:
        """What `python -m pipeline_lib rank` is told."""
        spec_path = self.job.store.spec_path(self.job.spec.digest)
        arguments = ["--spec", str(spec_path), "--plan", str(self.plan_dir), "--out", str(self.job.out)]
        arguments += ["--attempt", str(self.number), "--lock-token", self.job.lock.token]
        return [*arguments, "--resume-from", str(self.resume_from)] if self.resume_from else arguments

    def run(self, environ: MutableMapping[str, str]) -> None:
        """Start the ranks and wait for them. Raises what `explain` makes of a failure; its events are written.

        Raises LockLost, and writes nothing, where the run folder is the next owner's.
        """
        try:
            with self.job.lock.required(), frozen_ranks_ended(self.job.out, self._peer_is_lost):
                self._start(environ)
        except LockLost:
            raise
        except PipelineError as error:
            with suppress(OSError, DiskFull):  # a full disk takes no events, and `error` says so better
                self._record(error)
            raise

    def _start(self, environ: MutableMapping[str, str]) -> None:
        place = self.place
        made = launch_environment(environ, self.plan, self.run_dir, place.master)
        if place.launcher == "torchrun" and not place.uses_srun:
            environ.update(made)  # its agent, which runs in this process, hands down what it finds here
            self._run_torchrun()
            return
        start_timeout_s = self.plan["chosen"]["start_timeout_s"]
        command = launcher_command(place, made, self.run_dir, start_timeout_s, self.rank_arguments)
        exit_code = run_launcher(command, made, self.job.out, self._stop_in_s(), self._peer_is_lost)
        if exit_code:
            raise explain(place.launcher, exit_code, None, place.ranks, self.run_dir)

    def _peer_is_lost(self) -> bool:
        return peer_is_lost(self.run_dir, self.place.ranks)

    def _stop_in_s(self) -> float | None:
        """When to stop for SLURM's time limit: its own warning is lost on ranks that have not begun when it comes."""
        left_s = self.place.job.left_s if self.place.job else None
        return None if left_s is None else max(0.0, left_s - warning_s(self.plan, int(left_s)))

    def _run_torchrun(self) -> None:
        # Only here: other launchers do without torch in this process, and it takes seconds to load.
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        ranks, run_dir = self.place.ranks, self.run_dir
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            signals_to_handle=SIGNALS_TO_HANDLE,  # the agent kills ranks 30 s after a signal: too soon to save
        )
        try:
            with stop_requests_passed_on(self.job.out):
                elastic_launch(config, sys.executable)("-m", *RANK_MODULE, *self.rank_arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise explain("torchrun", failure.exitcode, rank, ranks, run_dir) from error
        except SignalException as error:
            name = signal.Signals(error.sigval).name
            raise Interrupted(f"training stopped by {name}; {how_to_continue(run_dir)}") from error

    def _record(self, error: PipelineError) -> None:
        """Write down which ranks were lost, what the flight recorder saw, and last how the attempt ended."""
        events = EventLog(self.run_dir / EVENTS_NAME, attempt=self.number)
        if isinstance(error, RanksLost):
            for lost in error.lost:
                events.emit("rank.lost", **asdict(lost))
        if hang := find_hang(self.run_dir, self.place.ranks):
            events.emit("flight.read", **asdict(hang))
            self.job.say(f"train: by NCCL's flight recorder, {hang}")
        name = "run.interrupted" if error.exit_code == Interrupted.exit_code else "run.failed"
        events.emit(name, reason=cut(redact(str(error)), REASON_CHARS), exit_code=error.exit_code)
