"""Child processes for tests of what happens between processes, and when one of them is killed."""

import multiprocessing
import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil

# starts in milliseconds, and needs nothing that can be pickled
FORK = multiprocessing.get_context("fork")
# `make mutants` waits less: what it tries often hangs
DEADLINE_S = float(os.environ.get("TESTS_DEADLINE_S", "300"))


@contextmanager
def running(function: Callable[..., None], *arguments: Any) -> Iterator[BaseProcess]:
    """`function` in a child process, which is killed, if it still runs, when the block ends."""
    process = FORK.Process(target=function, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()


def finish(processes: list[BaseProcess]) -> None:
    """Wait until all have ended well."""
    for process in processes:
        process.join(DEADLINE_S)
        assert process.exitcode == 0, f"child {process.pid} ended with {process.exitcode}"


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` holds, and fail after a deadline."""
    deadline_s = monotonic() + DEADLINE_S
    while not condition():
        assert monotonic() < deadline_s, f"{what} did not happen in {DEADLINE_S} s"
        sleep(0.005)


def lines_of(path: Path) -> list[str]:
    """The lines of the file at `path`; none if there is no file."""
    return path.read_text().splitlines() if path.exists() else []


def workers_alive() -> list[int]:
    """Processes below this one that multiprocessing has spawned or forked."""
    alive, own = [], psutil.Process().cmdline()
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it ended meanwhile
            command = child.cmdline()
            if command == own or "spawn_main" in " ".join(command):
                alive.append(child.pid)
    return alive


def free_port() -> int:
    """A free TCP port on loopback, below the system's range for outgoing connections.

    Each of up to 16 pytest workers has 750 of its own: it may take a rank half a minute to begin to
    listen.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    ports = (
        range(20_000, 32_000)[750 * (int(worker) % 16) :][:750] if worker else range(20_000, 32_000)
    )
    while True:
        port = random.choice(ports)
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
