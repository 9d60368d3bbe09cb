"""Worker processes in which foreign code (a model's chat template) runs within limits, and results keep their order.

Promise: results arrive in the order of their tasks whatever the number of workers; a worker that dies, hangs or
outgrows its limits becomes a `WorkerLost` that says what it was at; none outlives the process that started it.
The number of tasks on their way is bounded, so the memory is too. Not promised: a wall against a kernel exploit.
"""

import multiprocessing
import os
import pickle
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Generic, TypeVar

from pipeline_lib.base.errors import PipelineError
from pipeline_lib.data.tokenize.worker import NOWHERE, Limits, Task, serve

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
