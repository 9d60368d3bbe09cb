"""What happened to the ranks, as one message: each leaves a report when it fails, and who leaves none was killed."""

import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from pipeline_lib.base.errors import (
    CONTINUES,
    DataError,
    DiskFull,
    Diverged,
    IntegrityError,
    Interrupted,
    LockLost,
    PipelineError,
    TrainingError,
)
from pipeline_lib.base.fsio import read_json, write_json
from pipeline_lib.base.run_folder import CHECKPOINTS, ERRORS, sealed_steps
from pipeline_lib.train.blame import MISTAKE_CODE, Blame, Cause, Report
from pipeline_lib.train.heartbeat import Lost, Sign, find_lost, read_signs

# None: of a launcher that has an exit code of its own for whatever its ranks end with. NCCL's watchdog aborts a rank
# that waited in vain; launchers end the others by the rest.
ENDED_WITH_OTHERS = (None, signal.SIGABRT, signal.SIGTERM, signal.SIGKILL)


class RankFailed(PipelineError):
    """A rank ended with a message of its own; its exit code becomes ours."""

    def __init__(self, message: str, exit_code: int) -> None:
        """Carry the rank's message and exit code."""
        super().__init__(message)
        self.exit_code = exit_code


class RanksLost(Interrupted):
    """Peers waited in vain for `lost`, or they were killed."""

    def __init__(self, message: str, lost: Sequence[Lost]) -> None:
        """Carry the ranks, for the events."""
        super().__init__(message)
        self.lost = tuple(lost)


class Reporting:
    """Leaves the report of a rank whose block fails, for the launcher, which shows one for all."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        """For the rank numbered `rank` of the run in `run_dir`."""
        self._path, self._rank = _report_path(run_dir, rank), rank

    def __enter__(self) -> None:
        """Begin with nothing to report."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Write the report, or print it where it cannot be written; the failure goes on its way.

        Where the lock was lost, reports are the next owner's.
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


def _report_path(run_dir: Path, rank: int) -> Path:
    return run_dir / ERRORS / f"rank-{rank}.json"


def explain(launcher: str, exit_code: int, rank: int | None, ranks: int, run_dir: Path) -> PipelineError:
    """The most telling of what the ranks left: a rank's own error before a peer's complaint about its absence.

    `exit_code` is that of `rank`, the first to fail, where the launcher tells which one; else the launcher's own,
    negative if a signal killed it.
    """
    reports = _read_reports(run_dir, ranks)
    silent = [number for number in range(ranks) if number not in reports]
    first = min(reports.values(), key=lambda report: (report.blame, report.rank), default=None)
    if rank is None and exit_code < 0 and (first is None or first.blame > Blame.OWN_ERROR):
        name = signal.Signals(-exit_code).name
        return Interrupted(f"{launcher} was killed by {name}, and its ranks with it; {how_to_continue(run_dir)}")
    is_complaint = first is not None and first.blame == Blame.COMPLAINT
    signs = read_signs(run_dir, ranks)
    may_be_others = rank in reports or _signal_of(exit_code) in ENDED_WITH_OTHERS
    lost = [one for one in find_lost(signs, ranks) if one.rank in silent]
    if lost and may_be_others and (first is None or is_complaint):
        return RanksLost(f"{_named(lost)}; {how_to_continue(run_dir)}", lost)
    is_killed = is_complaint or _signal_of(exit_code) is not None
    if is_killed and silent and rank not in reports and (first is None or first.blame > Blame.KILLED):
        suspects = [rank] if rank is not None else silent
        return _killed(exit_code, [_lost_sign(number, signs) for number in suspects], rank is None, run_dir)
    if first is None:
        who = launcher if rank is None else f"rank {rank}"
        ended = f"{who} ended with code {exit_code}{_meaning(exit_code)}"
        return RankFailed(f"{ended}; its output is above", max(1, exit_code))
    if is_complaint and len(hosts := sorted({sign.host for sign in signs.values()})) > 1:
        where = f"every rank was heard to the end: look at the network between {', '.join(hosts[:4])}"
        return Interrupted(f"{first.message}; {where}")
    told = f"rank {first.rank}: {first.message}"
    return Diverged(told) if first.cause is Cause.DIVERGED else RankFailed(told, first.exit_code)


def _meaning(exit_code: int) -> str:
    """What a code of our own says, where no report says more."""
    meanings = {
        DataError.exit_code: ", as where data cannot be used",
        IntegrityError.exit_code: ", as where files are not what was sealed",
        TrainingError.exit_code: ", as where the numbers go wrong",
        DiskFull.exit_code: ", as where the disk is full or a file cannot be written",
        Interrupted.exit_code: ", as one that was stopped",
    }
    return meanings.get(exit_code, "")


def peer_is_lost(run_dir: Path, ranks: int) -> bool:
    """Whether a rank has ended because another did not answer."""
    return any(report.blame == Blame.COMPLAINT for report in _read_reports(run_dir, ranks).values())


def _read_reports(run_dir: Path, ranks: int) -> dict[int, Report]:
    """What each rank left. The folder is listed: over NFS that asks for what came from other nodes."""
    found = {}
    for path in (run_dir / ERRORS).glob("rank-*.json"):
        report = Report.from_json(read_json(path))
        if report is not None and report.rank < ranks:
            found[report.rank] = report
    return found


def _named(lost: Sequence[Lost]) -> str:
    """A few of them in full, and the numbers of all."""
    shown = "; ".join(map(str, lost[:3]))
    return shown if len(lost) <= 3 else f"{shown}; so were ranks {', '.join(str(one.rank) for one in lost[3:])}"


def _lost_sign(rank: int, signs: Mapping[int, Sign]) -> Lost:
    sign = signs.get(rank)
    return Lost(rank, "killed", sign.host, sign.pid, sign.step, sign.doing) if sign else Lost(rank, "killed")


def _killed(exit_code: int, suspects: Sequence[Lost], is_guess: bool, run_dir: Path) -> PipelineError:
    """One of `suspects` was killed. A guess takes no SIGTERM for the cause: launchers end the others by it."""
    number = _signal_of(exit_code)
    if is_guess and number == signal.SIGTERM:
        number = None
    who = f"rank {' or '.join(str(one.rank) for one in suspects)}"
    if hosts := sorted({one.host for one in suspects if one.host}):
        who += f" on {' or '.join(hosts[:4])}"
    name = f"was killed by {signal.Signals(number).name}" if number else "ended without a word, as one that is killed"
    hint = " (out of memory?)" if number in (None, signal.SIGKILL) else ""
    return RanksLost(f"{who} {name}{hint}; {how_to_continue(run_dir)}", suspects)


def _signal_of(exit_code: int) -> int | None:
    """The signal behind an exit code: torch and subprocess say -9, a shell and srun 137, deepspeed -9 & 255."""
    for number in (-exit_code, exit_code - 128, 256 - exit_code):
        if number in signal.valid_signals() and 0 < number < 32:
            return int(number)
    return None


def how_to_continue(run_dir: Path) -> str:
    """What is saved, and what to do."""
    steps = sealed_steps(run_dir / CHECKPOINTS)
    saved = f"step {steps[-1][0]} is saved" if steps else "nothing was saved yet"
    return f"{saved}; {CONTINUES}"
