"""Whose report is told when a training ends: one order for the launcher, and for who looks at what it left.

Knows only what a report says, so that looking needs no torch.
"""

from dataclasses import dataclass
from enum import IntEnum

from pipeline_lib.base.errors import Interrupted

MISTAKE_CODE = 1  # of a rank that ended with an exception that nobody foresaw
LOST_A_PEER = "lost a peer"  # in the message of every rank that waited for another in vain


class Blame(IntEnum):
    """What a rank ended with, the most telling first. One that was killed left no report."""

    OWN_ERROR = 1  # or a stop that all agreed on
    KILLED = 2
    MISTAKE = 3
    COMPLAINT = 4  # about the absence of a peer


def blame_of(exit_code: int, message: str) -> Blame:
    """Where the report of a rank stands that ended with `exit_code` and `message`."""
    if exit_code == Interrupted.exit_code:
        return Blame.COMPLAINT if LOST_A_PEER in message else Blame.OWN_ERROR
    return Blame.MISTAKE if exit_code == MISTAKE_CODE else Blame.OWN_ERROR


@dataclass(frozen=True)
class Report:
    """Why a rank failed."""

    rank: int
    exit_code: int
    message: str
    has_diverged: bool = False  # as in errors.Diverged

    @property
    def blame(self) -> Blame:
        """Where it stands among the reports."""
        return blame_of(self.exit_code, self.message)
