"""Whether a step can be trusted: a pure function of its loss, its gradient norm and the rows of the steps before.

Loss and norm are reduced over the ranks, so all ranks decide alike. A step that is refused changes nothing: not the
weights, not the moments, and not what later steps are measured against.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pipeline_lib.config.schema import Guards

MIN_ACCEPTED = 10  # steps before any loss counts as a spike
MIN_DEVIATION = 0.01  # nats per token: losses that hardly vary do not make a spike of the next one
MAX_OVERFLOWS = 20  # in a row; fp16's loss scale has found its place by then


class Verdict(StrEnum):
    """What is done with a step. The names are stable: metrics rows hold all but the first as `verdict`."""

    APPLY = "apply"
    SKIP = "skip"
    OVERFLOW = "overflow"  # a skip of fp16's making, which its loss scale mends
    ROLL_BACK = "roll_back"
    ABORT = "abort"


UNDONE = "undone"  # the verdict of a row whose update was taken back later


@dataclass(frozen=True)
class Judgement:
    """A verdict and, if it is not APPLY, the reason in words."""

    verdict: Verdict
    reason: str = ""


@dataclass
class Window:
    """What judging needs of the steps before. Checkpoints hold it as `to_json` gives it."""

    guards: Guards
    accepted: deque[float] = field(init=False)  # losses of the last accepted steps
    sizes: deque[int] = field(init=False)  # their supervised tokens
    skipped: deque[int] = field(init=False)  # steps that count as skipped, since the last going back
    refused_in_a_row: int = field(default=0, init=False)
    has_rolled_back: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Begin with no steps."""
        self.accepted = deque(maxlen=self.guards.window_steps)
        self.sizes = deque(maxlen=self.guards.window_steps)
        self.skipped = deque(maxlen=self.guards.max_skips + 1)

    @staticmethod
    def of(guards: Guards, rows: Iterable[Mapping[str, Any]]) -> "Window":
        """The window after the steps that `rows` tell of."""
        window = Window(guards)
        for row in rows:
            window.add(row)
        return window

    @staticmethod
    def from_json(guards: Guards, known: Mapping[str, Any]) -> "Window":
        """The window that gave `known`."""
        window = Window(guards)
        window.accepted.extend(known["accepted"])
        window.sizes.extend(known["sizes"])
        window.skipped.extend(known["skipped"])
        window.refused_in_a_row = known["refused_in_a_row"]
        window.has_rolled_back = known["has_rolled_back"]
        return window

    def to_json(self) -> dict[str, Any]:
        """All of it, of a size that does not grow with the steps."""
        return {
            "accepted": list(self.accepted),
            "sizes": list(self.sizes),
            "skipped": list(self.skipped),
            "refused_in_a_row": self.refused_in_a_row,
            "has_rolled_back": self.has_rolled_back,
        }

    def undo(self, before: "Window") -> None:
        """Measure by the steps that were accepted by the time of `before`; what was refused since stays refused."""
        self.accepted, self.sizes = before.accepted, before.sizes

    def add(self, row: Mapping[str, Any]) -> None:
        """Take in the row of the next step."""
        verdict = row.get("verdict", Verdict.APPLY)
        if verdict == Verdict.APPLY:
            self.accepted.append(row["loss"])
            self.sizes.append(row["supervised_tokens"])
        if verdict == Verdict.SKIP:
            self.skipped.append(row["step"])
        if verdict == Verdict.ROLL_BACK:
            self.skipped.clear()
            self.has_rolled_back = True
        self.refused_in_a_row = self.refused_in_a_row + 1 if verdict in (Verdict.SKIP, Verdict.OVERFLOW) else 0

    def recently_skipped(self, step: int) -> list[int]:
        """The steps that count as skipped among the `window_steps` up to `step`."""
        return [skipped for skipped in self.skipped if skipped > step - self.guards.window_steps]


def judge(window: Window, is_fp16: bool, step: int, loss: float, grad_norm: float, supervised_tokens: int) -> Judgement:
    """What to do with `step`, whose `loss` is in nats per token, of so many."""
    if is_fp16 and math.isfinite(loss) and not math.isfinite(grad_norm) and window.refused_in_a_row < MAX_OVERFLOWS:
        return Judgement(Verdict.OVERFLOW, "a gradient is too large for fp16; the loss scale is lowered")
    reason = _distrust(window, loss, grad_norm, supervised_tokens)
    if not reason:
        return Judgement(Verdict.APPLY)
    if len(window.recently_skipped(step)) < window.guards.max_skips:
        return Judgement(Verdict.SKIP, reason)
    return Judgement(Verdict.ABORT if window.has_rolled_back else Verdict.ROLL_BACK, reason)


def _distrust(window: Window, loss: float, grad_norm: float, supervised_tokens: int) -> str:
    """Why the step cannot be trusted; empty if it can."""
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        return "the loss is not finite" if not math.isfinite(loss) else "the gradients are not finite"
    allowed = spike_threshold(window, supervised_tokens)
    return (
        "" if loss <= allowed else f"loss {loss:.4f} is a spike: the steps before let up to {allowed:.4f} be expected"
    )


def spike_threshold(window: Window, supervised_tokens: int) -> float:
    """Losses above it are spikes: the median and so many median absolute deviations, of the last accepted losses.

    The mean of fewer tokens deviates more, as the last step of an epoch shows: by the square root of the share.
    """
    deviations = window.guards.spike_deviations
    if deviations is None or len(window.accepted) < MIN_ACCEPTED:
        return math.inf
    median = statistics.median(window.accepted)
    deviation = statistics.median(abs(loss - median) for loss in window.accepted)
    widening = math.sqrt(max(1.0, statistics.median(window.sizes) / max(1, supervised_tokens)))
    return median + deviations * max(deviation, MIN_DEVIATION) * widening
