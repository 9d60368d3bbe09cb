"""The ranks' processes on this machine: how a stop reaches them; none outlives its launcher."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from pipeline_lib.core.errors import Interrupted
from pipeline_lib.core.signals import handle_stops, restore

# A signal that asks a run to stop, as ranks hear it; and what their launcher passes on, which needs
# no torch.

# A rank blocks SLURM's warning signal first: it would kill the rank before or after the time in
# which it can save.
EARLY_SIGNAL = signal.SIGUSR1


class StopRequest:
    """Remembers that a signal asked us to stop; ranks agree on it at the next step boundary."""

    def __init__(self) -> None:
        """Begin with no request."""
        self.signal_number = 0

    def __enter__(self) -> "StopRequest":
        self._before = handle_stops(self._remember)
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {EARLY_SIGNAL})
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Restore the mask, which blocks a warning that comes too late, and the handlers.

        After an error the handlers stay: a launcher sends SIGTERM once another rank is gone, and
        would kill this one before it can report.
        """
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        if kind is not None:
            return
        restore(self._before)

    def _remember(self, number: int, _frame: object) -> None:
        self.signal_number = number

    @property
    def is_set(self) -> bool:
        """Whether a signal came."""
        return self.signal_number != 0


# The processes of the ranks on this machine: how a request to stop reaches them, and that none
# outlives its launcher.
#
# Launchers end their ranks soon after a signal, too soon to save. So launchers never hear of it:
# they run in a session of their own, and the ranks are told directly.

RETELL_S = 0.5
LOOK_S = 1.0
LAST_WORDS_S = 4.0
GIVE_UP_S = 30.0
END_S = 15.0


def rank_processes(out: Path) -> list[psutil.Process]:
    """Return the ranks on this machine that write to `out`, without what they started.

    The doctor's probes count as ranks; their `out` is a token instead of a folder.
    """
    found = {}
    for process in psutil.process_iter(["cmdline", "ppid"]):
        command = [part for part in process.info["cmdline"] or [] if part != "-u"]
        if (
            command[1:3] == ["-m", "pipeline_lib"]
            and command[3:4] in (["rank"], ["probe"])
            and str(out) in command
        ):
            found[process.pid] = process
    return [process for process in found.values() if process.info["ppid"] not in found]


@contextmanager
def ranks_asked_to_stop(
    out: Path, asked: threading.Event, stop_in_s: float | None = None
) -> Iterator[None]:
    """Send SIGTERM to each rank here, also to later ones, once `asked` is set or after `stop_in_s`.

    The ranks agree on a step, save and end.
    """
    over = threading.Event()

    def ask() -> None:
        asked.wait(stop_in_s)
        told: set[psutil.Process] = set()
        while not over.is_set():
            for process in rank_processes(out):
                if process not in told:
                    with suppress(psutil.NoSuchProcess):
                        process.send_signal(signal.SIGTERM)
                    told.add(process)
            over.wait(RETELL_S)

    asker = threading.Thread(target=ask, daemon=True)
    asker.start()
    try:
        yield
    finally:
        over.set()
        asked.set()
        asker.join()


@contextmanager
def stop_requests_received(asked: threading.Event) -> Iterator[None]:
    """Set `asked` at a signal to stop, instead of ending this process; ignore later signals.

    So the process can say what was saved, whatever else sends the same signal again.
    """
    heard = threading.Event()

    def remember(_number: int, _frame: object) -> None:
        asked.set()
        heard.set()

    before = handle_stops(remember)
    try:
        yield
    finally:
        if heard.is_set():
            handle_stops(signal.SIG_IGN)
        else:
            restore(before)


@contextmanager
def stop_requests_passed_on(out: Path, stop_in_s: float | None = None) -> Iterator[None]:
    """Pass a signal to stop on to this machine's ranks; after `stop_in_s` ask without one."""
    asked = threading.Event()
    with stop_requests_received(asked), ranks_asked_to_stop(out, asked, stop_in_s):
        yield


@contextmanager
def frozen_ranks_ended(out: Path, peer_is_lost: Callable[[], bool]) -> Iterator[None]:
    """Kill ranks on this machine that do not end by themselves once a rank has lost a peer.

    Launchers ask them to end by SIGTERM, which a frozen rank does not handle, and wait for half a
    minute.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(LOOK_S):
            if peer_is_lost() and not over.wait(LAST_WORDS_S):
                _kill(rank_processes(out))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def run_launcher(
    command: list[str],
    environ: Mapping[str, str],
    out: Path,
    is_given_up: Callable[[], bool],
    give_up_s: float = GIVE_UP_S,
    output: Callable[[str], None] | None = None,
) -> int:
    """Run `command` until it ends; return its exit code, negative if a signal killed it.

    No rank outlives this call. The launcher is killed `give_up_s` after `is_given_up` is true: srun
    waits for a node as long as SLURM does. `output` gets the lines that the launcher and its ranks
    print; without it they print where this process does.
    """
    pipe: dict[str, Any] = {}
    if output:
        pipe = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
            "errors": "replace",
        }
    process = subprocess.Popen(
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        **pipe,
    )
    reader = threading.Thread(target=_pass_lines, args=(process.stdout, output), daemon=True)
    reader.start()
    given_up_s = None
    try:
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(LOOK_S)
            if given_up_s is None and is_given_up():
                given_up_s = time.monotonic()
            if given_up_s is not None and time.monotonic() - given_up_s >= give_up_s:
                return Interrupted.exit_code
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        # Ranks notice the end of their launcher by themselves; those that do not are killed.
        _kill(psutil.wait_procs(rank_processes(out), timeout=END_S)[1])
        reader.join(LAST_WORDS_S)


def _pass_lines(stream: IO[str] | None, output: Callable[[str], None] | None) -> None:
    if stream is not None and output is not None:
        for line in stream:
            output(line.rstrip("\n"))


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
