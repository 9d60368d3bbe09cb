"""How well a model predicts held-out answers, and when two models differ by more than chance.

The held-out documents are a sample of those that one might have held out. Losses are ratios of sums over documents,
and so are their standard errors: Cochran, Sampling Techniques, section 6.4, without the correction for a finite
population.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENT = 1.96  # standard errors on each side of 95 of 100 intervals


@dataclass(frozen=True)
class Estimate:
    """A figure and its standard error, in the same unit."""

    value: float
    standard_error: float

    @property
    def low(self) -> float:
        """The lower end of the interval of 95 %."""
        return self.value - CONFIDENT * self.standard_error

    @property
    def high(self) -> float:
        """The upper end."""
        return self.value + CONFIDENT * self.standard_error


@dataclass(frozen=True)
class Losses:
    """-log p summed over the supervised tokens of each document, float64[n] in nats, and how many, int64[n]."""

    nats: NDArray[np.float64]
    tokens: NDArray[np.int64]

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


def _ratio(nats: NDArray[np.float64], tokens: NDArray[np.int64]) -> Estimate:
    """The ratio of the sums. One document says nothing about others: infinitely uncertain."""
    total, count = float(tokens.sum()), len(tokens)
    value = float(nats.sum()) / total
    if count < 2:
        return Estimate(value, math.inf)
    squares = float(((nats - value * tokens) ** 2).sum())
    return Estimate(value, math.sqrt(squares * count / (count - 1)) / total)
