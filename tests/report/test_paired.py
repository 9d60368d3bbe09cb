"""The difference of two models on the same questions, its interval, and what may ship."""

import numpy as np
import pytest

from pipeline_lib.config.benchmarks import Ship
from pipeline_lib.records.benchmark import (
    BenchmarkAnswer,
    BenchmarkOverlap,
    Benchmarks,
    BenchmarkScore,
    Overlaps,
    TouchedQuestion,
)
from pipeline_lib.report.paired import compared, interval_of, without_touched
from pipeline_lib.report.ship import ShipDecision, ship_verdict


def answers(right: list[bool], loops: int = 0) -> list[BenchmarkAnswer]:
    return [
        BenchmarkAnswer(
            benchmark="faq",
            question=f"{number:016x}",
            prompt="Why?",
            right=("so",),
            answer="so" if is_right else "no",
            is_right=is_right,
            faults=("loop",) if number < loops else (),
        )
        for number, is_right in enumerate(right)
    ]


def benchmarks(gained: int, lost: int, questions: int, loops: int = 0) -> Benchmarks:
    """Both right on what neither gained nor lost."""
    base = [False] * gained + [True] * (questions - gained)
    tuned = [True] * gained + [False] * lost + [True] * (questions - gained - lost)
    found = compared(answers(base), answers(tuned, loops))
    return Benchmarks(precision="fp32", compared={"faq": found})


def test_the_figures_are_counted_question_by_question() -> None:
    found = benchmarks(30, 10, 100, loops=3).compared["faq"]
    assert (found.gained, found.lost) == (30, 10)
    assert found.base == BenchmarkScore(questions=100, right=70)
    assert found.tuned == BenchmarkScore(questions=100, right=90, faults={"loop": 3})
    assert found.difference == pytest.approx(0.2)
    # by hand: (31 - 11) / 102, and 1.96 * sqrt(((31 + 11) / 102 - (20 / 102)^2) / 102)
    assert (found.low, found.high) == pytest.approx((0.0775, 0.3147), abs=1e-4)


def test_answers_that_never_differ_leave_room_for_chance() -> None:
    low, high = interval_of(0, 0, 50)
    assert low == -high
    assert 0.04 < high < 0.06
    assert interval_of(0, 0, 500)[1] < high / 5


@pytest.mark.parametrize(
    ("only_tuned", "only_base"), [(0.05, 0.05), (0.2, 0.1), (0.02, 0.0), (0.5, 0.0), (0.4, 0.4)]
)
@pytest.mark.parametrize("questions", [20, 100, 500])
def test_the_interval_covers_the_truth_as_often_as_it_says(
    only_tuned: float, only_base: float, questions: int
) -> None:
    """In 19 of 20 of ten thousand simulated benchmarks, up to what few questions allow."""
    random = np.random.default_rng(questions)
    same = 1 - only_tuned - only_base
    drawn = random.multinomial(questions, [only_tuned, only_base, same], size=10_000)
    outcomes, times = np.unique(drawn[:, :2], axis=0, return_counts=True)
    covered = 0
    for (gained, lost), count in zip(outcomes.tolist(), times.tolist(), strict=True):
        low, high = interval_of(gained, lost, questions)
        covered += count * (low <= only_tuned - only_base <= high)
    assert covered / 10_000 > 0.93


@pytest.mark.parametrize(
    ("ship", "found", "decision"),
    [
        (Ship(gain={"faq": 0.05}), benchmarks(60, 2, 100), ShipDecision.SHIP),
        (Ship(gain={"faq": 0.05}), benchmarks(2, 40, 100), ShipDecision.STAY),
        (Ship(gain={"faq": 0.05}), benchmarks(12, 4, 100), ShipDecision.UNKNOWN),
        (Ship(keep={"faq": -0.02}), benchmarks(2, 30, 100), ShipDecision.STAY),
        (Ship(keep={"faq": -0.02}), benchmarks(3, 2, 2000), ShipDecision.SHIP),
        (Ship(loops=0.01), benchmarks(0, 0, 200, loops=2), ShipDecision.SHIP),
        (Ship(loops=0.01), benchmarks(0, 0, 200, loops=3), ShipDecision.STAY),
        # one broken rule is enough
        (Ship(gain={"faq": 0.05}, loops=0.0), benchmarks(60, 2, 100, loops=1), ShipDecision.STAY),
    ],
)
def test_a_model_ships_if_every_rule_holds_beyond_chance(
    ship: Ship, found: Benchmarks, decision: ShipDecision
) -> None:
    verdict = ship_verdict(ship, found)
    assert verdict is not None
    assert verdict.decision == decision


def test_too_few_questions_are_told_with_how_many_would_do() -> None:
    """The questions that are named, with as many gained and lost of a hundred, are enough."""
    verdict = ship_verdict(Ship(gain={"faq": 0.02}), benchmarks(12, 4, 100))
    assert verdict is not None
    [rule] = verdict.rules
    wanted = int(rule.text.partition("; about ")[2].partition(" ")[0].replace(",", ""))
    assert 100 < wanted < 1000
    many = 1.1 * wanted
    enough = benchmarks(round(0.12 * many), round(0.04 * many), round(many))
    again = ship_verdict(Ship(gain={"faq": 0.02}), enough)
    assert again is not None
    assert again.decision == ShipDecision.SHIP


def test_questions_in_the_training_rows_are_taken_out() -> None:
    def answers(right: set[int]) -> list[BenchmarkAnswer]:
        return [
            BenchmarkAnswer(
                benchmark="faq",
                question=str(n),
                prompt="?",
                right=("a",),
                answer="",
                is_right=n in right,
            )
            for n in range(10)
        ]

    touched = tuple(TouchedQuestion(question=str(n), prompt="?", shared="a b") for n in (0, 1, 2))
    overlaps = Overlaps(benchmarks={"faq": BenchmarkOverlap(touched=touched, too_short=0)})
    base, tuned = answers({5}), answers({0, 1, 2, 5, 6})
    found = without_touched(overlaps, base, tuned)["faq"]
    assert (found.tuned.questions, found.tuned.right, found.gained, found.lost) == (7, 2, 1, 0)
    none = Overlaps(benchmarks={"faq": BenchmarkOverlap(touched=(), too_short=0)})
    assert without_touched(none, base, tuned) == {}


def test_without_rules_or_benchmarks_there_is_no_verdict() -> None:
    assert ship_verdict(Ship(), benchmarks(1, 1, 10)) is None
    assert ship_verdict(Ship(loops=0.1), None) is None
