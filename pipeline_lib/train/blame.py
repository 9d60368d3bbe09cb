"""Whose report is told when a training ends: one order for the launcher, and for who looks at what it left.

Knows only what a report says, so that looking needs no torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

from pipeline_lib.base.errors import Diverged, Interrupted, PeerLost, PipelineError

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
        """By the type of `error`."""
        match error:
            case PeerLost():
                return Cause.PEER_LOST
            case Interrupted():
                return Cause.STOPPED
            case Diverged():
                return Cause.DIVERGED
            case PipelineError():
                return Cause.ERROR
            case _:
                return Cause.MISTAKE


class Blame(IntEnum):
    """What a rank ended with, the most telling first. One that was killed left no report."""

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
        """The report in `fields`; None if there is none. One of before reports had a cause has that of its code."""
        rank, exit_code, message = (fields.get(name) for name in ("rank", "exit_code", "message"))
        if not isinstance(rank, int) or not isinstance(exit_code, int) or not isinstance(message, str):
            return None
        causes = {Interrupted.exit_code: Cause.PEER_LOST, MISTAKE_CODE: Cause.MISTAKE}
        cause = fields.get("cause")
        known = Cause(cause) if cause in list(Cause) else causes.get(exit_code, Cause.ERROR)
        return Report(rank, exit_code, message, known)

    @property
    def blame(self) -> Blame:
        """Where it stands among the reports."""
        return {Cause.PEER_LOST: Blame.COMPLAINT, Cause.MISTAKE: Blame.MISTAKE}.get(self.cause, Blame.OWN_ERROR)
