"""One line every few seconds about long work: how much is done, how fast, and when it will end."""

import time
from collections.abc import Callable

EVERY_S = 5.0


class Progress:
    """Tells `say` about work on `unit`s. Cheap to call for every item."""

    def __init__(self, say: Callable[[str], None], doing: str, unit: str) -> None:
        """Begin now; `doing` names the work."""
        self._say = say
        self._doing = doing
        self._unit = unit
        self._start_s = self._told_s = time.monotonic()

    def update(self, done: int, fraction: float) -> None:
        """Report `done` units, which are `fraction` of all, if it is time to."""
        now_s = time.monotonic()
        if now_s - self._told_s < EVERY_S:
            return
        self._told_s = now_s
        elapsed_s = now_s - self._start_s
        left_s = elapsed_s / fraction - elapsed_s if fraction else float("inf")
        rate = f"{done / elapsed_s:,.0f} {self._unit}/s"
        self._say(f"{self._doing}: {done:,} {self._unit} ({fraction:.0%}), {rate}, {left_s:.0f} s left")
