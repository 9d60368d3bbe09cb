"""Worker processes in which foreign code (a model's chat template) runs within limits, and results keep their order."""

import ctypes
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

import psutil

from pipeline_lib.core.errors import PipelineError

# The life of one worker process: it loads, then answers tasks, and foreign code in it is limited by the kernel.
#
# A chat template is code of others. It runs here with a limit of memory on the process and of CPU time on each piece
# of work, so that neither a loop nor a bomb in it costs more than a worker.

StateIn = TypeVar("StateIn", contravariant=True)
ResultOut = TypeVar("ResultOut", covariant=True)

NOWHERE = -1  # the position of a worker that runs no foreign code
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Limits:
    """What a worker may take before it is ended."""

    memory_bytes: int = (
        4 << 30
    )  # address space beyond what it has once it is loaded; a row of 10 MB takes up to 3.2 GiB
    cpu_s: float = 10.0  # CPU time of one guarded piece of work
    silence_s: float = 600.0  # wall time without any progress


class Guard:
    """Known to the code in a worker: says which item is in work, and ends the process when it takes too long."""

    def __init__(self, cursor: Any, cpu_s: float) -> None:
        """Note positions in `cursor`, which the parent sees."""
        self._cursor = cursor
        self._cpu_s = cpu_s

    @contextmanager
    def at(self, position: int) -> Iterator[None]:
        """Foreign code works on item number `position` of the task. Its CPU time is limited by the kernel."""
        self._cursor.value = position
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        self._cursor.value = NOWHERE  # only now: after a failure it still says where


class Task(Protocol[StateIn, ResultOut]):
    """A picklable piece of work for a worker."""

    def run(self, state: StateIn, guard: Guard) -> ResultOut:
        """Do it, in the worker. A PipelineError is raised again where the results are taken."""


def serve(connection: Connection, cursor: Any, load: bytes, limits: Limits, parent: int) -> None:
    """The life of a worker: run the pickled `load`, then answer tasks until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group, and the parent decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _die_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold the user's data
    _one_thread()  # before `load` is unpickled, which imports what reads it
    try:
        state = pickle.loads(load)()  # noqa: S301 - of our parent
    except PipelineError as error:
        connection.send(error)
        return
    _limit_memory(limits.memory_bytes)
    guard = Guard(cursor, limits.cpu_s)
    connection.send(None)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        cursor.value = NOWHERE
        try:
            connection.send(task.run(state, guard))
        except (PipelineError, MemoryError) as error:
            connection.send(_bare(error))


def _bare(error: Exception) -> Exception:
    """`error` without what it drags along: a MemoryError's frames hold the very memory."""
    return MemoryError() if isinstance(error, MemoryError) else error


def _one_thread() -> None:
    """Keep native libraries from starting threads: there is a worker for each core."""
    native = ctypes.CDLL(None)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
        native.setenv(name.encode(), b"1", 1)
    native.setenv(b"TOKENIZERS_PARALLELISM", b"false", 1)


def _die_with(parent: int) -> None:
    """Ask Linux to kill this process when its parent dies, so that no orphan computes on."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked
            os.kill(os.getpid(), signal.SIGKILL)


def _limit_memory(more_bytes: int) -> None:
    if sys.platform == "linux":
        limit = psutil.Process().memory_info().vms + more_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# Worker processes in which foreign code (a model's chat template) runs within limits, and results keep their order.
#
# Promise: results arrive in the order of their tasks whatever the number of workers; a worker that dies, hangs or
# outgrows its limits becomes a `WorkerLost` that says what it was at; none outlives the process that started it.
# The number of tasks on their way is bounded, so the memory is too. Not promised: a wall against a kernel exploit.

State = TypeVar("State")
Result = TypeVar("Result")

# Spawned, not forked: the process that starts them may hold threads and a GPU.
_CONTEXT = multiprocessing.get_context("spawn")
TASKS_PER_WORKER = 4  # on their way at the most, from being read to being handed out
_POLL_S = 2.0


class Cause(StrEnum):
    """Why a worker was lost."""

    CPU = "cpu"
    MEMORY = "memory"
    KILLED = "killed"
    SILENT = "silent"
    CRASHED = "crashed"


class WorkerLost(Exception):
    """A worker did not finish `task` (None: it was not at one); `position` is the item it was at, if at one."""

    def __init__(self, cause: Cause, detail: str, task: Any = None, position: int | None = None) -> None:
        """Say in `detail` what happened."""
        super().__init__(detail)
        self.cause = cause
        self.detail = detail
        self.task = task
        self.position = position


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    cursor: Any
    loaded: bool = False
    number: int | None = None  # of the task in work
    silent_s: float = 0.0
    last_position: int = NOWHERE

    @property
    def idle(self) -> bool:
        return self.loaded and self.number is None

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class Pool(Generic[State]):
    """Workers that each `load()` a state of their own, and then run tasks on it. Use in a `with` block."""

    def __init__(self, load: Callable[[], State], workers: int, limits: Limits | None = None) -> None:
        """Prepare `workers` processes; `load` has to be picklable."""
        self._load = load
        self._count = workers
        self._limits = limits or Limits()
        self._poll_s = min(_POLL_S, self._limits.silence_s / 4)
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Pool[State]":
        """Start the workers, and wait for none of them."""
        with ExitStack() as undo:
            undo.callback(self._end)
            for _ in range(self._count):
                self._workers.append(self._start())
            undo.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the workers."""
        self._end()

    def map(self, tasks: Iterable[Task[State, Result]]) -> Iterator[Result]:
        """The result of each task, in order. `tasks` is read as workers become free.

        Raises WorkerLost, and what a task raised, in the place of the result.
        """
        on_their_way: dict[int, Task[State, Result]] = {}
        replies: dict[int, Any] = {}
        numbered = enumerate(tasks)
        following = next(numbered, None)  # read ahead, so that a worker that becomes free need not wait for the disk
        turn = 0
        while on_their_way or following is not None:
            while following is not None and following[0] < turn + TASKS_PER_WORKER * self._count:
                worker = next((worker for worker in self._workers if worker.idle), None)
                if worker is None:
                    break
                number, on_their_way[number] = following
                self._send(worker, *following)
                following = next(numbered, None)
            replies.update(self._replies(on_their_way, 0 if turn in replies else self._poll_s))
            if turn in replies:
                reply = replies.pop(turn)
                if isinstance(reply, (PipelineError, WorkerLost)):
                    raise reply
                del on_their_way[turn]
                turn += 1
                yield reply

    def _start(self) -> _Worker:
        ours, theirs = _CONTEXT.Pipe()
        cursor = _CONTEXT.RawValue("q", NOWHERE)
        arguments = (theirs, cursor, pickle.dumps(self._load), self._limits, os.getpid())
        process = _CONTEXT.Process(target=serve, args=arguments, daemon=True)
        process.start()
        theirs.close()  # so that the end of the worker is the end of the pipe
        return _Worker(process, ours, cursor)

    def _send(self, worker: _Worker, number: int, task: Task[State, Any]) -> None:
        worker.number = number
        worker.silent_s = 0.0
        try:
            worker.connection.send(task)
        except OSError:
            return  # it died meanwhile, which is found when its reply is read

    def _replies(self, tasks: dict[int, Task[State, Any]], timeout_s: float) -> dict[int, Any]:
        """What workers have sent, or why they will not, by the number of the task; waits for the first of them."""
        begun_s = time.monotonic()
        ready = wait([worker.connection for worker in self._workers], timeout_s)
        waited_s = min(time.monotonic() - begun_s, self._poll_s)  # so that a stopped machine is no silent worker
        replies = {}
        for worker in list(self._workers):
            if worker.connection in ready:
                reply = self._receive(worker, tasks)
            elif self._is_silent(worker, waited_s):
                reply = self._lost(worker, tasks, Cause.SILENT, f"no progress in {self._limits.silence_s:g} s")
            else:
                continue
            if worker.number is not None:
                replies[worker.number] = reply
            elif worker.loaded or reply is not None:
                raise reply
            worker.loaded, worker.number = True, None
        return replies

    def _receive(self, worker: _Worker, tasks: dict[int, Task[State, Any]]) -> Any:
        try:
            reply = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join()
            return self._lost(worker, tasks, *_cause_of_death(worker.process.exitcode or 0, self._limits))
        if isinstance(reply, MemoryError):
            return self._lost(worker, tasks, Cause.MEMORY, _memory_text(self._limits), dead=False)
        return reply

    def _is_silent(self, worker: _Worker, waited_s: float) -> bool:
        if worker.idle or worker.cursor.value != worker.last_position:
            worker.silent_s, worker.last_position = 0.0, worker.cursor.value
            return False
        worker.silent_s += waited_s
        return worker.silent_s >= self._limits.silence_s

    def _lost(
        self, worker: _Worker, tasks: dict[int, Task[State, Any]], cause: Cause, detail: str, dead: bool = True
    ) -> WorkerLost:
        if dead:
            self._workers.remove(worker)
            worker.end()
        position = worker.cursor.value
        task = None if worker.number is None else tasks[worker.number]
        return WorkerLost(cause, detail, task, None if position == NOWHERE else position)

    def _end(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.end()
        self._workers.clear()


def _cause_of_death(exit_code: int, limits: Limits) -> tuple[Cause, str]:
    if exit_code == -signal.SIGPROF:
        return Cause.CPU, f"more than {limits.cpu_s:g} s of CPU time"
    if exit_code == -signal.SIGKILL:
        peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        return Cause.KILLED, f"killed from outside (SIGKILL), at {peak_mb:,.0f} MB"
    if exit_code == -signal.SIGABRT:  # what native code does when it is refused memory
        return Cause.MEMORY, _memory_text(limits)
    if exit_code < 0:
        return Cause.CRASHED, f"crashed ({signal.Signals(-exit_code).name})"
    raise RuntimeError(f"a worker ended with exit code {exit_code}; its traceback is above")


def _memory_text(limits: Limits) -> str:
    return f"more than {limits.memory_bytes / 2**30:.1f} GiB of memory"
