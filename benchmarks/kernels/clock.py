"""Times an operation as in training: random data in no cache, and a GPU clock under load."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pipeline_lib.core.units import MIB
from pipeline_lib.doctor.exchange import timed

Call = Callable[[], object]
ROTATED_BYTES = 128 * MIB  # that calls in turn go through; an H200 has 50 MB of L2
MOST_SETS = 4
# calls shorter than this are lined up behind a sleeping GPU: the host must not be what is measured
SHORT_S = 2e-3
SLEEP_CYCLES = 20_000_000  # about 10 ms
LINED_UP = 20
ROUND_S = 0.02


def sets_for(moved_bytes: float) -> int:
    """How many sets of inputs to go through in turn, each of which moves so many bytes."""
    return min(MOST_SETS, max(1, math.ceil(ROTATED_BYTES / max(1.0, moved_bytes))))


@dataclass(frozen=True)
class Clock:
    """Seconds of a call, the median of what `patience_s` allows; none begins after `until_s`."""

    device: torch.device
    patience_s: float
    until_s: float  # of the monotonic clock

    def seconds(self, calls: Sequence[Call], share: float = 1.0) -> float:
        """Of one of `calls`, alike and taken in turn; measured for `share` of the patience."""
        for call in [*calls, calls[0]]:
            call()
        usual_s = timed(calls[0], 2, self.device) / 2
        taken: list[float] = []
        end_s = time.monotonic() + share * self.patience_s
        while len(taken) < 3 or time.monotonic() < end_s:
            if self.device.type == "cuda":
                taken += _round_on_gpu(calls, len(taken), usual_s)
            else:
                taken.append(timed(calls[len(taken) % len(calls)], 1, self.device))
        return statistics.median(taken)


def _round_on_gpu(calls: Sequence[Call], first: int, usual_s: float) -> list[float]:
    """Seconds of each of a few calls, between marks in the GPU's queue."""
    is_short = usual_s < SHORT_S
    if is_short:
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    marks: list[tuple[Any, Any]] = []
    for number in range(LINED_UP if is_short else max(1, int(ROUND_S / usual_s))):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        calls[(first + number) % len(calls)]()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in marks]
