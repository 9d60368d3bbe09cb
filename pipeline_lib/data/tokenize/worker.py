"""The life of one worker process: it loads, then answers tasks, and foreign code in it is limited by the kernel.

A chat template is code of others. It runs here with a limit of memory on the process and of CPU time on each piece
of work, so that neither a loop nor a bomb in it costs more than a worker.
"""

import ctypes
import os
import pickle
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol, TypeVar

import psutil

from pipeline_lib.base.errors import PipelineError

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
