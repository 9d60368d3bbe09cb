"""Worker processes that run untrusted code (a chat template) in limits, with ordered results.

Results arrive in the order of their tasks for any number of workers. A worker that dies, hangs or
exceeds its limits becomes a `WorkerLost` that names the item it worked on. No worker outlives the
process that started it. The number of tasks in flight is bounded, and so is the memory. This is no
protection against kernel exploits.
"""

import ctypes
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import psutil

from pipeline_lib.core.errors import PipelineError
from pipeline_lib.core.processes import die_with_parent
from pipeline_lib.core.signals import handle_stops

# The worker side: load the state, then answer tasks. A chat template is untrusted code. The kernel
# limits the memory of the process and the CPU time of each piece of work, so that an endless loop
# or a memory bomb in a template costs no more than a worker.

State = TypeVar("State")
Result = TypeVar("Result")

NOWHERE = -1  # the position of a worker that runs no untrusted code


@dataclass(frozen=True)
class Limits:
    """The resources that a worker may use before it is killed."""

    # Address space beyond what the worker has after loading. The longest line that is read takes
    # some 1.5 GiB, unless it has to go whole through `tokenizers`, which takes 0.2 GiB for a
    # million characters.
    memory_bytes: int = 4 << 30
    cpu_s: float = 10.0  # CPU time of one guarded piece of work
    cpu_s_per_mb: float = 2.0  # and for each MB of its input
    silence_s: float = 600.0  # wall time without any progress


@dataclass(frozen=True)
class Guard:
    """A worker's guard: it publishes its item, and the kernel ends the process after too long."""

    cursor: Any  # the position for the parent to read
    limits: Limits

    @contextmanager
    def at(self, position: int, size_bytes: int = 0) -> Iterator[None]:
        """Guard work on the task's item `position`, of `size_bytes`: the kernel limits CPU time."""
        self.cursor.value = position
        signal.setitimer(
            signal.ITIMER_PROF, self.limits.cpu_s + size_bytes / 1e6 * self.limits.cpu_s_per_mb
        )
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        # not in `finally`: after a failure the parent still reads the position
        self.cursor.value = NOWHERE


# Work for a worker: picklable. `Pool.map` raises its PipelineError again in the parent.
Task = Callable[[State, Guard], Result]


def serve(connection: Connection, cursor: Any, load: bytes, limits: Limits, parent: int) -> None:
    """Run a worker: call the pickled `load`, then answer tasks until the pipe closes."""
    handle_stops(signal.SIG_IGN)  # they reach the whole group, and the parent decides
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    die_with_parent(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would contain the user's data
    native = ctypes.CDLL(None)
    # There is one worker for each core, so native libraries must start no threads. `load` is
    # unpickled after this, because that imports the libraries that read these variables.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS"):
        native.setenv(name.encode(), b"1", 1)
    native.setenv(b"TOKENIZERS_PARALLELISM", b"false", 1)
    try:
        state = pickle.loads(load)()  # noqa: S301 - it comes from our parent
    except PipelineError as error:
        connection.send(error)
        return
    if sys.platform == "linux":
        limit = psutil.Process().memory_info().vms + limits.memory_bytes
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    guard = Guard(cursor, limits)
    connection.send(None)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        cursor.value = NOWHERE
        try:
            with _PanicForMemory():
                connection.send(task(state, guard))
        except MemoryError:
            # a new one: the frames of the original keep the memory alive
            connection.send(MemoryError())
        except PipelineError as error:
            connection.send(error)


class _PanicForMemory:
    """A block that turns Rust's panic for lack of memory into MemoryError.

    The panic's class cannot be imported.
    """

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        """Raise MemoryError in the place of the panic."""
        if kind is not None and kind.__name__ == "PanicException" and "memory" in str(error):
            raise MemoryError from error


# Spawned, not forked: the parent may have threads and use a GPU.
_CONTEXT = multiprocessing.get_context("spawn")
# the most tasks in flight per worker, from reading a task to yielding its result
TASKS_PER_WORKER = 4
_POLL_S = 2.0


class LossCause(StrEnum):
    """The cause of the loss of a worker."""

    CPU = "cpu"
    MEMORY = "memory"
    KILLED = "killed"
    SILENT = "silent"
    CRASHED = "crashed"


@dataclass(eq=False)
class WorkerLost(Exception):
    """A worker's loss: `task` is what it worked on, `position` the task's item, or None."""

    cause: LossCause
    detail: str
    task: Any = None
    position: int | None = None

    def __str__(self) -> str:
        return self.detail


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    cursor: Any
    loaded: bool = False
    number: int | None = None  # number of the task in work
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
    """Worker processes that each `load()` their own state and then run tasks on it.

    Use in a `with` block.
    """

    def __init__(
        self, load: Callable[[], State], workers: int, limits: Limits | None = None
    ) -> None:
        """Prepare `workers` processes; `load` must be picklable."""
        self._load = load
        self._count = workers
        self._limits = limits or Limits()
        self._poll_s = min(_POLL_S, self._limits.silence_s / 4)
        self._workers: list[_Worker] = []

    def __enter__(self) -> "Pool[State]":
        """Start the workers without waiting for them."""
        with ExitStack() as undo:
            undo.callback(self._end)
            for _ in range(self._count):
                self._workers.append(self._start())
            undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        """End the workers."""
        self._end()

    def map(
        self,
        tasks: Iterable[Task[State, Result]],
        replace: Callable[[WorkerLost], Task[State, Result] | None] = lambda lost: None,
    ) -> Iterator[Result]:
        """Yield the result of each task, in order. `tasks` is read as workers become free.

        If the worker of a task is lost, the task that `replace` returns is run in its place. Raises
        WorkerLost if it returns None, or the PipelineError that a task raised, in place of the
        result.
        """
        on_their_way: dict[int, Task[State, Result]] = {}
        replies: dict[int, Any] = {}
        again: list[int] = []  # numbers of tasks that replace others
        numbered = enumerate(tasks)
        # read ahead, so that a worker that becomes free need not wait for the disk
        following = next(numbered, None)
        turn = 0
        while on_their_way or following is not None:
            while worker := next((worker for worker in self._workers if worker.idle), None):
                if again:
                    number = again.pop(0)
                    self._send(worker, number, on_their_way[number])
                elif following is not None and following[0] < turn + TASKS_PER_WORKER * self._count:
                    number, on_their_way[number] = following
                    self._send(worker, number, on_their_way[number])
                    following = next(numbered, None)
                else:
                    break
            for number, reply in self._replies(
                on_their_way, 0 if turn in replies else self._poll_s
            ).items():
                task = replace(reply) if isinstance(reply, WorkerLost) else None
                if task is None:
                    replies[number] = reply
                    continue
                on_their_way[number] = task
                again.append(number)
                self._workers += [self._start() for _ in range(self._count - len(self._workers))]
            if turn in replies:
                reply = replies.pop(turn)
                if isinstance(reply, (PipelineError, WorkerLost)):
                    raise reply
                del on_their_way[turn]
                turn += 1
                yield reply

    def _send(self, worker: _Worker, number: int, task: Task[State, Any]) -> None:
        worker.number, worker.silent_s = number, 0.0
        with suppress(OSError):  # the worker has died; `_replies` finds out
            worker.connection.send(task)

    def _start(self) -> _Worker:
        ours, theirs = _CONTEXT.Pipe()
        cursor = _CONTEXT.RawValue("q", NOWHERE)
        arguments = (theirs, cursor, pickle.dumps(self._load), self._limits, os.getpid())
        process = _CONTEXT.Process(target=serve, args=arguments, daemon=True)
        process.start()
        theirs.close()  # so that the pipe closes when the worker ends
        return _Worker(process, ours, cursor)

    def _replies(self, tasks: dict[int, Task[State, Any]], timeout_s: float) -> dict[int, Any]:
        """Wait at most `timeout_s`; return the replies and WorkerLost errors by task number."""
        begun_s = time.monotonic()
        ready = wait([worker.connection for worker in self._workers], timeout_s)
        # a suspended machine does not make workers silent
        waited_s = min(time.monotonic() - begun_s, self._poll_s)
        replies = {}
        for worker in list(self._workers):
            if worker.connection in ready:
                reply = self._receive(worker, tasks)
            elif self._is_silent(worker, waited_s):
                reply = self._lost(
                    worker, tasks, LossCause.SILENT, f"no progress in {self._limits.silence_s:g} s"
                )
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
            return self._lost(
                worker, tasks, *_cause_of_death(worker.process.exitcode or 0, self._limits)
            )
        if isinstance(reply, MemoryError):
            return self._lost(
                worker, tasks, LossCause.MEMORY, _memory_text(self._limits), dead=False
            )
        return reply

    def _is_silent(self, worker: _Worker, waited_s: float) -> bool:
        if worker.idle or worker.cursor.value != worker.last_position:
            worker.silent_s = 0.0
            worker.last_position = worker.cursor.value
            return False
        worker.silent_s += waited_s
        return worker.silent_s >= self._limits.silence_s

    def _lost(
        self,
        worker: _Worker,
        tasks: dict[int, Task[State, Any]],
        cause: LossCause,
        detail: str,
        dead: bool = True,
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


def _cause_of_death(exit_code: int, limits: Limits) -> tuple[LossCause, str]:
    if exit_code == -signal.SIGPROF:
        return LossCause.CPU, f"more than {limits.cpu_s:g} s of CPU time"
    if exit_code == -signal.SIGKILL:
        peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        return LossCause.KILLED, f"killed from outside (SIGKILL), at {peak_mb:,.0f} MB"
    if exit_code == -signal.SIGABRT:  # native code aborts when an allocation fails
        return LossCause.MEMORY, _memory_text(limits)
    if exit_code < 0:
        return LossCause.CRASHED, f"crashed ({signal.Signals(-exit_code).name})"
    raise RuntimeError(f"a worker ended with exit code {exit_code}; its traceback is above")


def _memory_text(limits: Limits) -> str:
    return f"more than {limits.memory_bytes / 2**30:.1f} GiB of memory"
