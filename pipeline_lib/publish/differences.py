"""Whether the tuned model's held-out loss is lower than another's by more than chance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline_lib.publish.losses import Estimate, Losses
from pipeline_lib.publish.results import DocumentScore, Score, Scores


@dataclass(frozen=True)
class Difference:
    """How much lower the tuned model's loss is than that of the model `than`, in nats per supervised token.

    `documents` is how many both were scored on and compared one by one; None if only the two means are known.
    """

    than: str
    gain: Estimate
    documents: int | None

    @property
    def is_noise(self) -> bool:
        """Whether the interval of 95 % holds 0."""
        return self.gain.low <= 0 <= self.gain.high

    @property
    def text(self) -> str:
        """What the interval says."""
        if self.is_noise:
            return "noise: the interval holds 0"
        return "lower by more than chance" if self.gain.value > 0 else "higher by more than chance"


def differences(scores: Scores, documents: Sequence[DocumentScore]) -> list[Difference]:
    """Against the base model, and against the tuned one behind shuffled prompts, where errors are known."""
    found = [_paired(documents) or _unpaired("base", scores.tuned, scores.base)]
    found.append(_unpaired("tuned, shuffled prompts", scores.tuned, scores.shuffled))
    return [one for one in found if one is not None]


def estimate_of(score: Score) -> Estimate | None:
    """The loss with its error, if both are known."""
    if score.loss is None or score.standard_error is None:
        return None
    return Estimate(score.loss, score.standard_error)


def _paired(documents: Sequence[DocumentScore]) -> Difference | None:
    """By document, which cancels how hard each one is."""
    known = [one for one in documents if one.tokens and one.base is not None and one.tuned is not None]
    if len(known) < 2 or len(known) < len(documents):
        return None
    tokens = np.array([one.tokens for one in known], np.int64)
    base, tuned = (Losses(np.array([getattr(one, name) for one in known]), tokens) for name in ("base", "tuned"))
    return Difference("base", tuned.gain_over(base), len(known))


def _unpaired(than: str, tuned: Score, other: Score) -> Difference | None:
    """By the two means as if they were of different documents, which makes the interval too wide if anything."""
    one, two = estimate_of(tuned), estimate_of(other)
    if one is None or two is None:
        return None
    error = math.hypot(one.standard_error, two.standard_error)
    return Difference(than, Estimate(two.value - one.value, error), None)
