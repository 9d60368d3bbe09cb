"""What a tracker is to us: a place that takes numbers by step."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    """An open run of a tracker."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Show `values` at `step`."""

    def flush(self) -> None:
        """Put what was logged where a kill cannot take it, if the tracker can."""

    def finish(self) -> None:
        """Close the run."""


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
