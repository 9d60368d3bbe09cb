"""How well a model predicts held-out answers, and when two models differ by more than chance.

The held-out documents are a sample of those that one might have held out. Losses are ratios of sums over documents,
and so are their standard errors: Cochran, Sampling Techniques, section 6.4, without the correction for a finite
population. Intervals are Student's.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.publish.results import DocumentScore

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
