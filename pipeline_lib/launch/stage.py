"""The training stage, around the ranks: attempts, what they continue from, and what is kept."""

import shutil
import threading
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.config.compile import run_digest
from pipeline_lib.config.train import Train, read_train
from pipeline_lib.core import files
from pipeline_lib.core.errors import DiskFull, IntegrityError, Interrupted, LockLost, PipelineError
from pipeline_lib.core.events import EventLog, EventName, read_events
from pipeline_lib.core.processes import OWNER_VARIABLE, describe_owner
from pipeline_lib.core.run_folder import (
    CHECKPOINTS,
    ERRORS,
    EVENTS_NAME,
    HEARTBEATS,
    PLAN_NAME,
    newest_valid,
    sealed_steps,
    step_name,
)
from pipeline_lib.core.stage import Job, StageFunction
from pipeline_lib.core.store import MANIFEST_NAME, Spec, read_manifest, verify
from pipeline_lib.core.text import reason_of
from pipeline_lib.core.units import count
from pipeline_lib.hosts.checks import HostNeeds
from pipeline_lib.hosts.group import HostGroup
from pipeline_lib.launch.allocation import Allocation, NodeRequest, allocated
from pipeline_lib.launch.environment import free_port, launch_environment, private_rendezvous
from pipeline_lib.launch.local_gpus import taken_gpus
from pipeline_lib.launch.outcome import RanksLost, explain, explain_lost_hosts, peer_is_lost
from pipeline_lib.launch.place import HostOrder, RankArguments, RankPlacement, srun_command
from pipeline_lib.launch.ranks import (
    frozen_ranks_ended,
    run_launcher,
    stop_requests_passed_on,
    stop_requests_received,
)
from pipeline_lib.launch.spawn import HeldRanks
from pipeline_lib.records.plan import PlanDocument, read_plan
from pipeline_lib.records.record import to_json
from pipeline_lib.records.training import Training, read_training
from pipeline_lib.slurm.sizing import warning_s
from pipeline_lib.tracking.feed import trackers

# One attempt at a training run: its ranks are started on the nodes of the allocation, and waited
# for.


@dataclass(frozen=True)
class LaunchedAttempt:
    """One attempt at a training run: `resume_from` is the verified checkpoint to start from."""

    job: Job
    plan_dir: Path
    plan: PlanDocument
    place: RankPlacement
    run_dir: Path
    number: int
    resume_from: Path | None

    @property
    def out(self) -> Path:
        """The folder that the ranks write to, as on their command lines: they are found by it."""
        return self.job.out.absolute()

    @property
    def rank_arguments(self) -> RankArguments:
        """The arguments of `python -m pipeline_lib rank`."""
        return _rank_arguments(self.job, self.plan_dir, self.number, self.resume_from)

    def run(self, environ: Mapping[str, str], held: HeldRanks | None = None) -> None:
        """Start the ranks, or release those `held`, and wait for them.

        Raises what `explain` makes of a failure, and writes its events.
        Raises LockLost, and writes nothing, if the run folder is the next owner's.
        """
        try:
            with self.job.lock.required(), frozen_ranks_ended(self.out, self._peer_is_lost):
                if held is None:
                    self._start(environ)
                else:
                    self._release(held)
        except LockLost:
            raise
        except PipelineError as error:
            # a full disk takes no events, and `error` says so better
            with suppress(OSError, DiskFull):
                self._record(error)
            raise

    def _start(self, environ: Mapping[str, str]) -> None:
        allocation = self.place.allocation
        stop_in_s = None
        if (left_s := allocation.left_s) is not None:
            # SLURM's own warning of its time limit is lost on ranks that have not begun when it
            # comes.
            stop_in_s = max(0.0, left_s - warning_s(self.plan, int(left_s)))
        with _rendezvous(self.place) as rendezvous:
            made = launch_environment(environ, self.plan, rendezvous)
            if allocation.group is not None:
                self._run_on_hosts(allocation.group, made, stop_in_s)
            else:
                self._run_in_job(made, stop_in_s)

    def _release(self, held: HeldRanks) -> None:
        """Let the ranks that wait on this machine begin, and wait for them."""
        with stop_requests_passed_on(self.out):
            failed = held.release(self.resume_from)
        if failed is not None:
            raise explain(
                self.place.launcher, failed.exit_code, failed.rank, self.place.ranks, self.run_dir
            )

    def _run_in_job(self, environ: dict[str, str], stop_in_s: float | None) -> None:
        """Let srun start the ranks on the nodes of the job, and wait for them."""
        place = self.place
        command = srun_command(place, environ, self.rank_arguments.to_list())
        with stop_requests_passed_on(self.out, stop_in_s):
            exit_code = run_launcher(command, environ, self.out, self._peer_is_lost)
        if exit_code:
            raise explain(place.launcher, exit_code, None, place.ranks, self.run_dir)

    def _run_on_hosts(
        self, group: HostGroup, environ: Mapping[str, str], stop_in_s: float | None
    ) -> None:
        """Let the agents of all hosts start their ranks, and wait for them."""
        place = self.place
        run_dir = self.run_dir
        order = HostOrder.common(place, environ, run_dir.absolute(), self.rank_arguments)

        def show(host: str, line: str) -> None:
            self.job.say(f"{host}: {line}")

        asked = threading.Event()
        with stop_requests_received(asked):
            ended = group.run(order, show, asked, stop_in_s)
        if not ended.exit_code and not ended.lost:
            return
        launcher = f"{place.launcher} on {ended.host}" if ended.host else place.launcher
        error = explain(
            launcher, ended.exit_code or Interrupted.exit_code, None, place.ranks, run_dir
        )
        raise explain_lost_hosts(error, ended.lost, place.ranks, run_dir)

    def _peer_is_lost(self) -> bool:
        return peer_is_lost(self.run_dir, self.place.ranks)

    def _record(self, error: PipelineError) -> None:
        events = EventLog(self.run_dir / EVENTS_NAME, attempt=self.number)
        if isinstance(error, RanksLost):
            for lost in error.lost:
                events.emit(EventName.RANK_LOST, **asdict(lost))
        name = EventName.RUN_FAILED
        if error.exit_code == Interrupted.exit_code:
            name = EventName.RUN_INTERRUPTED
        events.emit(name, reason=reason_of(error), exit_code=error.exit_code)


def _rank_arguments(
    job: Job, plan_dir: Path, attempt: int, resume_from: Path | None
) -> RankArguments:
    return RankArguments(
        spec=str(job.store.spec_path(job.spec.digest).absolute()),
        plan=str(plan_dir.absolute()),
        out=str(job.out.absolute()),
        attempt=attempt,
        lock_token=job.lock.token,
        resume_from=str(resume_from.absolute()) if resume_from else None,
    )


def _rendezvous(place: RankPlacement) -> AbstractContextManager[Mapping[str, str]]:
    """Return the variables that tell the ranks where they meet, to be entered while they run."""
    if place.nodes == 1:
        return private_rendezvous()
    # In a job this process runs on the first node: a port that is free here is free for rank 0.
    port = place.allocation.port or free_port()
    return nullcontext({"MASTER_ADDR": place.allocation.address, "MASTER_PORT": str(port)})


# The training stage, around the ranks: what they continue from, who starts them, and what is kept
# of their work.


def launcher(plan_dir: Path, environ: MutableMapping[str, str]) -> StageFunction:
    """Return the training stage as the sealed plan in `plan_dir` places it.

    `environ` is this process's own.
    """

    def launch(job: Job) -> dict[str, Any]:
        verify(plan_dir, job.store.verified)
        plan = read_plan(plan_dir / PLAN_NAME)
        run_dir = job.store.run_dir(run_digest(job.spec))
        attempt = next_attempt(run_dir)
        environ[OWNER_VARIABLE] = describe_owner()  # for all that this process starts
        with _allocated(plan, job, environ) as allocation:
            place = RankPlacement.of(plan.cluster, allocation)
            arguments = _rank_arguments(job, plan_dir, attempt, resume_from=None)
            with (
                taken_gpus(_gpus_here(place), environ, job.say),
                _held_here(place, plan, arguments, environ) as held,
            ):
                for sealed in job.inputs.values():
                    sealed.folder()  # the ranks read all of it
                for left in (ERRORS, HEARTBEATS):
                    shutil.rmtree(run_dir / left, ignore_errors=True)
                resume_from = find_checkpoint(job, run_dir, plan.run_steps, attempt)
                now = LaunchedAttempt(job, plan_dir, plan, place, run_dir, attempt, resume_from)
                _announce(now)
                with trackers({"to": plan.tracking.to}, run_dir, plan_dir, job.say):
                    now.run(environ, held)
        shutil.copyfile(plan_dir / PLAN_NAME, job.out / PLAN_NAME)
        shutil.copyfile(run_dir / EVENTS_NAME, job.out / EVENTS_NAME)
        training = read_training(job.out)
        take_hashes(job, run_dir / CHECKPOINTS / step_name(training.result_step))
        if warning := warning_of_lost_best(read_train(job.spec.settings), training):
            job.say(f"train: warning: {warning}")
        return dict(to_json(training))

    return launch


def warning_of_lost_best(train: Train, training: Training) -> str | None:
    """Return what to tell of a training that should have left its best step; None if it did."""
    if not training.has_lost_best(train.keep_best):
        return None
    return (
        f"the held-out loss was lowest after step {training.best_step:,}, and the checkpoint of "
        f"that step was damaged or missing, so the result is step {training.result_step:,}"
    )


def take_hashes(job: Job, checkpoint: Path) -> None:
    """Take the hashes of weights that link to the sealed `checkpoint`, instead of reading them."""
    if not (checkpoint / MANIFEST_NAME).exists():
        return
    sealed_ns = (checkpoint / MANIFEST_NAME).stat().st_mtime_ns
    for name, entry in read_manifest(checkpoint).files.items():
        left = job.out / name
        saved = checkpoint / name
        is_link = left.exists() and left.samefile(saved)
        if is_link and saved.stat().st_mtime_ns <= sealed_ns:  # else it was edited since
            job.hashes[name] = entry.sha256
            job.store.verified.mark_own(left, entry.sha256)


def _gpus_here(place: RankPlacement) -> int:
    """Return how many GPUs of this machine the ranks use, where no scheduler gives them some."""
    return place.ranks if place.allocation.is_this_machine and place.device == "cuda" else 0


@contextmanager
def _held_here(
    place: RankPlacement, plan: PlanDocument, arguments: RankArguments, environ: Mapping[str, str]
) -> Iterator[HeldRanks | None]:
    """Start the ranks if they run here: they import while this process verifies their inputs.

    Yield None for ranks elsewhere: srun and agents start them later.
    """
    if not place.allocation.is_this_machine:
        yield None
        return
    with _rendezvous(place) as rendezvous:
        made = launch_environment(environ, plan, rendezvous)
        with HeldRanks(arguments.to_list(), made, place.ranks) as held:
            yield held


def _allocated(
    plan: PlanDocument, job: Job, environ: Mapping[str, str]
) -> AbstractContextManager[Allocation]:
    """Return the nodes for the training of `plan`, to be entered."""
    nodes = plan.cluster.nodes
    ranks = plan.cluster.ranks
    wanted = HostNeeds(ranks // nodes if plan.cluster.is_gpu else 0, gpu=None, memory_gb=0)
    timeouts = float(plan.chosen.timeout_s), float(plan.chosen.start_timeout_s)
    request = NodeRequest(nodes, plan.cluster.launcher, wanted, *timeouts)
    return allocated(request, job.store, environ, job.say)


def next_attempt(run_dir: Path) -> int:
    """Return the number of the attempt that begins now, from 1."""
    events = read_events(run_dir / EVENTS_NAME)
    launched = [event for event in events if event.get("event") == EventName.RUN_LAUNCHED]
    return 1 + len(launched)


def find_checkpoint(job: Job, run_dir: Path, last_step: int, attempt: int) -> Path | None:
    """Return the newest checkpoint up to `last_step` that verifies; None if there are none.

    It is looked for before any rank waits for another. Damaged ones are set aside and reported.
    Raises IntegrityError if all are damaged.
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
            f"{folder}: every checkpoint is damaged, and they were set aside there as "
            "rejected-step-*; run the same command again to begin the training anew"
        )
    return found


def runs_of_other_versions(job: Job, run_dir: Path) -> list[Path]:
    """Return the folders of trainings with this one's settings and model by another code version.

    They have checkpoints, and are not continued: the versions compute something else.
    """
    found = []
    for other in sorted(run_dir.parent.iterdir()):
        steps = sealed_steps(other / CHECKPOINTS) if other != run_dir else []
        if not steps:
            continue
        with suppress(IntegrityError):
            left_by = Spec.from_json(read_manifest(steps[-1][1]).spec, str(other))
            is_same = (left_by.settings, left_by.inputs.get("model")) == (
                job.spec.settings,
                job.spec.inputs["model"],
            )
            if is_same and left_by.version != job.spec.version:
                found.append(other)
    return found


def _announce(attempt: LaunchedAttempt) -> None:
    """Print how the attempt begins, and write its event."""
    plan = attempt.plan
    place = attempt.place
    run_dir = attempt.run_dir
    resume_from = attempt.resume_from
    others = [] if resume_from else runs_of_other_versions(attempt.job, run_dir)
    for other in others:
        attempt.job.say(
            f"train: {other} holds checkpoints of this training by another version of the training "
            "code, which computes something else; they are not continued, and may be removed"
        )
    where = f"continuing from {resume_from.name}" if resume_from else "from the start"
    attempt.job.say(
        f"train: {plan.chosen.strategy} on {count(place.ranks, f'{place.device} ranks')} by "
        f"{place}, {count(plan.batch.steps, 'steps')}, {where} (attempt {attempt.number}; plan in "
        f"{attempt.plan_dir / 'plan.txt'}, checkpoints in {run_dir / CHECKPOINTS})"
    )
    EventLog(run_dir / EVENTS_NAME, attempt=attempt.number).emit(
        EventName.RUN_LAUNCHED,
        ranks=place.ranks,
        launcher=place.launcher,
        job=place.allocation.job.id if place.allocation.job else None,
        nodes=list(place.allocation.hosts),
    )
