"""Held-out losses with standard errors, and tests of whether two models differ beyond chance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.core.language import _
from pipeline_lib.records.evaluation import MIN_DOCUMENTS, DocumentScore, Score, Scores

# Losses with standard errors. Held-out documents are treated as a random sample. A loss is a ratio
# of sums over documents, with the standard error of a ratio estimate (Cochran, Sampling Techniques,
# section 6.4, without the finite population correction). Intervals use Student's t distribution.

CONFIDENCE = 0.95


def too_few() -> str:
    """Return why nothing is said of a difference of few documents."""
    text = _("fewer than {documents} held-out documents are too few to tell")
    return text.format(documents=MIN_DOCUMENTS)


@dataclass(frozen=True)
class SampleEstimate:
    """A value, its standard error in its unit, and the number of documents it is based on."""

    value: float
    standard_error: float
    documents: int

    @property
    def has_enough(self) -> bool:
        """True if there are enough documents for an interval."""
        return self.documents >= MIN_DOCUMENTS

    @property
    def low(self) -> float:
        """The lower end of the 95 % interval; -infinity if there are too few documents."""
        return self.interval()[0]

    @property
    def high(self) -> float:
        """The upper end of the 95 % interval; infinity if there are too few documents."""
        return self.interval()[1]

    def interval(self, pairs: int = 1) -> tuple[float, float]:
        """Return the ends of the 95 % interval; with `pairs`, of one of several joint ones."""
        reach = (
            critical(pairs, self.documents - 1) * self.standard_error
            if self.has_enough
            else math.inf
        )
        return self.value - reach, self.value + reach

    def gain_over(self, other: "SampleEstimate") -> "SampleEstimate":
        """Return how much lower this value is than `other`, which is based on different documents.

        The standard errors of both are combined.
        """
        error = math.hypot(self.standard_error, other.standard_error)
        return SampleEstimate(other.value - self.value, error, min(self.documents, other.documents))


@dataclass(frozen=True)
class DocumentLosses:
    """Each document's -log p over its supervised tokens, in nats, and their number, int64[n].

    The sums of -log p are float64[n].
    """

    nats: NDArray[np.float64]
    tokens: NDArray[np.int64]

    @staticmethod
    def of(rows: Sequence[DocumentScore], model: Literal["base", "tuned"]) -> "DocumentLosses":
        """Return the losses of one of the two models from rows of scores.jsonl."""
        nats = [row.base if model == "base" else row.tuned for row in rows]
        return DocumentLosses(
            np.array(nats, np.float64), np.array([row.tokens for row in rows], np.int64)
        )

    @property
    def total_tokens(self) -> int:
        """The number of supervised tokens in all documents."""
        return int(self.tokens.sum())

    @property
    def mean(self) -> float:
        """The mean loss in nats per supervised token."""
        return float(self.nats.sum() / self.tokens.sum())

    @property
    def estimate(self) -> SampleEstimate:
        """The mean loss with its standard error over documents."""
        return _ratio(self.nats, self.tokens)

    def of_documents(self, numbers: Sequence[int]) -> "DocumentLosses":
        """Return the losses of the documents with these numbers."""
        return DocumentLosses(self.nats[numbers], self.tokens[numbers])

    def gain_over(self, other: "DocumentLosses") -> SampleEstimate:
        """Return how much lower this mean is than `other`'s on the same, ordered documents."""
        return _ratio(other.nats - self.nats, self.tokens)

    def is_below(self, other: "DocumentLosses") -> bool:
        """Return True if this mean is below `other`'s on the same documents beyond chance."""
        return self.gain_over(other).low > 0


def critical(pairs: int, freedom: int) -> float:
    """Return the half width, in standard errors, of `pairs` intervals that hold jointly in 95 %.

    This is Student's t quantile with Bonferroni's correction, by its expansion about the normal
    quantile (Abramowitz and Stegun 26.7.5). Four digits are correct from 19 degrees of freedom on,
    for up to 190 pairs.
    """
    z = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / (2 * pairs))
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + math.fsum(term / freedom**power for power, term in enumerate(terms, start=1))


def _ratio(nats: NDArray[np.float64], tokens: NDArray[np.int64]) -> SampleEstimate:
    """Return the ratio of the sums; its error is infinite with tokens in under two documents."""
    total = float(tokens.sum())
    count = int(np.count_nonzero(tokens))
    value = float(nats.sum()) / total
    if count < 2:
        return SampleEstimate(value, math.inf, count)
    squares = float(((nats - value * tokens) ** 2).sum())
    return SampleEstimate(value, math.sqrt(squares * count / (count - 1)) / total, count)


# Comparison of the tuned model's held-out loss with other losses.


@dataclass(frozen=True)
class LossGain:
    """The tuned model's gain over the model `than`, in nats per supervised token.

    `is_paired` is True if both models were compared document by document, and False if by their
    means.
    """

    than: str
    gain: SampleEstimate
    is_paired: bool

    @property
    def is_noise(self) -> bool:
        """True if the 95 % interval contains 0, or if there are too few documents."""
        return self.gain.low <= 0 <= self.gain.high

    @property
    def text(self) -> str:
        """The conclusion from the interval, in words."""
        if not self.gain.has_enough:
            return _("not proven: {reason}").format(reason=too_few())
        if self.is_noise:
            return _("noise: the interval holds 0")
        if self.gain.value > 0:
            return _("lower by more than chance")
        return _("higher by more than chance")


def differences(scores: Scores | None, documents: Sequence[DocumentScore]) -> list[LossGain]:
    """Return the gains over the base model and over shuffled prompts, if errors are known.

    The base model is compared document by document if possible, which cancels differences in
    difficulty. Other means are compared as if from different documents; if anything, this makes the
    interval too wide.
    """
    if scores is None:
        return []
    tuned = _estimate(scores.tuned)
    base = _estimate(scores.base)
    shuffled = _estimate(scores.shuffled)
    gains = []
    if sum(row.tokens > 0 for row in documents) >= 2:
        gain = DocumentLosses.of(documents, "tuned").gain_over(DocumentLosses.of(documents, "base"))
        gains.append(LossGain(_("base"), gain, is_paired=True))
    elif tuned and base:
        gains.append(LossGain(_("base"), tuned.gain_over(base), is_paired=False))
    if tuned and shuffled:
        gain = tuned.gain_over(shuffled)
        gains.append(LossGain(_("tuned, shuffled prompts"), gain, is_paired=False))
    return gains


def estimate_of(score: Score) -> SampleEstimate | None:
    """Return the loss with its standard error; None if that is unknown or documents are few."""
    estimate = _estimate(score)
    return estimate if estimate and estimate.has_enough else None


def _estimate(score: Score | None) -> SampleEstimate | None:
    if score is None or score.standard_error is None:
        return None
    return SampleEstimate(score.loss, score.standard_error, score.documents)
