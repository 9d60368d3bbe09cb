"""Lifelines between processes: a worker dies with its owner, however many launchers are between them."""

import os
import signal
import socket
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

# Lifeline: a worker dies with its owner. The owner passes `describe_owner()` in the environment; `die_with_owner` kills
# the worker by SIGKILL once the owner, or any launcher between the two, has ended. Nothing is watched on another
# machine or in another container, where the owner is not visible.

OWNER_VARIABLE = "PIPELINE_OWNER"
POLL_S = 0.5


def describe_owner() -> str:
    """Return this process as the value of OWNER_VARIABLE: host and PID namespace, PID, creation time."""
    me = psutil.Process()
    return f"{_place()} {me.pid} {me.create_time()}"


def die_with_owner(environ: Mapping[str, str]) -> None:
    """Watch the owner named in `environ`, and every process between it and this one, from a thread."""
    place, _, process = environ.get(OWNER_VARIABLE, "").rpartition(" ")[0].rpartition(" ")
    if not process or place != _place():
        return
    started_s = float(environ[OWNER_VARIABLE].rpartition(" ")[2])
    watched = _chain_to(int(process), started_s)
    threading.Thread(target=_die_with, args=(watched,), name="lifeline", daemon=True).start()


def _place() -> str:
    """Return the host and PID namespace: PIDs are comparable only within one container of one machine."""
    try:
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _chain_to(owner_pid: int, started_s: float) -> list[psutil.Process] | None:
    """Return the owner and the processes between it and this one; None if the owner has ended."""
    try:
        owner = psutil.Process(owner_pid)
        if abs(owner.create_time() - started_s) > 0.01:
            return None
        parents = psutil.Process().parents()
    except psutil.NoSuchProcess:
        return None
    return parents[: parents.index(owner) + 1] if owner in parents else [owner]


def _die_with(watched: list[psutil.Process] | None) -> None:
    while watched is not None and all(is_alive(process) for process in watched):
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGKILL)


def is_alive(process: psutil.Process) -> bool:
    """Return whether `process` still runs; a zombie counts as ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
