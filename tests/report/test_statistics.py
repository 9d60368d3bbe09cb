"""A difference is called one only where its interval says so."""

import math
from typing import Any

import numpy as np
import pytest

from pipeline_lib.records.evaluation import DocumentScore, Scores
from pipeline_lib.report.statistics import DocumentLosses, SampleEstimate, differences, estimate_of
from tests.complete import record
from tests.report.fakes import evaluation, scores


def rows(found: list[dict[str, Any]]) -> list[DocumentScore]:
    return [DocumentScore(**row) for row in found]


def test_documents_are_compared_one_by_one_and_means_by_their_errors() -> None:
    base, shuffled = differences(record(Scores, evaluation()["eval"]), rows(scores()))
    assert (base.than, base.is_paired, base.gain.documents) == ("base", True, 287)
    assert base.gain.value == pytest.approx(5.2, abs=0.1)
    assert base.text == "lower by more than chance"
    assert (shuffled.than, shuffled.is_paired) == ("tuned, shuffled prompts", False)
    assert shuffled.gain.value == pytest.approx(3.318 - 2.404)
    assert shuffled.gain.standard_error == pytest.approx(np.hypot(0.08, 0.1))


@pytest.mark.parametrize(
    ("gain", "text"),
    [
        (0.2, "lower by more than chance"),
        (-0.2, "higher by more than chance"),
        (0.0, "noise: the interval holds 0"),
    ],
)
def test_noise_is_called_noise(gain: float, text: str) -> None:
    (found,) = differences(record(Scores, evaluation()["eval"]), rows(scores(gain)))[:1]
    assert found.text == text


def test_without_the_documents_the_means_tell_and_without_errors_nothing() -> None:
    known = record(Scores, evaluation()["eval"])
    assert [one.is_paired for one in differences(known, [])] == [False, False]
    without_errors = evaluation()["eval"]
    for name in ("base", "tuned", "shuffled"):
        without_errors[name]["standard_error"] = None
    unsure = record(Scores, without_errors)
    assert differences(unsure, []) == []
    assert differences(unsure, rows(scores(documents=1))) == []


def test_the_error_of_a_mean_is_that_of_a_sample() -> None:
    """Of documents of one length, the ratio of the sums is the mean of their losses."""
    nats = np.random.default_rng(0).normal(30.0, 5.0, 20)
    estimate = DocumentLosses(nats, np.full(20, 10)).estimate
    assert estimate.value == pytest.approx(nats.mean() / 10)
    assert estimate.standard_error == pytest.approx(nats.std(ddof=1) / 10 / math.sqrt(20))
    assert estimate.high - estimate.value == pytest.approx(
        2.09302 * estimate.standard_error, rel=1e-4
    )


def test_a_difference_of_means_is_as_sure_as_the_smaller_of_them() -> None:
    few, many = SampleEstimate(2.0, 0.3, 25), SampleEstimate(2.5, 0.4, 1000)
    for gain in (few.gain_over(many), many.gain_over(few)):
        assert gain.standard_error == pytest.approx(0.5)
        assert gain.documents == 25


@pytest.mark.parametrize("documents", [2, 19])
def test_few_documents_prove_nothing_however_large_the_difference(documents: int) -> None:
    few = evaluation()["eval"]
    for name in ("base", "tuned", "shuffled"):
        few[name]["documents"] = documents
    known = record(Scores, few)
    found = [*differences(known, rows(scores(5.2, documents))), *differences(known, [])]
    assert {one.text for one in found} == {
        "not proven: fewer than 20 held-out documents are too few to tell"
    }
    assert [estimate_of(score) for score in (known.base, known.tuned)] == [None] * 2
