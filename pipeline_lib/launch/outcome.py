"""What happened to the ranks: their reports, their signs of life, and one message for the user."""

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeline_lib.core.errors import (
    CONTINUES,
    DataError,
    DiskFull,
    Diverged,
    IntegrityError,
    Interrupted,
    LockLost,
    PeerLost,
    PipelineError,
    TrainingError,
)
from pipeline_lib.core.events import EventName
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.core.run_folder import CHECKPOINTS, ERRORS, HEARTBEATS, sealed_steps
from pipeline_lib.launch.environment import HOST_VARIABLE

# Whose report is told when a training ends: one order for the launcher, and for who looks at what it left.
#
# Knows only what a report says, so that looking needs no torch.

MISTAKE_CODE = 1  # of a rank that ended with an exception that nobody foresaw


class Cause(StrEnum):
    """Why a rank ended before its work was done. The names are stable: reports hold them."""

    ERROR = "error"  # of its own, which its exit code tells apart
    DIVERGED = "diverged"  # as in errors.Diverged
    STOPPED = "stopped"  # as all ranks agreed
    PEER_LOST = "peer_lost"
    MISTAKE = "mistake"  # an exception that nobody foresaw

    @staticmethod
    def of(error: BaseException) -> "Cause":
        """Return the cause for the type of `error`."""
        kinds = (
            (PeerLost, Cause.PEER_LOST),  # before Interrupted, which it is too
            (Interrupted, Cause.STOPPED),
            (Diverged, Cause.DIVERGED),
            (PipelineError, Cause.ERROR),
        )
        return next((cause for kind, cause in kinds if isinstance(error, kind)), Cause.MISTAKE)


class Blame(IntEnum):
    """What a rank ended with, the most telling first. A rank that was killed left no report."""

    OWN_ERROR = 1  # or a stop that all agreed on
    KILLED = 2
    MISTAKE = 3
    COMPLAINT = 4  # about the absence of a peer


@dataclass(frozen=True)
class Report:
    """Why a rank failed."""

    rank: int
    exit_code: int
    message: str
    cause: Cause

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "Report | None":
        """Return the report in `fields`; None if there is none. Without a cause, it gets that of its exit code."""
        rank, exit_code, message = (fields.get(name) for name in ("rank", "exit_code", "message"))
        if not isinstance(rank, int) or not isinstance(exit_code, int) or not isinstance(message, str):
            return None
        causes = {Interrupted.exit_code: Cause.PEER_LOST, MISTAKE_CODE: Cause.MISTAKE}
        cause = fields.get("cause")
        known = Cause(cause) if cause in list(Cause) else causes.get(exit_code, Cause.ERROR)
        return Report(rank, exit_code, message, known)

    @property
    def blame(self) -> Blame:
        """How telling the report is among those of its run."""
        return {Cause.PEER_LOST: Blame.COMPLAINT, Cause.MISTAKE: Blame.MISTAKE}.get(self.cause, Blame.OWN_ERROR)


# A sign of life of every rank: a small file that a thread renews, and who has stopped renewing his.
#
# The times that are compared are those that the file server gave the files of one folder, never a machine's own clock.

EVERY_S = 5.0
BEATS_OF_A_TIMEOUT = 4  # so that a frozen rank has missed some when its peers give up
MISSED_BEATS = 2  # more than these make a rank silent
ENDED = "ended"


@dataclass(frozen=True)
class Sign:
    """What a rank said last. `heard_s` is a time of the file server: compare it with other signs only."""

    rank: int
    host: str
    pid: int
    step: int
    doing: str
    every_s: float
    for_s: float  # for how long it had been doing that
    heard_s: float = 0.0

    def lost(self, why: str, silent_s: float | None = None) -> "Lost":
        """Return what is known of the rank once it is lost."""
        return Lost(self.rank, why, self.host, self.pid, self.step, self.doing, silent_s)


@dataclass(frozen=True)
class Lost:
    """A rank that its peers waited for. `silent_s` is by how much its last sign is older than the newest of all."""

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
        doing = f"in step {self.step}" if self.doing == "training" else f"{self.doing}, after step {self.step}"
        if self.why == "behind":
            return f"rank {self.rank} on {self.host} was behind the others, {doing}"
        return f"rank {self.rank} on {self.host} was last heard {self.silent_s:.0f} s before the others, {doing}"


class Heartbeat:
    """Renews the file of one rank until the block ends. A process that is frozen or dead does not."""

    def __init__(self, run_dir: Path, rank: int, host: str, timeout_s: float) -> None:
        """Prepare for rank `rank` of the run in `run_dir`, whose peers give it up after `timeout_s`."""
        self._path = run_dir / HEARTBEATS / f"rank-{rank}.json"
        self._rank, self._host, self._every_s = rank, host, min(EVERY_S, timeout_s / BEATS_OF_A_TIMEOUT)
        self._step, self._doing, self._since_s = 0, "starting", time.monotonic()
        self._over, self._is_due = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._renew, name="heartbeat", daemon=True)

    def __enter__(self) -> "Heartbeat":
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Write a last sign, so that a rank that ended is not taken for lost; write none after the lock was lost."""
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
        """Note what the rank does now; a sign that it was at something else for long is replaced at once.

        Else a rank that is killed soon after it began would be taken for one that others waited for.
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
        """Replace the file, without waiting for the disk; ignore errors, since no training may fail for it."""
        for_s = round(time.monotonic() - self._since_s, 3)
        sign = Sign(self._rank, self._host, os.getpid(), self._step, self._doing, self._every_s, for_s)
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


def find_lost(signs: Mapping[int, Sign], ranks: int) -> list[Lost]:
    """Return the ranks that others waited for: silent or never heard ones, else those behind; or an empty list."""
    if not signs:
        return []
    newest_s = max(sign.heard_s for sign in signs.values())
    unheard = [Lost(rank, "never heard") for rank in range(ranks) if rank not in signs]
    running = [sign for sign in signs.values() if sign.doing != ENDED]
    silent = [sign for sign in running if newest_s - sign.heard_s > MISSED_BEATS * sign.every_s]
    if unheard or silent:
        lost = [sign.lost("silent", round(newest_s - sign.heard_s, 3)) for sign in silent]
        return sorted([*unheard, *lost], key=lambda one: one.rank)
    ahead = max(sign.step for sign in signs.values())
    # One that was not in its step for long may have gone on since, and have been killed with the others.
    stuck = [sign for sign in running if sign.for_s > MISSED_BEATS * sign.every_s and sign.step < ahead]
    return [sign.lost("behind", round(newest_s - sign.heard_s, 3)) for sign in stuck]


# What happened to the ranks, as one message: each leaves a report when it fails, and who leaves none was killed.

# None: of a launcher that has an exit code of its own for whatever its ranks end with. NCCL's watchdog aborts a rank
# that waited in vain; launchers end the others by the rest.
ENDED_WITH_OTHERS = (None, signal.SIGABRT, signal.SIGTERM, signal.SIGKILL)
# What an exit code of ours means, where no report says more.
MEANINGS = {
    DataError.exit_code: ", as where data cannot be used",
    IntegrityError.exit_code: ", as where files are not what was sealed",
    TrainingError.exit_code: ", as where the numbers go wrong",
    DiskFull.exit_code: ", as where the disk is full or a file cannot be written",
    Interrupted.exit_code: ", as one that was stopped",
}


class RankFailed(PipelineError):
    """A rank ended with a message of its own; its exit code becomes ours."""

    def __init__(self, message: str, exit_code: int) -> None:
        """Carry the rank's message and exit code."""
        super().__init__(message)
        self.exit_code = exit_code


class RanksLost(Interrupted):
    """The ranks in `lost` were killed, or their peers waited for them in vain."""

    def __init__(self, message: str, lost: Sequence[Lost]) -> None:
        """Carry the ranks, for the events."""
        super().__init__(message)
        self.lost = tuple(lost)


class Reporting:
    """Leaves the report of a rank whose block fails, for the launcher, which shows one for all."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Prepare for rank `rank` of the run in `run_dir`."""
        self._path, self._rank = run_dir / ERRORS / f"rank-{rank}.json", rank

    def __enter__(self) -> None:
        """Begin with nothing to report."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Write the report of a failure, or print it if it cannot be written; the exception is raised further.

        Write nothing after the lock was lost: reports are then the next owner's.
        """
        if error is None or isinstance(error, LockLost):
            return
        if isinstance(error, PipelineError):
            report = Report(self._rank, error.exit_code, str(error), Cause.of(error))
        else:
            what = traceback.format_exception_only(kind, error)[-1].strip()
            report = Report(self._rank, MISTAKE_CODE, f"{what}; its traceback is above", Cause.of(error))
        try:
            write_json(self._path, asdict(report))
        except (OSError, DiskFull):  # it often is what the failure is about
            print(f"error: rank {self._rank}: {report.message}", file=sys.stderr, flush=True)


def explain(launcher: str, exit_code: int, rank: int | None, ranks: int, run_dir: Path) -> PipelineError:
    """Return the most telling of what the ranks left: a rank's own error before a peer's complaint about its absence.

    `exit_code` is that of `rank`, the first to fail, if the launcher tells which one that is. Else `rank` is None and
    `exit_code` the launcher's own. It is negative if a signal killed the process.
    """
    reports = _read_reports(run_dir, ranks)
    silent = [number for number in range(ranks) if number not in reports]
    first = min(reports.values(), key=lambda report: (report.blame, report.rank), default=None)
    if rank is None and exit_code < 0 and (first is None or first.blame > Blame.OWN_ERROR):
        name = signal.Signals(-exit_code).name
        return Interrupted(f"{launcher} was killed by {name}, and its ranks with it; {how_to_continue(run_dir)}")
    is_complaint = first is not None and first.blame == Blame.COMPLAINT
    signs = read_signs(run_dir, ranks)
    number = _signal_of(exit_code)
    may_be_others = rank in reports or number in ENDED_WITH_OTHERS
    lost = [one for one in find_lost(signs, ranks) if one.rank in silent]
    if lost and may_be_others and (first is None or is_complaint):
        named = "; ".join(map(str, lost[:3]))
        if len(lost) > 3:
            named += f"; so were ranks {', '.join(str(one.rank) for one in lost[3:])}"
        return RanksLost(f"{named}; {how_to_continue(run_dir)}", lost)
    is_killed = is_complaint or number is not None
    if is_killed and silent and rank not in reports and (first is None or first.blame > Blame.KILLED):
        suspects = [rank] if rank is not None else silent
        killed = [signs[one].lost("killed") if one in signs else Lost(one, "killed") for one in suspects]
        # Where the rank is a guess, SIGTERM is not taken for the cause: launchers end the other ranks by it.
        return _killed(killed, None if rank is None and number == signal.SIGTERM else number, run_dir)
    if first is None:
        who = launcher if rank is None else f"rank {rank}"
        ended = f"{who} ended with code {exit_code}{MEANINGS.get(exit_code, '')}"
        return RankFailed(f"{ended}; its output is above", max(1, exit_code))
    if is_complaint and len(hosts := sorted({sign.host for sign in signs.values()})) > 1:
        where = f"every rank was heard to the end: look at the network between {', '.join(hosts[:4])}"
        return Interrupted(f"{first.message}; {where}")
    message = f"rank {first.rank}: {first.message}"
    return Diverged(message) if first.cause is Cause.DIVERGED else RankFailed(message, first.exit_code)


def explain_lost_hosts(error: PipelineError, lost: Mapping[str, str], ranks: int, run_dir: Path) -> PipelineError:
    """Return the loss of the hosts in `lost`, by name with the reason, unless `error` is a rank's own and says more."""
    if not lost or error.exit_code != Interrupted.exit_code:
        return error
    signs = read_signs(run_dir, ranks)
    on_them = [sign.lost("silent", 0.0) for _, sign in sorted(signs.items()) if sign.host in lost]
    named = "; ".join(f"host {host} was lost: {reason}" for host, reason in lost.items())
    return RanksLost(f"{named}; {how_to_continue(run_dir)}", on_them)


def peer_is_lost(run_dir: Path, ranks: int) -> bool:
    """Return whether a rank has ended because another did not answer."""
    return any(report.blame == Blame.COMPLAINT for report in _read_reports(run_dir, ranks).values())


def _read_reports(run_dir: Path, ranks: int) -> dict[int, Report]:
    found = {}
    for path in (run_dir / ERRORS).glob("rank-*.json"):  # listed: over NFS that asks for what came from other nodes
        report = Report.from_json(read_json(path))
        if report is not None and report.rank < ranks:
            found[report.rank] = report
    return found


def _killed(suspects: Sequence[Lost], number: int | None, run_dir: Path) -> PipelineError:
    who = f"rank {' or '.join(str(one.rank) for one in suspects)}"
    if hosts := sorted({one.host for one in suspects if one.host}):
        who += f" on {' or '.join(hosts[:4])}"
    name = f"was killed by {signal.Signals(number).name}" if number else "ended without a word, as one that is killed"
    hint = " (out of memory?)" if number in (None, signal.SIGKILL) else ""
    return RanksLost(f"{who} {name}{hint}; {how_to_continue(run_dir)}", suspects)


def _signal_of(exit_code: int) -> int | None:
    """Return the signal behind an exit code: subprocess says -9, a shell and srun 137."""
    for number in (-exit_code, exit_code - 128):
        if number in signal.valid_signals() and 0 < number < 32:
            return int(number)
    return None


def how_to_continue(run_dir: Path) -> str:
    """Return what is saved and how to continue, in words for the end of a message."""
    steps = sealed_steps(run_dir / CHECKPOINTS)
    saved = f"step {steps[-1][0]} is saved" if steps else "nothing was saved yet"
    return f"{saved}; {CONTINUES}"
