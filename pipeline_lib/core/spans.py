"""Where a stage's time goes: what it does in turn, how long, and how many bytes that moves.

Bytes that are read count, and bytes that are written.
"""

import time
from typing import Any

COUNT = "spans"  # their key in a manifest's counts


class Spans:
    """The spans of a stage. One lasts until the next begins; one that begins again is continued."""

    def __init__(self) -> None:
        """Begin with none."""
        self._found: dict[str, dict[str, Any]] = {}
        self._now: dict[str, Any] | None = None
        self._since_s = 0.0

    def begin(self, name: str, size_bytes: int = 0) -> None:
        """Begin the span `name`, which reads or writes `size_bytes`, or 0 if they set no pace."""
        self._end()
        self._now = self._found.setdefault(name, {"name": name, "duration_s": 0.0, "bytes": 0})
        self._now["bytes"] += size_bytes

    def counts(self) -> dict[str, Any]:
        """End the last span, and return all for a manifest's counts; empty if none began."""
        self._end()
        rounded = [
            {**span, "duration_s": round(span["duration_s"], 3)} for span in self._found.values()
        ]
        return {COUNT: rounded} if rounded else {}

    def _end(self) -> None:
        now_s = time.monotonic()
        if self._now is not None:
            self._now["duration_s"] += now_s - self._since_s
        self._now, self._since_s = None, now_s
