"""A sign of life of every rank: a small file that a thread renews, and who has stopped renewing his.

The times that are compared are those that the file server gave the files of one folder, never a machine's own clock.
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

from pipeline_lib.base.errors import LockLost
from pipeline_lib.base.run_folder import HEARTBEATS

EVERY_S = 5.0
BEATS_OF_A_TIMEOUT = 4  # so that a frozen rank has missed some when its peers give up
MISSED_BEATS = 2  # more than these make a rank silent
ENDED = "ended"


@dataclass(frozen=True)
class Sign:
    """What a rank said last. `heard_s` is a time of the file server, good for a comparison with other signs only."""

    rank: int
    host: str
    pid: int
    step: int
    doing: str
    every_s: float
    for_s: float  # for how long it had been doing that
    heard_s: float = 0.0


@dataclass(frozen=True)
class Lost:
    """A rank that its peers waited for. `silent_s` is how long before the last sign of any rank it gave its own."""

    rank: int
    why: str  # silent, behind or never heard
    host: str | None = None
    pid: int | None = None
    step: int | None = None
    doing: str | None = None
    silent_s: float | None = None

    def __str__(self) -> str:
        """`rank 3 on n2 was last heard 12 s before the others, in step 41`."""
        if self.host is None:
            return f"rank {self.rank} was never heard: it did not start"
        doing = f"in step {self.step}" if self.doing == "training" else f"{self.doing}, after step {self.step}"
        if self.why == "behind":
            return f"rank {self.rank} on {self.host} was behind the others, {doing}"
        return f"rank {self.rank} on {self.host} was last heard {self.silent_s:.0f} s before the others, {doing}"


class Heartbeat:
    """Renews the file of one rank until the block ends. A process that is frozen or dead does not."""

    def __init__(self, run_dir: Path, rank: int, host: str, timeout_s: float) -> None:
        """For the rank numbered `rank` of the run in `run_dir`, whose peers give it up after `timeout_s`."""
        self._path = _path(run_dir, rank)
        self._rank, self._host, self._every_s = rank, host, min(EVERY_S, timeout_s / BEATS_OF_A_TIMEOUT)
        self._step, self._doing, self._since_s = 0, "starting", time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        """Give the first sign."""
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Give the last one: who ends by himself has not been lost. None of a run that is the next owner's."""
        self._over.set()
        self._thread.join()
        if isinstance(error, LockLost):
            return
        self._doing, self._since_s = ENDED, time.monotonic()
        self._beat()

    def observe(self, name: str, fields: dict[str, Any]) -> None:
        """An observer of the run's events, which say what the rank does."""
        if name == "step.begin":
            self._step, self._doing, self._since_s = int(fields["step"]), "training", time.monotonic()
        elif name == "rank.doing":
            self._doing, self._since_s = str(fields["what"]), time.monotonic()

    def _renew(self) -> None:
        while not self._over.wait(self._every_s):
            self._beat()

    def _beat(self) -> None:
        """Replace the file, without waiting for the disk: only its age matters, and no training fails for it."""
        for_s = round(time.monotonic() - self._since_s, 3)
        sign = Sign(self._rank, self._host, os.getpid(), self._step, self._doing, self._every_s, for_s)
        fields = {name: value for name, value in asdict(sign).items() if name != "heard_s"}
        partial = self._path.with_suffix(".partial")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(fields), encoding="utf-8")
            partial.replace(self._path)


def host_of(environ: Mapping[str, str]) -> str:
    """As SLURM calls this node, where there is one: its name need not be that of the machine."""
    return environ.get("SLURMD_NODENAME") or socket.gethostname()


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / HEARTBEATS / f"rank-{rank}.json"


def read_signs(run_dir: Path, ranks: int) -> dict[int, Sign]:
    """The last sign of each rank that gave one."""
    found = {}
    for rank in range(ranks):
        with suppress(OSError, ValueError, TypeError), _path(run_dir, rank).open(encoding="utf-8") as file:
            # Of the opened file: over NFS that is asked for, and not remembered.
            found[rank] = Sign(**json.load(file), heard_s=os.fstat(file.fileno()).st_mtime)
    return found


def find_lost(signs: Mapping[int, Sign], ranks: int) -> list[Lost]:
    """Whom the others waited for: who is silent or never was heard; else who is behind. None if nobody stands out."""
    if not signs:
        return []
    newest_s = max(sign.heard_s for sign in signs.values())
    lost = [Lost(rank, "never heard") for rank in range(ranks) if rank not in signs]
    running = [sign for sign in signs.values() if sign.doing != ENDED]
    for sign in running:
        if newest_s - sign.heard_s > MISSED_BEATS * sign.every_s:
            lost.append(_lost(sign, "silent", newest_s))
    if lost:
        return sorted(lost, key=lambda one: one.rank)
    ahead = max(sign.step for sign in signs.values())
    # One that was not in its step for long may have gone on since, and have been killed with the others.
    stuck = [sign for sign in running if sign.for_s > MISSED_BEATS * sign.every_s]
    return [_lost(sign, "behind", newest_s) for sign in stuck if sign.step < ahead]


def _lost(sign: Sign, why: str, newest_s: float) -> Lost:
    silent_s = round(newest_s - sign.heard_s, 3)
    return Lost(sign.rank, why, sign.host, sign.pid, sign.step, sign.doing, silent_s)
