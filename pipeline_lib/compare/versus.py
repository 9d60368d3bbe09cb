"""Which experiment is best, and which of the others are worse by more than chance.

The held-out documents are a sample. Two models that were scored on the same ones are compared document by document,
which cancels how hard each document is; where no document is shared, the noise of both samples counts. The best is
picked because it looks best, so the intervals are widened to hold for all pairs at once (Bonferroni): of all
comparisons among experiments that are equally good, 5 in 100 find any difference at all.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from pipeline_lib.compare.read import Known, Score
from pipeline_lib.publish.losses import Estimate, Losses

MIN_DOCUMENTS = 20  # of fewer the longest decide alone, and intervals come out too short
CONFIDENCE = 0.95
PAIRED, UNPAIRED, UNKNOWN, BEST = "paired", "unpaired", "unknown", "best"
Document = tuple[str, int]  # its hash, and how many equal ones came before it


@dataclass(frozen=True)
class Versus:
    """By how much the loss of an experiment is above that of the best, in nats per supervised token.

    `documents` are those that both were scored on. `kind` says how they were compared; where that is UNKNOWN, `why`
    says why there is no interval.
    """

    kind: str
    documents: int = 0
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""

    @property
    def is_worse(self) -> bool:
        """Whether the best is better by more than chance."""
        return self.low is not None and self.low > 0

    @property
    def is_noise(self) -> bool:
        """Whether the interval is known and holds 0."""
        return self.low is not None and self.high is not None and self.low <= 0 <= self.high

    @property
    def is_better(self) -> bool:
        """Whether it is better than the best on what both were scored on: the best is so on its own documents."""
        return self.high is not None and self.high < 0

    @property
    def meaning(self) -> str:
        """In a word or two."""
        if self.kind == BEST:
            return BEST
        known = {"worse": self.is_worse, "within noise": self.is_noise, "better where shared": self.is_better}
        return next((word for word, holds in known.items() if holds), "cannot be told")


@dataclass(frozen=True)
class Ranking:
    """The best of the evaluated experiments, how each compares with it, and for how many pairs the intervals hold.

    All by their place among the experiments. `shared` documents were scored by all that have losses by document, 0 if
    these were not ranked on them. Without an evaluated experiment there is no best.
    """

    best: int | None
    versus: Mapping[int, Versus]
    pairs: int
    shared: int


def rank(found: Sequence[Known], names: Sequence[str]) -> Ranking:
    """Rank those of `found` that have a held-out loss; `names` is what to call them."""
    losses = {place: one.loss for place, one in enumerate(found) if one.loss is not None}
    if not losses:
        return Ranking(None, {}, 0, 0)
    tables = {place: _table(found[place].scores) for place in losses if found[place].scores}
    own = found[min(losses)].tokenizer_hash
    alike = [place for place in losses if _is_same(found[place].tokenizer_hash, own)]
    scored = [place for place in alike if place in tables]
    common = _shared([tables[place] for place in scored]) if len(scored) > 1 else []
    if len(common) < MIN_DOCUMENTS:
        common = []
    means = {
        place: _losses(tables[place], common).mean if common and place in tables else losses[place] for place in alike
    }
    best = min(alike, key=lambda place: (means[place], place))
    pairs = max(1, len(scored) * (len(scored) - 1) // 2)
    versus = {best: Versus(BEST, len(common))}
    for place in losses:
        if place == best:
            continue
        if place not in alike:
            why = "their tokenizers differ, and so does what a token is"
            versus[place] = Versus(UNKNOWN, why=why)
        elif place not in tables or best not in tables:
            versus[place] = _untold(found, names, place, best)
        else:
            versus[place] = compare(tables[place], tables[best], pairs, common)
    return Ranking(best, versus, pairs, len(common))


def compare(
    one: Mapping[Document, Score], best: Mapping[Document, Score], pairs: int = 1, common: Sequence[Document] = ()
) -> Versus:
    """How far `one` is above `best` on the `common` documents, or on those that these two share.

    The interval is one of `pairs` that hold together.
    """
    shared = list(common) or _shared([one, best])
    if len(shared) >= MIN_DOCUMENTS:
        difference = _losses(best, shared).gain_over(_losses(one, shared))
        return _versus(PAIRED, len(shared), difference, len(shared) - 1, pairs)
    if min(len(one), len(best)) < MIN_DOCUMENTS:
        return Versus(UNKNOWN, len(shared), why=f"fewer than {MIN_DOCUMENTS} held-out documents are too few to tell")
    above, below = _losses(one, list(one)).estimate, _losses(best, list(best)).estimate
    error = math.hypot(above.standard_error, below.standard_error)
    return _versus(
        UNPAIRED, len(shared), Estimate(above.value - below.value, error), min(len(one), len(best)) - 1, pairs
    )


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


def _versus(kind: str, documents: int, difference: Estimate, freedom: int, pairs: int) -> Versus:
    reach = critical(pairs, freedom) * difference.standard_error
    return Versus(kind, documents, difference.value, difference.value - reach, difference.value + reach)


def _untold(found: Sequence[Known], names: Sequence[str], place: int, best: int) -> Versus:
    lacking = next(each for each in (place, best) if not found[each].scores)
    difference = (found[place].loss or 0.0) - (found[best].loss or 0.0)
    why = f"the evaluation of {names[lacking]} has no losses by document (scores.jsonl); run evaluate again"
    return Versus(UNKNOWN, difference=difference, why=why)


def _is_same(one: str | None, other: str | None) -> bool:
    """Whether two tokenizers are the same, as far as is known."""
    return one is None or other is None or one == other


def _table(scores: Sequence[Score]) -> dict[Document, Score]:
    """The scores by document, with tokens to score; equal documents are numbered, since each counts."""
    seen: Counter[str] = Counter()
    found = {}
    for score in scores:
        if score.tokens:
            found[score.document, seen[score.document]] = score
            seen[score.document] += 1
    return found


def _shared(tables: Sequence[Mapping[Document, Score]]) -> list[Document]:
    """The documents of all `tables`, in the order of the first. A hash that came with other tokens is another one."""
    first, *others = tables
    return [key for key in first if all(key in other and other[key].tokens == first[key].tokens for other in others)]


def _losses(table: Mapping[Document, Score], documents: Sequence[Document]) -> Losses:
    """Those of the tuned model."""
    rows = [table[document] for document in documents]
    return Losses(np.array([row.tuned for row in rows]), np.array([row.tokens for row in rows], np.int64))
