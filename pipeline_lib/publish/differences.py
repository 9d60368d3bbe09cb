"""Whether the tuned model's held-out loss is lower than another's by more than chance."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline_lib.publish.losses import TOO_FEW, Estimate, Losses
from pipeline_lib.publish.results import DocumentScore, Score, Scores


@dataclass(frozen=True)
class Difference:
    """How much lower the tuned model's loss is than that of the model `than`, in nats per supervised token.

    `is_paired` where the documents that both were scored on were compared one by one; else by the two means.
    """

    than: str
    gain: Estimate
    is_paired: bool

    @property
    def is_noise(self) -> bool:
        """Whether the interval of 95 % holds 0, or there is none."""
        return self.gain.low <= 0 <= self.gain.high

    @property
    def text(self) -> str:
        """What the interval says."""
        if not self.gain.has_enough:
            return f"not proven: {TOO_FEW}"
        if self.is_noise:
            return "noise: the interval holds 0"
        return "lower by more than chance" if self.gain.value > 0 else "higher by more than chance"


def differences(scores: Scores, documents: Sequence[DocumentScore]) -> list[Difference]:
    """Against the base model, and against the tuned one behind shuffled prompts, where errors are known."""
    found = [_paired(documents) or _unpaired("base", scores.tuned, scores.base)]
    found.append(_unpaired("tuned, shuffled prompts", scores.tuned, scores.shuffled))
    return [one for one in found if one is not None]


def estimate_of(score: Score) -> Estimate | None:
    """The loss with its error, if both are known, and the documents are enough for an interval."""
    estimate = _estimate(score)
    return estimate if estimate and estimate.has_enough else None


def _estimate(score: Score) -> Estimate | None:
    if score.loss is None or score.standard_error is None or score.documents is None:
        return None
    return Estimate(score.loss, score.standard_error, score.documents)


def _paired(documents: Sequence[DocumentScore]) -> Difference | None:
    """By document, which cancels how hard each one is."""
    if sum(one.tokens > 0 for one in documents) < 2:
        return None
    gain = Losses.of(documents, "tuned").gain_over(Losses.of(documents, "base"))
    return Difference("base", gain, is_paired=True)


def _unpaired(than: str, tuned: Score, other: Score) -> Difference | None:
    """By the two means as if they were of different documents, which makes the interval too wide if anything."""
    one, two = _estimate(tuned), _estimate(other)
    return Difference(than, one.gain_over(two), is_paired=False) if one and two else None
