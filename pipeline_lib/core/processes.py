"""Processes that end with the process they work for, and how they start fast."""

import ctypes
import gc
import importlib.util
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path

import psutil

OWNER_VARIABLE = "PIPELINE_OWNER"
POLL_S = 0.5
_PR_SET_PDEATHSIG = 1
_INIT_PID = 1


@contextmanager
def importing() -> Iterator[None]:
    """Stop the garbage collector in the context, and exclude its objects from later collections.

    All objects that exist at that time are excluded. torch and transformers create 430,000 objects
    that live as long as the process. Collections took a fifth of the time of their imports, and
    every later one 0.4 s. transformers takes another eighth for scipy and more for scikit-learn,
    which it needs for losses of object detection and for assisted generation, and 0.6 s for
    torchao, whose quantized weights no stage reads; accelerate takes some for boto3.
    """
    gc.disable()
    try:
        with unseen("scipy", "sklearn", "torchao", "boto3"):
            yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def unseen(*packages: str) -> Iterator[None]:
    """Hide `packages` in the context from libraries that look for one, unless already imported.

    They look with `importlib.util.find_spec`, and remember that an optional package is missing: do
    this only where this process never needs it through them. An import statement still finds it,
    for what cannot do without: scikit-learn imports scipy whatever anybody found.
    """
    found = importlib.util.find_spec
    left_out = [package for package in packages if package not in sys.modules]

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in left_out else found(name, package)

    importlib.util.find_spec = find
    try:
        yield
    finally:
        importlib.util.find_spec = found


@contextmanager
def hidden(package: str) -> Iterator[None]:
    """Let imports of `package` within the context fail, unless it is imported already.

    For libraries that try to import it. What cannot do without it fails too: use `unseen` for those
    that look first.
    """
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # type: ignore[assignment]  # as Python documents it
    try:
        yield
    finally:
        del sys.modules[package]


def die_with_parent(parent_pid: int | None = None) -> None:
    """Ask Linux to kill this process when its parent dies: `parent_pid`, or any but init."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        pid = os.getppid()
        has_died = pid == _INIT_PID if parent_pid is None else pid != parent_pid  # before we asked
        if has_died:
            os.kill(os.getpid(), signal.SIGKILL)


def describe_owner() -> str:
    """Return this process as OWNER_VARIABLE's value: host, PID namespace, PID, creation time."""
    me = psutil.Process()
    return f"{_place()} {me.pid} {me.create_time()}"


def die_with_owner(environ: Mapping[str, str]) -> None:
    """Kill this process once the owner in `environ`, or any launcher between them, has ended.

    A thread watches them. Nothing is watched on another machine or in another container, where the
    owner is not visible.
    """
    place, _, process = environ.get(OWNER_VARIABLE, "").rpartition(" ")[0].rpartition(" ")
    if not process or place != _place():
        return
    watched = _chain_to(int(process), started_s=float(environ[OWNER_VARIABLE].rpartition(" ")[2]))

    def watch() -> None:
        while watched and all_alive(watched):
            time.sleep(POLL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def snakemake_above() -> list[psutil.Process]:
    """Return the processes from this one's parent to the outermost Snakemake; none without it."""
    parents = psutil.Process().parents()
    is_snakemake = []
    for parent in parents:
        try:
            is_snakemake.append(any("snakemake" in part for part in parent.cmdline()[:3]))
        except psutil.Error:
            is_snakemake.append(False)
    return parents[
        : max((index + 1 for index, found in enumerate(is_snakemake) if found), default=0)
    ]


def all_alive(processes: Sequence[psutil.Process]) -> bool:
    """Return whether each of `processes` is still running."""
    return all(_is_alive(process) for process in processes)


def _place() -> str:
    """Return the host and PID namespace: PIDs are comparable in one container of one machine."""
    try:
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _chain_to(owner_pid: int, started_s: float) -> list[psutil.Process]:
    """Return the owner and the processes between it and this one; none if the owner has ended."""
    try:
        owner = psutil.Process(owner_pid)
        if abs(owner.create_time() - started_s) > 0.01:
            return []
        parents = psutil.Process().parents()
    except psutil.NoSuchProcess:
        return []
    return parents[: parents.index(owner) + 1] if owner in parents else [owner]


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
