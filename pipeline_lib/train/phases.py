"""Where a step's time goes: forward, backward and update, as the device lives through them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

PHASES = ("forward", "backward", "update")


class PhaseClock:
    """Adds up seconds by phase. On a GPU they are between marks in its queue, so that nothing waits for a clock."""

    def __init__(self, device: torch.device) -> None:
        """Begin with nothing."""
        self._device, self._is_gpu = device, device.type == "cuda"
        self._marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Surrounds work that belongs to the phase `name`."""
        start = self._mark()
        yield
        self._marks.append((name, start, self._mark()))

    def take(self) -> dict[str, float]:
        """Seconds of each phase, by `forward_s` and so on, since they were last taken.

        What a GPU has not done yet comes with the next call.
        """
        totals = {f"{name}_s": 0.0 for name in PHASES}
        queued = []
        for name, start, end in self._marks:
            if self._is_gpu and not end.query():
                queued.append((name, start, end))
            else:
                totals[f"{name}_s"] += start.elapsed_time(end) / 1000 if self._is_gpu else end - start
        self._marks = queued
        return {name: round(seconds, 6) for name, seconds in totals.items()}

    def drop(self) -> None:
        """Forget all phases, once a GPU has done them."""
        if self._is_gpu:
            torch.cuda.synchronize(self._device)
        self._marks = []

    def _mark(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
