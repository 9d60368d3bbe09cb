"""Starts, finds and ends the daemons of a loopback cluster, each below a process of `supervise.py`.

Which of them live is read from /proc, never from a file of pids: such a file lies after a crash.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

SUPERVISE = Path(__file__).with_name("supervise.py")
Condition = Callable[[], bool]
DEADLINE_S = 120.0
END_S = 10.0  # for a daemon to end when it is asked to


class LoopbackError(Exception):
    """What went wrong with the cluster, and what to do."""


def wait_until(
    condition: Condition, what: str, timeout_s: float = DEADLINE_S, every_s: float = 0.05
) -> None:
    """Wait until `condition` holds, looked at every `every_s`; LoopbackError after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise LoopbackError(f"{what}: not within {timeout_s:g} s")
        time.sleep(every_s)


def start(folder: Path, name: str, command: list[str], environ: Mapping[str, str]) -> None:
    """Start the daemon `name`; its output goes to NAME.out.log in `folder`."""
    supervisor = [
        sys.executable,
        "-I",
        "-S",
        str(SUPERVISE),
        str(folder),
        name,
        str(folder / f"{name}.out.log"),
    ]
    subprocess.run([*supervisor, *command], env=environ, check=True, timeout=DEADLINE_S)


def run(folder: Path, name: str, command: list[str], environ: Mapping[str, str]) -> None:
    """Run a program that ends by itself as a daemon, so that no trace stays if we are killed."""
    start(folder, name, command, environ)
    wait_until(lambda: name not in supervisors(folder), f"the end of {name}")


def supervisors(folder: Path) -> dict[str, int]:
    """The supervisors' pids of daemons that run or left something, by the daemon's name."""
    found: dict[int, str] = {}
    for pid in _pids():
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            if words[3:5] == [str(SUPERVISE), str(folder)]:
                found[pid] = words[5]
    parents = _parents()
    # A child that has not yet become the daemon looks like its supervisor.
    return {
        name: pid for pid, name in found.items() if parents.get(pid) not in found and pid in parents
    }


def stop(folder: Path, name: str) -> None:
    """Ask the daemon `name` to end, and kill what is left after a while."""
    pid = supervisors(folder).get(name)
    if pid is None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    with contextlib.suppress(LoopbackError):
        wait_until(lambda: pid not in _parents(), f"the end of {name}", END_S)
    kill_tree(pid)


def kill_tree(pid: int) -> None:
    """End a supervisor and all below it at once, as a power loss does: no end is reported."""
    deadline_s = time.monotonic() + END_S
    while tree := descendants(pid):
        if time.monotonic() > deadline_s:
            raise LoopbackError(f"processes {sorted(tree)} do not end, though they were killed")
        stopped: set[int] = set()
        while new := tree - stopped:  # until none is left that could start another
            _send(new, signal.SIGSTOP)
            stopped |= new
            tree = descendants(pid)
        _send(tree, signal.SIGKILL)
        time.sleep(0.01)
    _send({pid}, signal.SIGKILL)
    wait_until(lambda: pid not in _parents(), f"the end of process {pid}", END_S)


def descendants(pid: int) -> set[int]:
    """All processes below `pid`."""
    parents = _parents()
    found: set[int] = set()
    new = {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found |= new
    return found


def _send(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdecimal()]  # noqa: PTH208 - thousands, often


def _parents() -> dict[int, int]:
    """The parent of each process that has not ended."""
    found = {}
    for pid in _pids():
        with contextlib.suppress(OSError):
            state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[pid] = int(parent)
    return found
