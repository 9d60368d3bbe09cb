"""Decides whether a step can be trusted, purely from its loss, gradient norm and earlier rows.

Loss and norm are reduced over the ranks, so all ranks decide alike. A refused step changes nothing:
not the weights, not the moments, and not the statistics that later steps are compared with.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pipeline_lib.config.train import Guards

MIN_ACCEPTED = 10  # steps before any loss counts as a spike
# nats per token: if losses hardly vary, the next one is not a spike for a small change
MIN_DEVIATION = 0.01
MAX_OVERFLOWS = 20  # in a row; fp16's loss scale has settled by then


class Verdict(StrEnum):
    """The decision about a step.

    The names are stable: metrics rows hold all but the first as `verdict`.
    """

    APPLY = "apply"
    SKIP = "skip"
    OVERFLOW = "overflow"  # a skip caused by fp16, which a lower loss scale repairs
    ROLL_BACK = "roll_back"
    ABORT = "abort"


UNDONE = "undone"  # the verdict of a row whose update was taken back later


@dataclass(frozen=True)
class Judgement:
    """A verdict and, unless it is APPLY, the reason in words."""

    verdict: Verdict
    reason: str = ""


class Window:
    """The summary of earlier steps that judging needs. Checkpoints store what `to_json` returns."""

    def __init__(self, guards: Guards) -> None:
        """Begin before the first step."""
        self.guards = guards
        # losses of the last accepted steps
        self.accepted: deque[float] = deque(maxlen=guards.window_steps)
        self.sizes: deque[int] = deque(maxlen=guards.window_steps)  # their supervised tokens
        # counted as skipped, since the last rollback
        self.skipped: deque[int] = deque(maxlen=guards.max_skips + 1)
        self.refused_in_a_row = 0
        self.has_rolled_back = False

    @staticmethod
    def from_json(guards: Guards, known: Mapping[str, Any]) -> "Window":
        """Return the window whose `to_json` returned `known`."""
        window = Window(guards)
        for name in ("accepted", "sizes", "skipped"):
            getattr(window, name).extend(known[name])
        window.refused_in_a_row = known["refused_in_a_row"]
        window.has_rolled_back = known["has_rolled_back"]
        return window

    def to_json(self) -> dict[str, Any]:
        """Return the whole window; its size does not grow with the steps."""
        return {
            "accepted": list(self.accepted),
            "sizes": list(self.sizes),
            "skipped": list(self.skipped),
            "refused_in_a_row": self.refused_in_a_row,
            "has_rolled_back": self.has_rolled_back,
        }

    def add(self, row: Mapping[str, Any]) -> None:
        """Add the row of the next step."""
        verdict = row.get("verdict", Verdict.APPLY)
        if verdict == Verdict.APPLY:
            self.accepted.append(row["loss"])
            self.sizes.append(row["supervised_tokens"])
        if verdict == Verdict.SKIP:
            self.skipped.append(row["step"])
        if verdict == Verdict.ROLL_BACK:
            self.skipped.clear()
            self.has_rolled_back = True
        self.refused_in_a_row = (
            self.refused_in_a_row + 1 if verdict in (Verdict.SKIP, Verdict.OVERFLOW) else 0
        )

    def recently_skipped(self, step: int) -> list[int]:
        """Return the steps that count as skipped among the `window_steps` up to `step`."""
        return [skipped for skipped in self.skipped if skipped > step - self.guards.window_steps]

    def step_before(self, step: int) -> int:
        """Return the step to which the guards go back if a step after `step` is one too many."""
        return self.guards.step_before(min(self.recently_skipped(step), default=step + 1))


def judge(
    window: Window, is_fp16: bool, step: int, loss: float, grad_norm: float, supervised_tokens: int
) -> Judgement:
    """Decide what to do with `step`.

    `loss` is the mean over `supervised_tokens`, in nats per token.
    """
    if (
        is_fp16
        and math.isfinite(loss)
        and not math.isfinite(grad_norm)
        and window.refused_in_a_row < MAX_OVERFLOWS
    ):
        return Judgement(
            Verdict.OVERFLOW, "a gradient is too large for fp16; the loss scale is lowered"
        )
    allowed = spike_threshold(window, supervised_tokens)
    if not math.isfinite(loss):
        reason = "the loss is not finite"
    elif not math.isfinite(grad_norm):
        reason = "the gradients are not finite"
    elif loss > allowed:
        reason = f"loss {loss:.4f} is a spike: the steps before let up to {allowed:.4f} be expected"
    else:
        return Judgement(Verdict.APPLY)
    if len(window.recently_skipped(step)) < window.guards.max_skips:
        return Judgement(Verdict.SKIP, reason)
    return Judgement(Verdict.ABORT if window.has_rolled_back else Verdict.ROLL_BACK, reason)


def spike_threshold(window: Window, supervised_tokens: int) -> float:
    """Return the loss above which a step is a spike.

    It is the median plus a multiple of the median absolute deviation. Both are over the last
    accepted losses; infinite if there are too few, or if spikes are not guarded against. The mean
    over fewer tokens deviates more, as in the last step of an epoch: by the square root of the
    ratio.
    """
    deviations = window.guards.spike_deviations
    if deviations is None or len(window.accepted) < MIN_ACCEPTED:
        return math.inf
    median = statistics.median(window.accepted)
    deviation = statistics.median(abs(loss - median) for loss in window.accepted)
    widening = math.sqrt(max(1.0, statistics.median(window.sizes) / max(1, supervised_tokens)))
    return median + deviations * max(deviation, MIN_DEVIATION) * widening
