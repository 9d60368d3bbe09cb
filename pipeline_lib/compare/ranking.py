"""Ranking: which experiment is best, and which of the others are worse by more than chance.

The held-out documents are a sample. Two models that were scored on the same documents are compared
document by document, which cancels the difficulty of each document; where no document is shared,
the noise of both samples counts. The best is selected for its loss, so the intervals are widened to
hold for all pairs at once (Bonferroni): among experiments that are equally good, 5 % of comparisons
find any difference at all. A loss is per token, so only experiments with the same tokenizer are
compared.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeline_lib.compare.read import Known
from pipeline_lib.records.evaluation import MIN_DOCUMENTS, DocumentScore
from pipeline_lib.report.statistics import DocumentLosses, too_few

PAIRED, UNPAIRED, UNKNOWN, BEST = "paired", "unpaired", "unknown", "best"
OTHER_TOKENS = "their tokenizers differ, so a loss per token means something else"
OTHER_DATA = "they share too few held-out documents, and their data differs"
DocumentKey = tuple[str, int]  # its hash, and the number of equal documents before it
_Scores = Mapping[DocumentKey, DocumentScore]


@dataclass(frozen=True)
class Versus:
    """The excess of an experiment's loss over that of the best, in nats per supervised token.

    `documents` is the number of documents that both were scored on. `kind` is the method of the
    comparison; for UNKNOWN, `why` is the reason why there is no interval.
    """

    kind: str
    documents: int = 0
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    why: str = ""

    @property
    def is_worse(self) -> bool:
        """Whether the loss is above that of the best by more than chance."""
        return self.low is not None and self.low > 0

    @property
    def is_noise(self) -> bool:
        """Whether the interval is known and contains 0."""
        return self.low is not None and self.high is not None and self.low <= 0 <= self.high

    @property
    def is_better(self) -> bool:
        """Whether the loss on shared documents is below that of the best on its own documents."""
        return self.high is not None and self.high < 0

    @property
    def meaning(self) -> str:
        """The result in a few words."""
        if self.kind == BEST:
            return BEST
        if self.is_worse:
            return "worse"
        if self.is_noise:
            return "within noise"
        if self.is_better:
            return "better where shared"
        return "unknown"


@dataclass(frozen=True)
class Ranking:
    """The best evaluated experiment, how each compares with it, and the number of compared pairs.

    The intervals hold for that number of pairs. Experiments are identified by their place in the
    list. `shared` is the number of documents that all experiments with losses by document were
    scored on, 0 if these are too few. `loss` is the lowest among `ranked`: each loss on the
    experiment's own documents, or, if `is_part`, on the shared documents only. There is no best
    without an evaluated experiment, or where no two can be compared.
    """

    best: int | None
    versus: Mapping[int, Versus]
    pairs: int
    shared: int
    ranked: Collection[int] = ()
    loss: float | None = None
    is_part: bool = False


def rank(found: Sequence[Known], names: Sequence[str]) -> Ranking:
    """Rank those of `found` that have a held-out loss; `names` are their names in messages."""
    losses = {place: one.loss for place, one in enumerate(found) if one.loss is not None}
    if not losses:
        return Ranking(None, {}, 0, 0)
    tables = {}
    for place in losses:
        if table := _table(found[place].document_scores):
            tables[place] = table
    alike, why, common = _comparable(found, losses, tables)
    if len(alike) < min(2, len(losses)):
        return _without_best(losses, why)
    scored = [place for place in alike if place in tables]
    is_part = bool(common) and any(len(tables[place]) > len(common) for place in scored)
    means = {place: losses[place] for place in alike}
    if is_part:  # losses on different documents are not comparable
        means = {place: _losses(tables[place], common).mean for place in scored}
    best = min(means, key=lambda place: (means[place], place))
    pairs = max(1, len(scored) * (len(scored) - 1) // 2)
    versus = {best: Versus(BEST, len(common))}
    for place in losses:
        if place == best:
            continue
        difference = losses[place] - losses[best]
        if place in why:
            versus[place] = Versus(UNKNOWN, why=why[place])
        elif place not in tables:
            versus[place] = _without_scores(names[place], difference)
        elif best not in tables:
            versus[place] = _without_scores(names[best], difference)
        else:
            versus[place] = compare(tables[place], tables[best], pairs, common)
    return Ranking(best, versus, pairs, len(common), tuple(sorted(means)), means[best], is_part)


def _comparable(
    found: Sequence[Known], places: Collection[int], tables: Mapping[int, _Scores]
) -> tuple[list[int], dict[int, str], list[DocumentKey]]:
    """Return which of `places` can be compared, why the others cannot, and the shared documents.

    All that have a table of scores were scored on these; there are none if they are too few.
    """
    alike = _alike({place: found[place].tokenizer_hash for place in places})
    why = dict.fromkeys(set(places) - set(alike), OTHER_TOKENS)
    scored = [place for place in alike if place in tables]
    if len(scored) > 1:
        common = _shared([tables[place] for place in scored])
        if len(common) >= MIN_DOCUMENTS:
            return alike, why, common
    of_data = _alike({place: found[place].data for place in alike})
    why |= dict.fromkeys(set(alike) - set(of_data), OTHER_DATA)
    return of_data, why, []


def _without_best(places: Collection[int], why: Mapping[int, str]) -> Ranking:
    """Return the ranking of experiments no two of which can be compared."""
    reason = OTHER_TOKENS if OTHER_TOKENS in why.values() else OTHER_DATA
    return Ranking(None, {place: Versus(UNKNOWN, why=reason) for place in places}, 1, 0)


def _without_scores(name: str, difference: float) -> Versus:
    why = f"the evaluation of {name} has no losses by document (scores.jsonl); run evaluate again"
    return Versus(UNKNOWN, difference=difference, why=why)


def compare(
    one: _Scores,
    best: _Scores,
    pairs: int = 1,
    common: Sequence[DocumentKey] = (),
) -> Versus:
    """Return how far `one` is above `best` on the `common` documents, or else on their shared ones.

    The interval is widened so that `pairs` intervals hold together.
    """
    shared = list(common) or _shared([one, best])
    if len(shared) >= MIN_DOCUMENTS:
        kind = PAIRED
        difference = _losses(best, shared).gain_over(_losses(one, shared))
    else:
        kind = UNPAIRED
        difference = _losses(best, list(best)).estimate.gain_over(_losses(one, list(one)).estimate)
    if not difference.has_enough:
        return Versus(UNKNOWN, len(shared), why=too_few())
    low, high = difference.interval(pairs)
    return Versus(kind, len(shared), difference.value, low, high)


def _alike(hashes: Mapping[int, str | None]) -> list[int]:
    """Return the places whose hash is the most common (of several, the first) or unknown."""
    known = Counter(one for one in hashes.values() if one is not None).most_common(1)
    return [place for place, one in hashes.items() if one is None or one == known[0][0]]


def _table(scores: Sequence[DocumentScore]) -> dict[DocumentKey, DocumentScore]:
    """Return the scores by document, numbering equal ones; documents of 0 tokens are left out.

    Equal documents are numbered because each counts.
    """
    seen: Counter[str] = Counter()
    found = {}
    for score in scores:
        if score.tokens:
            found[score.document, seen[score.document]] = score
            seen[score.document] += 1
    return found


def _shared(tables: Sequence[_Scores]) -> list[DocumentKey]:
    """Return the documents with equal token counts in all `tables`, in the first table's order."""
    shared = []
    for key, score in tables[0].items():
        if all(key in table and table[key].tokens == score.tokens for table in tables):
            shared.append(key)
    return shared


def _losses(table: _Scores, documents: Sequence[DocumentKey]) -> DocumentLosses:
    return DocumentLosses.of([table[document] for document in documents], "tuned")
