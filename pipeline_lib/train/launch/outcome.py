"""What happened to the ranks, as one message: each leaves a report when it fails, and who leaves none was killed."""

import signal
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from pipeline_lib.base.errors import Interrupted, PipelineError
from pipeline_lib.base.fsio import read_json, write_json
from pipeline_lib.train.checkpoint import sealed_steps
from pipeline_lib.train.rank import CHECKPOINTS

ERRORS = "errors"
INTERNAL_ERROR_CODE = 1
LOST_A_PEER = "lost a peer"  # as train.dist says it


class RankFailed(PipelineError):
    """A rank ended with a message of its own; its exit code becomes ours."""

    def __init__(self, message: str, exit_code: int) -> None:
        """Carry the rank's message and exit code."""
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class Report:
    """Why a rank failed."""

    rank: int
    exit_code: int
    message: str

    @property
    def blame(self) -> int:
        """Where it stands: a rank's own error or an agreed stop, a kill (2), a mistake of ours, a peer's complaint."""
        if self.exit_code == Interrupted.exit_code:
            return 4 if LOST_A_PEER in self.message else 1
        return 3 if self.exit_code == INTERNAL_ERROR_CODE else 1


class Reporting:
    """Leaves the report of a rank whose block fails, for the launcher, which shows one for all."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        """For the rank numbered `rank` of the run in `run_dir`."""
        self._path, self._rank = _report_path(run_dir, rank), rank

    def __enter__(self) -> None:
        """Begin with nothing to report."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Write the report; the failure goes on its way."""
        if error is None:
            return
        if isinstance(error, PipelineError):
            report = Report(self._rank, error.exit_code, str(error))
        else:
            what = traceback.format_exception_only(kind, error)[-1].strip()
            report = Report(self._rank, INTERNAL_ERROR_CODE, f"{what}; its traceback is above")
        write_json(self._path, asdict(report))


def _report_path(run_dir: Path, rank: int) -> Path:
    return run_dir / ERRORS / f"rank-{rank}.json"


def explain(launcher: str, exit_code: int, rank: int | None, ranks: int, run_dir: Path) -> PipelineError:
    """The most telling of what the ranks left: a rank's own error before a peer's complaint about its absence.

    `exit_code` is that of `rank`, the first to fail, where the launcher tells which one; else the launcher's own,
    negative if a signal killed it.
    """
    reports = {}
    for number in range(ranks):
        path = _report_path(run_dir, number)
        if path.exists():
            reports[number] = Report(**read_json(path))
    silent = [number for number in range(ranks) if number not in reports]
    first = min(reports.values(), key=lambda report: (report.blame, report.rank), default=None)
    if rank is None and exit_code < 0 and (first is None or first.blame > 1):
        name = signal.Signals(-exit_code).name
        return Interrupted(f"{launcher} was killed by {name}, and its ranks with it; {how_to_continue(run_dir)}")
    if silent and rank not in reports and (first is None or first.blame > 2):
        is_complaint = first is not None and first.blame == 4
        if is_complaint or _signal_of(exit_code) is not None:
            return _killed(exit_code, [rank] if rank is not None else silent, rank is None, run_dir)
    if first is None:
        who = launcher if rank is None else f"rank {rank}"
        return RankFailed(f"{who} ended with code {exit_code}; its output is above", max(1, exit_code))
    return RankFailed(f"rank {first.rank}: {first.message}", first.exit_code)


def _killed(exit_code: int, suspects: list[int], is_guess: bool, run_dir: Path) -> PipelineError:
    """One of `suspects` was killed. A guess takes no SIGTERM for the cause: launchers end the others by it."""
    number = _signal_of(exit_code)
    if is_guess and number == signal.SIGTERM:
        number = None
    who = f"rank {' or '.join(map(str, suspects))}"
    name = f"was killed by {signal.Signals(number).name}" if number else "ended without a word, as one that is killed"
    hint = " (out of memory?)" if number in (None, signal.SIGKILL) else ""
    return Interrupted(f"{who} {name}{hint}; {how_to_continue(run_dir)}")


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
    return f"{saved}; run the same command again to continue"
