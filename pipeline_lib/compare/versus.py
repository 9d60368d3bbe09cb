"""Which experiment is best, and which of the others are worse by more than chance.

The held-out documents are a sample. Two models that were scored on the same ones are compared document by document,
which cancels how hard each document is; where no document is shared, the noise of both samples counts. The best is
picked because it looks best, so the intervals are widened to hold for all pairs at once (Bonferroni): of all
comparisons among experiments that are equally good, 5 in 100 find any difference at all. A loss is per token, so only
those with one tokenizer are compared.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeline_lib.compare.read import Known
from pipeline_lib.publish.losses import MIN_DOCUMENTS, TOO_FEW, Estimate, Losses
from pipeline_lib.publish.results import DocumentScore

PAIRED, UNPAIRED, UNKNOWN, BEST = "paired", "unpaired", "unknown", "best"
OTHER_TOKENS = "their tokenizers differ, and so does what a token is"
OTHER_DATA = "they share too few held-out documents, and their data is other data"
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
    these are too few. `loss` is the lowest of those `ranked`: each on what it was scored on; but if that `is_part`ly
    something else than the shared documents, all on these. Without an evaluated experiment, or where no two can be
    compared, there is no best.
    """

    best: int | None
    versus: Mapping[int, Versus]
    pairs: int
    shared: int
    ranked: Collection[int] = ()
    loss: float | None = None
    is_part: bool = False


def rank(found: Sequence[Known], names: Sequence[str]) -> Ranking:
    """Rank those of `found` that have a held-out loss; `names` is what to call them."""
    losses = {place: one.loss for place, one in enumerate(found) if one.loss is not None}
    if not losses:
        return Ranking(None, {}, 0, 0)
    tables = {place: table for place in losses if (table := _table(found[place].scores))}
    alike = _alike({place: found[place].tokenizer_hash for place in losses})
    why = dict.fromkeys(losses.keys() - set(alike), OTHER_TOKENS)
    scored = [place for place in alike if place in tables]
    common = _shared([tables[place] for place in scored]) if len(scored) > 1 else []
    if len(common) < MIN_DOCUMENTS:
        common = []
        of_data = _alike({place: found[place].data for place in alike})
        why |= dict.fromkeys(set(alike) - set(of_data), OTHER_DATA)
        alike = of_data
        scored = [place for place in alike if place in tables]
    if len(alike) < min(2, len(losses)):
        reason = OTHER_TOKENS if OTHER_TOKENS in why.values() else OTHER_DATA
        return Ranking(None, {place: Versus(UNKNOWN, why=reason) for place in losses}, 1, 0)
    is_part = bool(common) and any(len(tables[place]) > len(common) for place in scored)
    means = {place: losses[place] for place in alike}
    if is_part:  # a loss on other documents has no place among theirs
        means = {place: _losses(tables[place], common).mean for place in scored}
    best = min(means, key=lambda place: (means[place], place))
    pairs = max(1, len(scored) * (len(scored) - 1) // 2)
    versus = {best: Versus(BEST, len(common))}
    for place in losses:
        if place == best:
            continue
        if place in why:
            versus[place] = Versus(UNKNOWN, why=why[place])
        elif place not in tables or best not in tables:
            without = next(each for each in (place, best) if each not in tables)
            versus[place] = _untold(names[without], losses[place] - losses[best])
        else:
            versus[place] = compare(tables[place], tables[best], pairs, common)
    return Ranking(best, versus, pairs, len(common), tuple(sorted(means)), means[best], is_part)


def compare(
    one: Mapping[Document, DocumentScore],
    best: Mapping[Document, DocumentScore],
    pairs: int = 1,
    common: Sequence[Document] = (),
) -> Versus:
    """How far `one` is above `best` on the `common` documents, or on those that these two share.

    The interval is one of `pairs` that hold together.
    """
    shared = list(common) or _shared([one, best])
    if len(shared) >= MIN_DOCUMENTS:
        return _versus(PAIRED, len(shared), _losses(best, shared).gain_over(_losses(one, shared)), pairs)
    difference = _losses(best, list(best)).estimate.gain_over(_losses(one, list(one)).estimate)
    return _versus(UNPAIRED, len(shared), difference, pairs)


def _versus(kind: str, documents: int, difference: Estimate, pairs: int) -> Versus:
    if not difference.has_enough:
        return Versus(UNKNOWN, documents, why=TOO_FEW)
    return Versus(kind, documents, difference.value, *difference.interval(pairs))


def _untold(name: str, difference: float) -> Versus:
    why = f"the evaluation of {name} has no losses by document (scores.jsonl); run evaluate again"
    return Versus(UNKNOWN, difference=difference, why=why)


def _alike(hashes: Mapping[int, str | None]) -> list[int]:
    """The places with the hash that most have, of several the first, and those of which it is not known."""
    known = Counter(one for one in hashes.values() if one is not None).most_common(1)
    return [place for place, one in hashes.items() if one is None or one == known[0][0]]


def _table(scores: Sequence[DocumentScore]) -> dict[Document, DocumentScore]:
    """The scores by document, with tokens to score; equal documents are numbered, since each counts."""
    seen: Counter[str] = Counter()
    found = {}
    for score in scores:
        if score.tokens:
            found[score.document, seen[score.document]] = score
            seen[score.document] += 1
    return found


def _shared(tables: Sequence[Mapping[Document, DocumentScore]]) -> list[Document]:
    """The documents of all `tables`, in the order of the first. A hash that came with other tokens is another one."""
    first, *others = tables
    return [key for key in first if all(key in other and other[key].tokens == first[key].tokens for other in others)]


def _losses(table: Mapping[Document, DocumentScore], documents: Sequence[Document]) -> Losses:
    """Those of the tuned model."""
    return Losses.of([table[document] for document in documents], "tuned")
