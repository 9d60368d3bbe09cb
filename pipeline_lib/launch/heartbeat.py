"""Every rank's sign of life: a small file that a thread renews, and who has stopped renewing it.

The times that are compared are those that the file server gave the files of one folder, never a
machine's own clock.
"""

import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeline_lib.core.errors import LockLost
from pipeline_lib.core.events import EventName
from pipeline_lib.core.run_folder import HEARTBEATS
from pipeline_lib.launch.environment import HOST_VARIABLE

EVERY_S = 5.0
BEATS_OF_A_TIMEOUT = 4  # so that a frozen rank has missed some when its peers give up
MISSED_BEATS = 2  # more than these make a rank silent
ENDED = "ended"


@dataclass(frozen=True)
class Sign:
    """What a rank said last.

    `heard_s` is a time of the file server: compare it with other signs only.
    """

    rank: int
    host: str
    pid: int
    step: int
    doing: str
    every_s: float
    for_s: float  # for how long it had been doing that
    heard_s: float = 0.0

    def lost(self, why: str, silent_s: float | None = None) -> "LostRank":
        """Return what is known of the rank once it is lost."""
        return LostRank(self.rank, why, self.host, self.pid, self.step, self.doing, silent_s)


@dataclass(frozen=True)
class LostRank:
    """A rank that its peers waited for.

    `silent_s` is by how much its last sign is older than the newest of all.
    """

    rank: int
    why: str  # silent, behind or never heard
    host: str | None = None
    pid: int | None = None
    step: int | None = None
    doing: str | None = None
    silent_s: float | None = None

    def __str__(self) -> str:
        """Return a clause like `rank 3 on n2 was last heard 12 s before the others, in step 41`."""
        if self.host is None:
            return f"rank {self.rank} was never heard: it did not start"
        doing = f"{self.doing}, after step {self.step}"
        if self.doing == "training":
            doing = f"in step {self.step}"
        if self.why == "behind":
            return f"rank {self.rank} on {self.host} was behind the others, {doing}"
        return (
            f"rank {self.rank} on {self.host} was last heard {self.silent_s:.0f} s before the "
            f"others, {doing}"
        )


class Heartbeat:
    """Renews the file of one rank until the block ends.

    A process that is frozen or dead does not.
    """

    def __init__(self, run_dir: Path, rank: int, host: str, timeout_s: float) -> None:
        """Prepare for rank `rank` of the run in `run_dir`; peers give it up after `timeout_s`."""
        self._path = run_dir / HEARTBEATS / f"rank-{rank}.json"
        self._rank = rank
        self._host = host
        self._every_s = min(EVERY_S, timeout_s / BEATS_OF_A_TIMEOUT)
        self._step, self._doing, self._since_s = 0, "starting", time.monotonic()
        self._over, self._is_due = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._renew, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._beat()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Write a last sign, so an ended rank does not seem lost; none once the lock is lost."""
        self._over.set()
        self._is_due.set()
        self._thread.join()
        if isinstance(error, LockLost):
            return
        self._doing, self._since_s = ENDED, time.monotonic()
        self._beat()

    def observe(self, name: str, fields: dict[str, Any]) -> None:
        """Take from an event of the run what the rank does now."""
        if name == EventName.STEP_BEGIN:
            self._go_on(int(fields["step"]), "training")
        elif name == EventName.RANK_DOING:
            self._go_on(self._step, str(fields["what"]))

    def _go_on(self, step: int, doing: str) -> None:
        """Note what the rank does now; replace a sign of a long activity at once.

        Else a rank that is killed soon after it began would be taken for one that others waited
        for.
        """
        was_long = time.monotonic() - self._since_s > MISSED_BEATS * self._every_s
        self._step, self._doing, self._since_s = step, doing, time.monotonic()
        if was_long:
            self._is_due.set()

    def _renew(self) -> None:
        while not self._over.is_set():
            self._is_due.wait(self._every_s)
            self._is_due.clear()
            if not self._over.is_set():
                self._beat()

    def _beat(self) -> None:
        """Replace the file without waiting for the disk; ignore errors.

        No training may fail for it.
        """
        for_s = round(time.monotonic() - self._since_s, 3)
        sign = Sign(
            self._rank, self._host, os.getpid(), self._step, self._doing, self._every_s, for_s
        )
        fields = {name: value for name, value in asdict(sign).items() if name != "heard_s"}
        partial = self._path.with_suffix(".partial")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(fields), encoding="utf-8")
            partial.replace(self._path)


def host_of(environ: Mapping[str, str]) -> str:
    """Return this node's name in the user's list of hosts or in SLURM, else that of the machine."""
    return environ.get(HOST_VARIABLE) or environ.get("SLURMD_NODENAME") or socket.gethostname()


def read_signs(run_dir: Path, ranks: int) -> dict[int, Sign]:
    """Return the last sign of each rank that gave one, by rank."""
    found = {}
    for rank in range(ranks):
        path = run_dir / HEARTBEATS / f"rank-{rank}.json"
        with suppress(OSError, ValueError, TypeError), path.open(encoding="utf-8") as file:
            # Of the opened file: over NFS that is asked for, and not remembered.
            found[rank] = Sign(**json.load(file), heard_s=os.fstat(file.fileno()).st_mtime)
    return found


def find_lost(signs: Mapping[int, Sign], ranks: int) -> list[LostRank]:
    """Return the ranks that others waited for: silent or unheard ones, else those behind.

    The list may be empty.
    """
    if not signs:
        return []
    newest_s = max(sign.heard_s for sign in signs.values())
    unheard = [LostRank(rank, "never heard") for rank in range(ranks) if rank not in signs]
    running = [sign for sign in signs.values() if sign.doing != ENDED]
    silent = [sign for sign in running if newest_s - sign.heard_s > MISSED_BEATS * sign.every_s]
    if unheard or silent:
        lost = [sign.lost("silent", round(newest_s - sign.heard_s, 3)) for sign in silent]
        return sorted([*unheard, *lost], key=lambda one: one.rank)
    ahead = max(sign.step for sign in signs.values())
    # One that was not in its step for long may have gone on since, and have been killed with the
    # others.
    stuck = [
        sign for sign in running if sign.for_s > MISSED_BEATS * sign.every_s and sign.step < ahead
    ]
    return [sign.lost("behind", round(newest_s - sign.heard_s, 3)) for sign in stuck]
