"""The interface of a tracker: it takes numbers by step, and a report at the end."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it. `folder` is where the tracker keeps its files.

    `first_step` is the first step that the tracker has not received; it is over 1 if the run
    continues.
    """

    folder: Path
    identity: str
    experiment: str
    project: str
    settings: dict[str, Any]
    first_step: int


@dataclass(frozen=True)
class FinishedReport:
    """A finished experiment's page, the digest that names it, and its evaluation's numbers."""

    digest: str
    page: Path
    numbers: dict[str, float]


class Tracker(Protocol):
    """An open run of a tracker."""

    def __init__(self, run: TrackedRun, environ: Mapping[str, str]) -> None:
        """Open the run; if the tracker `joins`, continue the run of an earlier process."""

    @staticmethod
    def joins(environ: Mapping[str, str]) -> bool:
        """Return whether a process can continue an earlier run; if not, each writes it all."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log `values` at `step`."""

    def warn(self, step: int, kind: str, text: str) -> None:
        """Show the warning `text`, as of `step`, to people."""

    def flush(self) -> None:
        """Write out what was logged, if the tracker can, so that a kill does not lose it."""

    def report(self, step: int, report: FinishedReport) -> None:
        """Log the numbers of `report` as results of the last step, `step`; attach its page."""

    def finish(self) -> None:
        """Close the run."""
