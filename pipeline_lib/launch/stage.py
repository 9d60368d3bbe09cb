"""The training stage, around the ranks: attempts, what they continue from, and what is kept of their work."""

import importlib.util
import logging
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Mapping, MutableMapping
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.config.compile import run_digest
from pipeline_lib.core import files
from pipeline_lib.core.errors import ConfigError, DiskFull, IntegrityError, Interrupted, LockLost, PipelineError
from pipeline_lib.core.events import EventLog, EventName, read_events
from pipeline_lib.core.files import read_json
from pipeline_lib.core.processes import OWNER_VARIABLE, describe_owner, importing
from pipeline_lib.core.run_folder import (
    CHECKPOINTS,
    ERRORS,
    EVENTS_NAME,
    HEARTBEATS,
    PLAN_NAME,
    SUMMARY_NAME,
    newest_valid,
    sealed_steps,
)
from pipeline_lib.core.stage import Job, StageFunction
from pipeline_lib.core.store import verify
from pipeline_lib.core.text import how_to_install, reason_of
from pipeline_lib.core.units import count
from pipeline_lib.hosts.checks import Wanted
from pipeline_lib.hosts.group import HostGroup
from pipeline_lib.launch.allocation import Allocation, NodeRequest, allocated
from pipeline_lib.launch.environment import NODE_VARIABLE, launch_environment
from pipeline_lib.launch.outcome import RanksLost, explain, explain_lost_hosts, how_to_continue, peer_is_lost
from pipeline_lib.launch.place import (
    MODULE,
    HostOrder,
    Place,
    RankArguments,
    accelerate_command,
    deepspeed_command,
    launcher_command,
    write_accelerate_config,
)
from pipeline_lib.launch.ranks import (
    frozen_ranks_ended,
    run_launcher,
    stop_requests_passed_on,
    stop_requests_received,
)
from pipeline_lib.plan.document import PlanDocument, known, read_plan
from pipeline_lib.slurm.sizing import warning_s
from pipeline_lib.tracking.feed import trackers

# One node's share of torchrun or accelerate: a task of srun, or started by the agent of a host.
#
# SLURM's warnings reach every process of a step, and end a launcher that does not expect them, at once or after the few
# seconds that it grants its ranks. So this program ignores them, and with it what it starts, until the ranks, which get
# them too, handle them.

# The signals at which torch's elastic agent may end its ranks; accelerate takes them from the environment. SIGTERM is
# not among them: the agent kills ranks 30 s after a signal, too soon to save.
SIGNALS_TO_HANDLE = "SIGHUP,SIGQUIT"
ELASTIC_SIGNALS_VARIABLE = "PET_SIGNALS_TO_HANDLE"


def run_elastic(nodes: int, ranks_per_node: int, program: list[str], **settings: Any) -> tuple[int, int] | None:
    """Start `program` as this node's ranks by torch's elastic agent, in this process, and wait for them.

    Returns the first rank that failed and its exit code, negative if a signal killed it; None if all ended well.
    Raises torch's SignalException at one of SIGNALS_TO_HANDLE. `settings` are those of a LaunchConfig.
    """
    # Only here: other launchers do without torch in this process, and it takes seconds to load.
    with importing():
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=ranks_per_node,
        max_restarts=0,
        signals_to_handle=SIGNALS_TO_HANDLE,
        **settings,
    )
    try:
        elastic_launch(config, sys.executable)("-m", MODULE, *program)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return rank, failure.exitcode
    return None


@dataclass(frozen=True)
class Node:
    """Starts `program` as the ranks of one node. NODE_RANK or SLURM says which node this is."""

    launcher: str
    nodes: int
    ranks_per_node: int
    timeout_s: int
    run_dir: Path
    program: list[str]

    def run(self, environ: Mapping[str, str]) -> int:
        """Start the ranks of this node and wait for them; return 0, or the exit code of the failure."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        node_rank = environ.get(NODE_VARIABLE) or environ["SLURM_NODEID"]
        if self.launcher == "deepspeed":
            command = deepspeed_command(environ, self.nodes, self.ranks_per_node, node_rank)
            return subprocess.call([*command, *self.program], env=dict(environ))
        if self.launcher == "accelerate":
            command = [*accelerate_command(environ, self.run_dir, node_rank), *self.program]
            return subprocess.call(command, env={**environ, ELASTIC_SIGNALS_VARIABLE: SIGNALS_TO_HANDLE})
        failed = run_elastic(
            self.nodes,
            self.ranks_per_node,
            self.program,
            run_id=environ["MASTER_PORT"],
            rdzv_backend="static",
            rdzv_endpoint=f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}",
            rdzv_configs={"rank": int(node_rank), "timeout": self.timeout_s},
        )
        if failed is None:
            return 0
        _, code = failed
        return code if code > 0 else 128 - code  # as a shell says that a signal killed it


# One attempt at a training run: its ranks are started on the nodes of the allocation, and waited for.


@dataclass(frozen=True)
class Attempt:
    """One attempt at a training run: `resume_from` is the checkpoint that it continues from, verified."""

    job: Job
    plan_dir: Path
    plan: PlanDocument
    place: Place
    run_dir: Path
    number: int
    resume_from: Path | None

    @property
    def out(self) -> Path:
        """The folder that the ranks write to, as their command lines name it: they are found by it."""
        return self.job.out.absolute()

    @property
    def rank_arguments(self) -> RankArguments:
        """The arguments of `python -m pipeline_lib rank`."""
        spec, plan_dir = self.job.store.spec_path(self.job.spec.digest).absolute(), self.plan_dir.absolute()
        resume_from = str(self.resume_from.absolute()) if self.resume_from else None
        return RankArguments(str(spec), str(plan_dir), str(self.out), self.number, self.job.lock.token, resume_from)

    def run(self, environ: MutableMapping[str, str]) -> None:
        """Start the ranks and wait for them. Raises what `explain` makes of a failure, and writes its events.

        Raises LockLost, and writes nothing, if the run folder is the next owner's.
        """
        try:
            with self.job.lock.required(), frozen_ranks_ended(self.out, self._peer_is_lost):
                self._start(environ)
        except LockLost:
            raise
        except PipelineError as error:
            with suppress(OSError, DiskFull):  # a full disk takes no events, and `error` says so better
                self._record(error)
            raise

    def _start(self, environ: MutableMapping[str, str]) -> None:
        place, allocation = self.place, self.place.allocation
        if place.launcher == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
            problem = f"cluster.launcher: deepspeed is not installed: {how_to_install('deepspeed')}"
            raise ConfigError("the training", [problem])
        made = launch_environment(environ, self.plan, allocation.address, allocation.port)
        start_timeout_s = known(self.plan.chosen.start_timeout_s)
        stop_in_s = None
        if (left_s := allocation.left_s) is not None:
            # SLURM's own warning of its time limit is lost on ranks that have not begun when it comes.
            stop_in_s = max(0.0, left_s - warning_s(self.plan, int(left_s)))
        if allocation.group is not None:
            self._run_on_hosts(allocation.group, made, start_timeout_s, stop_in_s)
            return
        if place.launcher == "torchrun" and not place.uses_srun:
            environ.update(made)  # its agent, which runs in this process, hands down what it finds here
            self._run_torchrun()
            return
        command = launcher_command(place, made, self.run_dir, start_timeout_s, self.rank_arguments.to_list())
        with stop_requests_passed_on(self.out, stop_in_s):
            exit_code = run_launcher(command, made, self.out, self._peer_is_lost)
        if exit_code:
            raise explain(place.launcher, exit_code, None, place.ranks, self.run_dir)

    def _run_on_hosts(
        self, group: HostGroup, environ: Mapping[str, str], start_timeout_s: int, stop_in_s: float | None
    ) -> None:
        """Let the agents of all hosts start their ranks, and wait for them."""
        place, run_dir = self.place, self.run_dir
        if place.launcher == "accelerate":
            write_accelerate_config(place, environ, run_dir)
        order = HostOrder.common(place, environ, start_timeout_s, run_dir.absolute(), self.rank_arguments)

        def show(host: str, line: str) -> None:
            self.job.say(f"{host}: {line}")

        asked = threading.Event()
        with stop_requests_received(asked):
            ended = group.run(order, show, asked, stop_in_s)
        if not ended.exit_code and not ended.lost:
            return
        launcher = f"{place.launcher} on {ended.host}" if ended.host else place.launcher
        error = explain(launcher, ended.exit_code or Interrupted.exit_code, None, place.ranks, run_dir)
        raise explain_lost_hosts(error, ended.lost, place.ranks, run_dir)

    def _peer_is_lost(self) -> bool:
        return peer_is_lost(self.run_dir, self.place.ranks)

    def _run_torchrun(self) -> None:
        with importing():
            from torch.distributed.elastic.multiprocessing.api import SignalException

        ranks, run_dir = self.place.ranks, self.run_dir
        rendezvous = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "local_addr": "localhost"}
        try:
            with stop_requests_passed_on(self.out):
                failed = run_elastic(1, ranks, self.rank_arguments.to_list(), run_id=uuid.uuid4().hex, **rendezvous)
        except SignalException as error:
            name = signal.Signals(error.sigval).name
            raise Interrupted(f"training stopped by {name}; {how_to_continue(run_dir)}") from error
        if failed is not None:
            rank, exit_code = failed
            raise explain("torchrun", exit_code, rank, ranks, run_dir)

    def _record(self, error: PipelineError) -> None:
        events = EventLog(self.run_dir / EVENTS_NAME, attempt=self.number)
        if isinstance(error, RanksLost):
            for lost in error.lost:
                events.emit(EventName.RANK_LOST, **asdict(lost))
        name = EventName.RUN_INTERRUPTED if error.exit_code == Interrupted.exit_code else EventName.RUN_FAILED
        events.emit(name, reason=reason_of(error), exit_code=error.exit_code)


# The training stage, around the ranks: what they continue from, who starts them, and what is kept of their work.


def launcher(plan_dir: Path, environ: MutableMapping[str, str]) -> StageFunction:
    """Return the training stage as the sealed plan in `plan_dir` places it. `environ` is this process's own."""

    def launch(job: Job) -> dict[str, Any]:
        verify(plan_dir, job.store.verified)
        for sealed in job.inputs.values():
            sealed.folder()  # the ranks read all of it
        plan = read_plan(plan_dir / PLAN_NAME)
        run_dir = job.store.run_dir(run_digest(job.spec))
        attempt = next_attempt(run_dir)
        environ[OWNER_VARIABLE] = describe_owner()  # for all that this process starts
        with _allocated(plan, job, environ) as allocation:
            place = Place.of(plan.cluster, allocation)
            for left in (ERRORS, HEARTBEATS):
                shutil.rmtree(run_dir / left, ignore_errors=True)
            resume_from = find_checkpoint(job, run_dir, known(plan.batch.steps), attempt)
            now = Attempt(job, plan_dir, plan, place, run_dir, attempt, resume_from)
            _tell(now)
            with trackers({"to": plan.tracking.to}, run_dir, plan_dir, job.say):
                now.run(environ)
        shutil.copyfile(plan_dir / PLAN_NAME, job.out / PLAN_NAME)
        shutil.copyfile(run_dir / EVENTS_NAME, job.out / EVENTS_NAME)
        return dict(read_json(job.out / SUMMARY_NAME))

    return launch


def _allocated(plan: PlanDocument, job: Job, environ: Mapping[str, str]) -> AbstractContextManager[Allocation]:
    """Return the nodes for the training of `plan`, to be entered."""
    nodes, ranks = known(plan.cluster.nodes), known(plan.cluster.ranks)
    wanted = Wanted(ranks // nodes if plan.cluster.is_gpu else 0, gpu=None, memory_gb=0)
    timeouts = float(known(plan.chosen.timeout_s)), float(known(plan.chosen.start_timeout_s))
    request = NodeRequest(nodes, known(plan.cluster.launcher), wanted, *timeouts)
    return allocated(request, job.store, environ, job.say)


def next_attempt(run_dir: Path) -> int:
    """Return the number of the attempt that begins now, from 1."""
    launched = [event for event in read_events(run_dir / EVENTS_NAME) if event.get("event") == EventName.RUN_LAUNCHED]
    return 1 + len(launched)


def find_checkpoint(job: Job, run_dir: Path, last_step: int, attempt: int) -> Path | None:
    """Return the newest checkpoint up to `last_step` that verifies; None if there are no checkpoints.

    It is looked for before any rank waits for another. Damaged ones are set aside and reported. Raises IntegrityError
    if all are damaged.
    """
    folder = run_dir / CHECKPOINTS
    files.sweep(folder, "step-")
    events = EventLog(run_dir / EVENTS_NAME, attempt=attempt)

    def reject(path: Path, reason: str) -> None:
        job.say(f"train: a damaged checkpoint is set aside as {path} ({reason})")
        events.emit(EventName.CHECKPOINT_REJECTED, path=str(path), reason=reason)

    had_any = any(step <= last_step for step, _ in sealed_steps(folder))
    found = newest_valid(folder, last_step, reject)
    if had_any and found is None:
        raise IntegrityError(
            f"{folder}: every checkpoint is damaged, and they were set aside there as rejected-step-*; "
            "run the same command again to begin the training anew"
        )
    return found


def _tell(attempt: Attempt) -> None:
    """Print how the attempt begins, and write its event."""
    plan, place, run_dir, resume_from = attempt.plan, attempt.place, attempt.run_dir, attempt.resume_from
    where = f"continuing from {resume_from.name}" if resume_from else "from the start"
    attempt.job.say(
        f"train: {plan.chosen.strategy} on {count(place.ranks, f'{place.device} ranks')} by {place}, "
        f"{count(plan.batch.steps, 'steps')}, {where} (attempt {attempt.number}; "
        f"plan in {attempt.plan_dir / 'plan.txt'}, checkpoints in {run_dir / CHECKPOINTS})"
    )
    EventLog(run_dir / EVENTS_NAME, attempt=attempt.number).emit(
        EventName.RUN_LAUNCHED,
        ranks=place.ranks,
        launcher=place.launcher,
        job=place.allocation.job.id if place.allocation.job else None,
        nodes=list(place.allocation.hosts),
    )
