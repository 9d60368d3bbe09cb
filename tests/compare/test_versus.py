"""Which is best and what is noise: pairing, and intervals against simulations of known truth."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline_lib.compare.ranking import (
    BEST,
    OTHER_DATA,
    OTHER_TOKENS,
    PAIRED,
    UNKNOWN,
    UNPAIRED,
    DocumentKey,
    Ranking,
    Versus,
    compare,
    rank,
)
from pipeline_lib.compare.read import Known
from pipeline_lib.compare.subjects import Subject
from pipeline_lib.core.store import FileEntry, Manifest, Store
from pipeline_lib.records.evaluation import MIN_DOCUMENTS, DocumentScore
from tests.compare.fakes import Samples, name_of
from tests.complete import evaluation

TRIALS = 800
Table = dict[DocumentKey, DocumentScore]


def table(nats: Any, tokens: Any, prefix: str = "") -> Table:
    rows = zip(nats.tolist(), tokens.tolist(), strict=True)
    named = ((f"{prefix}{index}", value, count) for index, (value, count) in enumerate(rows))
    return {
        (name, 0): DocumentScore(document=name, tokens=count, base=0.0, tuned=value)
        for name, value, count in named
    }


def evaluated(scores: list[dict[str, Any]], loss: float | None = None) -> Known:
    """An experiment of which only that is known."""
    rows = [DocumentScore(**row) for row in scores]
    mean = sum(row.tuned for row in rows) / sum(row.tokens for row in rows) if rows else loss
    return Known(
        subject=Subject(Store(Path("store")), "one", {}, {"report": "0" * 16}),
        evaluation=evaluation(mean),
        document_scores=rows,
    )


def ranked(*found: Known) -> Ranking:
    return rank(found, [f"e{place}" for place in range(len(found))])


def with_tokenizer(known: Known, sha256: str | None) -> Known:
    if sha256 is None:
        return known
    files = {"tokenizer.json": FileEntry(bytes=1, sha256=sha256)}
    model = Manifest(stage="download", digest="0", spec={}, files=files)
    return replace(known, manifests={**known.manifests, "model": model})


def test_the_difference_is_taken_document_by_document() -> None:
    """The difficulty of documents, far larger than the difference, does not blur it."""
    samples = Samples.drawn(0)
    found = ranked(evaluated(samples.scores(0.05, 1)), evaluated(samples.scores(0.0, 2)))

    one = found.versus[0]
    assert (found.best, found.versus[1].kind, found.shared) == (1, BEST, 287)
    assert (one.kind, one.documents, one.is_worse) == (PAIRED, 287, True)
    assert one.low is not None and one.high is not None and one.low < 0.05 < one.high
    assert one.high - one.low < 0.04
    assert compare(
        table(samples.hardness, samples.tokens, "a"), table(samples.hardness, samples.tokens, "b")
    ).is_noise


def test_documents_are_matched_whatever_their_order_and_how_many_are_shared_is_told() -> None:
    samples = Samples.drawn(0, 60)
    rows, others = samples.scores(0.0, 1, noise=0.0), samples.scores(0.1, 2, noise=0.0)

    found = ranked(evaluated(rows[:50]), evaluated(others[:9:-1]))

    assert (found.best, found.shared, found.versus[1].documents) == (0, 40, 40)
    assert found.versus[1].difference == pytest.approx(0.1, abs=1e-12)


def test_an_easier_sample_of_documents_does_not_make_an_experiment_the_best() -> None:
    """The second has a lower loss of its own, on easy documents; on shared ones it is worse.

    On the documents that both saw, the first is better.
    """
    samples = Samples.drawn(0, 100)
    rows, others = samples.scores(0.0, 1, noise=0.01), samples.scores(0.2, 2, noise=0.01)
    easy = [row for row in others if row["tuned"] / row["tokens"] < 2.5]

    found = ranked(evaluated(rows), evaluated(easy))

    own = [
        sum(row["tuned"] for row in each) / sum(row["tokens"] for row in each)
        for each in (rows, easy)
    ]
    assert own[1] < own[0]
    assert (found.best, found.versus[1].documents, found.versus[1].is_worse) == (0, len(easy), True)


def test_equal_documents_are_paired_one_by_one() -> None:
    rows = Samples.drawn(0, 30).scores(0.0, 1)
    for row in rows[:15]:
        row["document"] = name_of("the same")

    assert ranked(evaluated(rows), evaluated(rows)).shared == 30


@pytest.mark.parametrize("shared", [0, MIN_DOCUMENTS - 1])
def test_without_enough_shared_documents_the_noise_of_both_samples_counts(shared: int) -> None:
    rows = Samples.drawn(0).scores(0.0, 1)
    others = Samples.drawn(3, 150, "other").scores(0.05, 2)

    one = ranked(evaluated(rows), evaluated(others + rows[:shared])).versus
    worse = next(each for each in one.values() if each.kind != BEST)

    assert (worse.kind, worse.documents) == (UNPAIRED, shared)
    assert worse.low is not None and worse.high is not None
    assert worse.high - worse.low > 0.1  # hardness varies by 0.5 among documents


def test_what_cannot_be_told_is_said_and_never_made_up() -> None:
    rows = Samples.drawn(0).scores(0.0, 1)
    old = ranked(evaluated(rows), evaluated([], 9.0)).versus[1]
    few = ranked(evaluated(rows), evaluated(Samples.drawn(1, 5, "other").scores(3.0, 2))).versus[1]

    assert [(one.kind, one.low, one.meaning) for one in (old, few)] == [
        (UNKNOWN, None, "unknown")
    ] * 2
    assert "the evaluation of e1 has no losses by document (scores.jsonl)" in old.why
    assert "fewer than 20 held-out documents" in few.why
    assert ranked(evaluated([]), evaluated([])) == Ranking(None, {}, 0, 0)


def test_one_without_losses_by_document_leaves_the_others_comparable() -> None:
    rows = Samples.drawn(0).scores(0.0, 1)
    found = ranked(evaluated(rows), evaluated(Samples.drawn(0).scores(0.2, 2)), evaluated([], 9.0))

    assert (found.shared, found.pairs) == (287, 1)
    assert [found.versus[place].meaning for place in range(3)] == ["best", "worse", "unknown"]


@pytest.mark.parametrize(
    ("tokenizers", "best", "ranked_places"),
    [
        (("a", "b"), None, ()),
        (("a", "a", "b"), 1, (0, 1)),
        (("a", "b", "b"), 2, (1, 2)),
        ((None, "a", "b"), 1, (0, 1)),
        ((None, None, "a"), 2, (0, 1, 2)),
    ],
)
def test_losses_of_other_tokens_are_never_compared(
    tokenizers: tuple[str | None, ...], best: int | None, ranked_places: tuple[int, ...]
) -> None:
    """The loss of each is lower than that of the one before it."""
    samples = Samples.drawn(0)
    each = enumerate(tokenizers)
    found = ranked(
        *(
            with_tokenizer(evaluated(samples.scores(-0.2 * place, place)), name)
            for place, name in each
        )
    )

    assert (found.best, found.ranked) == (best, ranked_places)
    apart = {place: one for place, one in found.versus.items() if place not in ranked_places}
    assert set(apart.values()) <= {Versus(UNKNOWN, why=OTHER_TOKENS)}
    assert found.versus.keys() == set(range(len(tokenizers)))


def test_losses_on_other_data_are_not_compared_unless_documents_are_shared() -> None:
    def on(data: str, known: Known) -> Known:
        return replace(
            known, subject=replace(known.subject, parts={**known.subject.parts, "data.0": data})
        )

    a, b = Samples.drawn(0), Samples.drawn(1, prefix="other")
    ours = [on("a", evaluated(a.scores(0.0, 1))), on("a", evaluated(a.scores(0.1, 2)))]
    theirs = on("b", evaluated(b.scores(-1.0, 3)))

    assert ranked(ours[0], theirs).best is None
    found = ranked(*ours, theirs)
    assert (found.best, found.ranked) == (0, (0, 1))
    assert found.versus[2] == Versus(UNKNOWN, why=OTHER_DATA)
    assert ranked(ours[0], on("b", evaluated(a.scores(-1.0, 3)))).best == 1


def test_where_some_were_scored_on_more_the_lowest_is_that_on_what_all_were_scored_on() -> None:
    """The second's own loss is lowest, on easy documents; one without losses has no place.

    That is one without losses by document.
    """
    rows, others = (
        Samples.drawn(0, 100).scores(shift, seed, noise=0.01)
        for seed, shift in ((1, 0.0), (2, 0.2))
    )
    easy = [row for row in others if row["tuned"] / row["tokens"] < 2.5]
    found = ranked(evaluated(rows), evaluated(easy), evaluated([], 0.1))

    names = {row["document"] for row in easy}
    shared = [row for row in rows if row["document"] in names]
    assert (found.best, found.ranked, found.shared, found.is_part) == (0, (0, 1), len(easy), True)
    assert found.loss == pytest.approx(
        sum(row["tuned"] for row in shared) / sum(row["tokens"] for row in shared)
    )
    assert found.versus[2].kind == UNKNOWN


@pytest.mark.parametrize("count", [MIN_DOCUMENTS, 60])
def test_the_interval_covers_the_truth_in_95_of_100_samples(count: int) -> None:
    random, truth = np.random.default_rng(count), 0.03
    covered = 0
    for _ in range(TRIALS):
        tokens = random.integers(8, 120, count)
        hardness = 2.4 + 0.5 * random.normal(size=count)
        best = table(tokens * (hardness + 0.1 * random.normal(size=count)), tokens)
        one = compare(
            table(tokens * (hardness + truth + 0.1 * random.normal(size=count)), tokens), best
        )
        covered += one.low is not None and one.high is not None and one.low <= truth <= one.high

    assert 0.93 < covered / TRIALS < 0.97


def test_the_interval_of_different_documents_covers_the_truth_too() -> None:
    random, covered = np.random.default_rng(1), 0
    for _ in range(TRIALS):
        drawn = []
        for prefix, count, mean in (("a", 60, 2.5), ("b", 90, 2.4)):
            tokens = random.integers(8, 120, count)
            drawn.append(table(tokens * (mean + 0.5 * random.normal(size=count)), tokens, prefix))
        one = compare(drawn[0], drawn[1])
        covered += one.low is not None and one.high is not None and one.low <= 0.1 <= one.high

    assert 0.93 < covered / TRIALS < 0.97


def test_of_equally_good_experiments_few_comparisons_find_a_difference() -> None:
    """The best of six looks better by choice alone: uncorrected, every third would alarm.

    It looks better than the worst.
    """
    random, trials, experiments, count = np.random.default_rng(2), 300, 6, 60
    alarms = uncorrected = 0
    for _ in range(trials):
        tokens = random.integers(8, 120, count)
        hardness = 2.4 + 0.5 * random.normal(size=count)
        drawn = [
            table(tokens * (hardness + 0.1 * random.normal(size=count)), tokens)
            for _ in range(experiments)
        ]
        best, *others = sorted(drawn, key=lambda each: sum(row.tuned for row in each.values()))
        pairs = experiments * (experiments - 1) // 2
        alarms += any(compare(one, best, pairs).is_worse for one in others)
        uncorrected += any(compare(one, best).is_worse for one in others)

    assert alarms / trials < 0.08
    assert uncorrected / trials > 0.2


def test_a_hash_that_came_with_other_tokens_is_another_document() -> None:
    rows = Samples.drawn(0, 30).scores(0.0, 1)
    others = [{**row, "tokens": row["tokens"] + (index < 10)} for index, row in enumerate(rows)]

    assert ranked(evaluated(rows), evaluated(others)).shared == 20
