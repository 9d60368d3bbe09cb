"""Standard errors against many samples drawn for real."""

import math

import numpy as np
import pytest

from pipeline_lib.records.evaluation import MIN_DOCUMENTS
from pipeline_lib.report.statistics import DocumentLosses, SampleEstimate, critical


def drawn(seed: int, documents: int = 100) -> DocumentLosses:
    """Documents of very different lengths, whose difficulty differs too."""
    random = np.random.default_rng(seed)
    tokens = random.integers(5, 200, documents)
    return DocumentLosses(tokens * random.normal(2.0, 0.5, documents), tokens)


def test_the_standard_error_is_how_much_samples_differ() -> None:
    estimates = [drawn(seed).estimate for seed in range(2000)]
    spread = float(np.std([estimate.value for estimate in estimates]))
    assert np.mean([estimate.standard_error for estimate in estimates]) == pytest.approx(
        spread, rel=0.05
    )
    covered = np.mean([estimate.low < 2.0 < estimate.high for estimate in estimates])
    assert covered == pytest.approx(0.95, abs=0.015)


def test_a_paired_gain_is_more_certain_than_either_loss() -> None:
    harder = drawn(0)
    easier = DocumentLosses(harder.nats - 0.01 * harder.tokens, harder.tokens)
    gain = easier.gain_over(harder)
    assert gain.value == pytest.approx(0.01)
    assert gain.standard_error < 1e-9 < harder.estimate.standard_error
    assert easier.is_below(harder)
    assert not harder.is_below(easier)


@pytest.mark.parametrize(
    ("pairs", "freedom", "quantile"), [(1, 19, 2.09302), (1, 286, 1.96829), (190, 19, 4.46884)]
)
def test_quantiles_are_those_of_students_tables(pairs: int, freedom: int, quantile: float) -> None:
    assert critical(pairs, freedom) == pytest.approx(quantile, rel=1e-4)


def test_of_too_few_documents_no_difference_is_more_than_chance() -> None:
    """Two that agree to the last bit have no error at all."""
    assert DocumentLosses(np.array([10.0]), np.array([10])).estimate == SampleEstimate(
        1.0, math.inf, 1
    )
    for count in (1, 2, MIN_DOCUMENTS - 1, MIN_DOCUMENTS):
        tokens = np.full(count, 10)
        lower, higher = (DocumentLosses(nats * tokens, tokens) for nats in (1.0, 3.0))
        assert lower.is_below(higher) == (count == MIN_DOCUMENTS)
        assert lower.estimate.gain_over(higher.estimate).has_enough == (count == MIN_DOCUMENTS)


def test_without_its_tokens_a_document_does_not_count() -> None:
    tokens = np.array([10] * (MIN_DOCUMENTS - 1) + [0])
    assert DocumentLosses(1.0 * tokens, tokens).estimate.documents == MIN_DOCUMENTS - 1
