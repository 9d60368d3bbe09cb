"""The report that a rank leaves when it fails, and whose report is told when a training ends.

There is one order for the launcher, and for who looks at what it left. It knows only what a report
says, so that looking needs no torch.
"""

import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any

from pipeline_lib.core.errors import (
    DiskFull,
    Diverged,
    Interrupted,
    LockLost,
    PeerLost,
    PipelineError,
)
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.core.run_folder import ERRORS

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
class RankReport:
    """Why a rank failed."""

    rank: int
    exit_code: int
    message: str
    cause: Cause

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "RankReport | None":
        """Return the report in `fields`; None if there is none.

        Without a cause, it gets that of its exit code.
        """
        rank, exit_code, message = (fields.get(name) for name in ("rank", "exit_code", "message"))
        if (
            not isinstance(rank, int)
            or not isinstance(exit_code, int)
            or not isinstance(message, str)
        ):
            return None
        causes = {Interrupted.exit_code: Cause.PEER_LOST, MISTAKE_CODE: Cause.MISTAKE}
        cause = fields.get("cause")
        known = Cause(cause) if cause in list(Cause) else causes.get(exit_code, Cause.ERROR)
        return RankReport(rank, exit_code, message, known)

    @property
    def blame(self) -> Blame:
        """How telling the report is among those of its run."""
        return {Cause.PEER_LOST: Blame.COMPLAINT, Cause.MISTAKE: Blame.MISTAKE}.get(
            self.cause, Blame.OWN_ERROR
        )


class Reporting:
    """Leaves the report of a rank whose block fails, for the launcher, which shows one for all."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        """Prepare for rank `rank` of the run in `run_dir`."""
        self._path = run_dir / ERRORS / f"rank-{rank}.json"
        self._rank = rank

    def __enter__(self) -> None:
        """Begin with nothing to report."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Write the report of a failure, or print it if that fails; the exception is raised on.

        Write nothing after the lock was lost: reports are then the next owner's.
        """
        if error is None or isinstance(error, LockLost):
            return
        if isinstance(error, PipelineError):
            report = RankReport(self._rank, error.exit_code, str(error), Cause.of(error))
        else:
            what = traceback.format_exception_only(kind, error)[-1].strip()
            report = RankReport(
                self._rank, MISTAKE_CODE, f"{what}; its traceback is above", Cause.of(error)
            )
        try:
            write_json(self._path, asdict(report))
        except (OSError, DiskFull):  # it often is what the failure is about
            print(f"error: rank {self._rank}: {report.message}", file=sys.stderr, flush=True)


def read_reports(run_dir: Path, ranks: int) -> dict[int, RankReport]:
    """Return the reports that ranks left in `run_dir`, by rank."""
    found = {}
    # listed: over NFS that asks for what came from other nodes
    for path in (run_dir / ERRORS).glob("rank-*.json"):
        report = RankReport.from_json(read_json(path))
        if report is not None and report.rank < ranks:
            found[report.rank] = report
    return found
