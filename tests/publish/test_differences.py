"""A difference is called one only where its interval says so."""

import numpy as np
import pytest

from pipeline_lib.publish.differences import differences
from pipeline_lib.publish.results import DocumentScore, Scores
from tests.publish.fakes import evaluation, scores


def rows(found: list[dict[str, float]]) -> list[DocumentScore]:
    return [DocumentScore.model_validate(row) for row in found]


def test_documents_are_compared_one_by_one_and_means_by_their_errors() -> None:
    base, shuffled = differences(Scores.model_validate(evaluation()["eval"]), rows(scores()))
    assert (base.than, base.documents) == ("base", 287)
    assert base.gain.value == pytest.approx(5.2, abs=0.1)
    assert base.text == "lower by more than chance"
    assert (shuffled.than, shuffled.documents) == ("tuned, shuffled prompts", None)
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
    assert [one.documents for one in differences(known, [])] == [None, None]
    damaged = rows([*scores(), {"tokens": 5, "base": 1.0}])
    assert [one.documents for one in differences(known, damaged)] == [None, None]
    unsure = Scores.model_validate({"base": {"loss": 3.0}, "tuned": {"loss": 2.0}})
    assert differences(unsure, []) == []
    assert differences(unsure, rows(scores(documents=1))) == []
