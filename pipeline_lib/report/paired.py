"""Two models on the same questions: the difference of the fractions right, with its interval."""

import math
from collections.abc import Sequence
from statistics import NormalDist

from pipeline_lib.records.benchmark import (
    BenchmarkAnswer,
    BenchmarkComparison,
    BenchmarkScore,
    Fault,
    Overlaps,
)
from pipeline_lib.report.statistics import CONFIDENCE


def interval_of(gained: int, lost: int, questions: int) -> tuple[float, float]:
    """Return the 95 % interval of the difference of two fractions right of the same questions.

    `gained` questions only the second answered right, `lost` only the first. It is Wald's interval
    of paired proportions with one question added to each of the two (Bonett and Price, Journal of
    Educational and Behavioral Statistics 37, 2012). It covers with few questions too, and is no
    point where no answer differs.
    """
    total = questions + 2
    more = (gained + 1) / total
    fewer = (lost + 1) / total
    difference = more - fewer
    error = math.sqrt((more + fewer - difference**2) / total)
    reach = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * error
    return max(-1.0, difference - reach), min(1.0, difference + reach)


def score_of(answers: Sequence[BenchmarkAnswer]) -> BenchmarkScore:
    """Return the score of one model's answers to a benchmark."""
    faults: dict[Fault, int] = {}
    for answer in answers:
        for fault in answer.faults:
            faults[fault] = faults.get(fault, 0) + 1
    right = sum(answer.is_right for answer in answers)
    return BenchmarkScore(questions=len(answers), right=right, faults=dict(sorted(faults.items())))


def without_touched(
    overlaps: Overlaps, base: Sequence[BenchmarkAnswer], tuned: Sequence[BenchmarkAnswer]
) -> dict[str, BenchmarkComparison]:
    """Return the comparison without the questions that stand in the training rows, by benchmark.

    Benchmarks without such questions are left out, and those that have no others. `base` and
    `tuned` are the answers to all benchmarks, in the same order.
    """
    pairs: dict[str, list[tuple[BenchmarkAnswer, BenchmarkAnswer]]] = {}
    for before, after in zip(base, tuned, strict=True):
        pairs.setdefault(after.benchmark, []).append((before, after))
    found = {}
    for name, overlap in overlaps.benchmarks.items():
        touched = {one.question for one in overlap.touched}
        clean = [pair for pair in pairs[name] if pair[1].question not in touched]
        if touched and clean:
            found[name] = compared([pair[0] for pair in clean], [pair[1] for pair in clean])
    return found


def compared(
    base: Sequence[BenchmarkAnswer], tuned: Sequence[BenchmarkAnswer]
) -> BenchmarkComparison:
    """Return the comparison of both models' answers to the same questions, in the same order."""
    gained = 0
    lost = 0
    for before, after in zip(base, tuned, strict=True):
        gained += after.is_right and not before.is_right
        lost += before.is_right and not after.is_right
    low, high = interval_of(gained, lost, len(tuned))
    return BenchmarkComparison(
        base=score_of(base),
        tuned=score_of(tuned),
        gained=gained,
        lost=lost,
        difference=(gained - lost) / len(tuned),
        low=low,
        high=high,
    )
