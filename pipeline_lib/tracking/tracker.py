"""What a tracker is to us: a place that takes numbers by step, and at the end a report."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Run:
    """What a tracker is told about a run. `folder` is where it keeps its files.

    `first_step` is the first that it has not seen: over 1 if the run continues.
    """

    folder: Path
    identity: str
    experiment: str
    project: str
    settings: dict[str, Any]
    first_step: int


@dataclass(frozen=True)
class Report:
    """The page of a finished experiment, the digest that names it, and what its evaluation came to."""

    digest: str
    page: Path
    numbers: dict[str, float]


class Tracker(Protocol):
    """An open run of a tracker."""

    def __init__(self, run: Run, environ: Mapping[str, str]) -> None:
        """Open the run, or where it `joins`, the one that an earlier process has begun."""

    @staticmethod
    def joins(environ: Mapping[str, str]) -> bool:
        """Whether a process can go on with the run of an earlier one; if not, each writes the whole run anew."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Show `values` at `step`."""

    def flush(self) -> None:
        """Put what was logged where a kill cannot take it, if the tracker can."""

    def report(self, step: int, report: Report) -> None:
        """Show the numbers of `report` as those of the end, which was `step`, and keep its page with the run."""

    def finish(self) -> None:
        """Close the run."""
