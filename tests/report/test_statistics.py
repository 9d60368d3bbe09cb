"""A difference is called one only where its interval says so."""

from typing import Any

import numpy as np
import pytest

from pipeline_lib.records.results import DocumentScore, Scores
from pipeline_lib.report.statistics import differences, estimate_of
from tests.report.fakes import evaluation, scores


def rows(found: list[dict[str, Any]]) -> list[DocumentScore]:
    return [DocumentScore.model_validate(row) for row in found]


def test_documents_are_compared_one_by_one_and_means_by_their_errors() -> None:
    base, shuffled = differences(Scores.model_validate(evaluation()["eval"]), rows(scores()))
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
    (found,) = differences(Scores(), rows(scores(gain)))
    assert found.text == text


def test_without_the_documents_the_means_tell_and_without_errors_nothing() -> None:
    known = Scores.model_validate(evaluation()["eval"])
    assert [one.is_paired for one in differences(known, [])] == [False, False]
    unsure = Scores.model_validate({"base": {"loss": 3.0}, "tuned": {"loss": 2.0}})
    assert differences(unsure, []) == []
    assert differences(unsure, rows(scores(documents=1))) == []


@pytest.mark.parametrize("documents", [2, 19])
def test_few_documents_prove_nothing_however_large_the_difference(documents: int) -> None:
    few = evaluation()["eval"]
    for name in ("base", "tuned", "shuffled"):
        few[name]["documents"] = documents
    known = Scores.model_validate(few)
    found = [*differences(known, rows(scores(5.2, documents))), *differences(known, [])]
    assert {one.text for one in found} == {"not proven: fewer than 20 held-out documents are too few to tell"}
    assert [estimate_of(score) for score in (known.base, known.tuned, known.shuffled)] == [None] * 3
