"""Held-out losses and whether two of them differ by more than chance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.report.results import DocumentScore, Score, Scores

# How well a model predicts held-out answers, and when two models differ by more than chance.
#
# The held-out documents are a sample of those that one might have held out. Losses are ratios of sums over documents,
# and so are their standard errors: Cochran, Sampling Techniques, section 6.4, without the correction for a finite
# population. Intervals are Student's.

MIN_DOCUMENTS = 20  # of fewer the longest decide alone, and intervals come out too short
TOO_FEW = f"fewer than {MIN_DOCUMENTS} held-out documents are too few to tell"
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure and its standard error, in the same unit, and how many documents it rests on."""

    value: float
    standard_error: float
    documents: int

    @property
    def has_enough(self) -> bool:
        """Whether the documents are enough for an interval."""
        return self.documents >= MIN_DOCUMENTS

    @property
    def low(self) -> float:
        """The lower end of the interval of 95 %: -infinity where the documents are too few."""
        return self.interval()[0]

    @property
    def high(self) -> float:
        """The upper end."""
        return self.interval()[1]

    def interval(self, pairs: int = 1) -> tuple[float, float]:
        """The ends of the interval of 95 %, or of one of `pairs` that hold together."""
        reach = critical(pairs, self.documents - 1) * self.standard_error if self.has_enough else math.inf
        return self.value - reach, self.value + reach

    def gain_over(self, other: "Estimate") -> "Estimate":
        """How much lower this is than `other` of other documents: the noise of both samples counts."""
        error = math.hypot(self.standard_error, other.standard_error)
        return Estimate(other.value - self.value, error, min(self.documents, other.documents))


@dataclass(frozen=True)
class Losses:
    """-log p summed over the supervised tokens of each document, float64[n] in nats, and how many, int64[n]."""

    nats: NDArray[np.float64]
    tokens: NDArray[np.int64]

    @staticmethod
    def of(rows: Sequence[DocumentScore], model: Literal["base", "tuned"]) -> "Losses":
        """Those of one of the two models."""
        nats = [row.base if model == "base" else row.tuned for row in rows]
        return Losses(np.array(nats, np.float64), np.array([row.tokens for row in rows], np.int64))

    @property
    def total_tokens(self) -> int:
        """Supervised tokens of all documents."""
        return int(self.tokens.sum())

    @property
    def mean(self) -> float:
        """Nats per supervised token."""
        return float(self.nats.sum() / self.tokens.sum())

    @property
    def estimate(self) -> Estimate:
        """The mean, and how far another sample of documents might have moved it."""
        return _ratio(self.nats, self.tokens)

    def gain_over(self, other: "Losses") -> Estimate:
        """How much lower this mean is than that of `other` on the same documents, in the same order."""
        return _ratio(other.nats - self.nats, self.tokens)

    def is_below(self, other: "Losses") -> bool:
        """Whether this mean is lower than that of `other` on the same documents by more than chance."""
        return self.gain_over(other).low > 0


def critical(pairs: int, freedom: int) -> float:
    """Standard errors on each side of one of `pairs` intervals that hold together in 95 of 100 cases.

    Student's quantile by its expansion about the normal one (Abramowitz and Stegun 26.7.5): four digits are right from
    19 degrees of freedom on, for up to 190 pairs.
    """
    z = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / (2 * pairs))
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))


def _ratio(nats: NDArray[np.float64], tokens: NDArray[np.int64]) -> Estimate:
    """The ratio of the sums. One document says nothing about others: infinitely uncertain."""
    total, count = float(tokens.sum()), int(np.count_nonzero(tokens))
    value = float(nats.sum()) / total
    if count < 2:
        return Estimate(value, math.inf, count)
    squares = float(((nats - value * tokens) ** 2).sum())
    return Estimate(value, math.sqrt(squares * count / (count - 1)) / total, count)


# Whether the tuned model's held-out loss is lower than another's by more than chance.


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
