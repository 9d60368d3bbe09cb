"""The comparison of several experiments: which is best, what is the same, what differs."""

import math
import os.path
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from pipeline_lib.compare.read import Known, Subject, read_known
from pipeline_lib.config.compile import WHERE_KEYS
from pipeline_lib.config.schema import Config, Data, PydocData, source_key
from pipeline_lib.config.train import PLACEMENT_KEYS
from pipeline_lib.core import units
from pipeline_lib.core.files import canonical_json
from pipeline_lib.core.run_record import RunRecord
from pipeline_lib.core.units import brief
from pipeline_lib.records.results import DocumentScore, Source, Training
from pipeline_lib.report.facts import spent
from pipeline_lib.report.statistics import MIN_DOCUMENTS, TOO_FEW, Losses
from pipeline_lib.status.run import shown

# Ranking: which experiment is best, and which of the others are worse by more than chance.
#
# The held-out documents are a sample. Two models that were scored on the same documents are compared document by
# document, which cancels the difficulty of each document; where no document is shared, the noise of both samples
# counts. The best is selected for its loss, so the intervals are widened to hold for all pairs at once (Bonferroni):
# among experiments that are equally good, 5 % of comparisons find any difference at all. A loss is per token, so only
# experiments with the same tokenizer are compared.

PAIRED, UNPAIRED, UNKNOWN, BEST = "paired", "unpaired", "unknown", "best"
OTHER_TOKENS = "their tokenizers differ, so a loss per token means something else"
OTHER_DATA = "they share too few held-out documents, and their data differs"
Document = tuple[str, int]  # its hash, and the number of equal documents before it


@dataclass(frozen=True)
class Versus:
    """The excess of an experiment's loss over that of the best, in nats per supervised token.

    `documents` is the number of documents that both were scored on. `kind` is the method of the comparison; for
    UNKNOWN, `why` is the reason why there is no interval.
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
        """Whether the loss on shared documents is below that of the best, which is best on its own documents."""
        return self.high is not None and self.high < 0

    @property
    def meaning(self) -> str:
        """The result in a few words."""
        if self.kind == BEST:
            return BEST
        known = {"worse": self.is_worse, "within noise": self.is_noise, "better where shared": self.is_better}
        return next((word for word, holds in known.items() if holds), "unknown")


@dataclass(frozen=True)
class Ranking:
    """The best of the evaluated experiments, how each compares with it, and the number of pairs the intervals hold for.

    Experiments are identified by their place in the list. `shared` is the number of documents that all experiments with
    losses by document were scored on, 0 if these are too few. `loss` is the lowest among `ranked`: each loss on the
    experiment's own documents, or, if `is_part`, on the shared documents only. There is no best without an evaluated
    experiment, or where no two can be compared.
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
    tables = {place: table for place in losses if (table := _table(found[place].document_scores))}
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
    if is_part:  # losses on different documents are not comparable
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
            without = names[place if place not in tables else best]
            reason = f"the evaluation of {without} has no losses by document (scores.jsonl); run evaluate again"
            versus[place] = Versus(UNKNOWN, difference=losses[place] - losses[best], why=reason)
        else:
            versus[place] = compare(tables[place], tables[best], pairs, common)
    return Ranking(best, versus, pairs, len(common), tuple(sorted(means)), means[best], is_part)


def compare(
    one: Mapping[Document, DocumentScore],
    best: Mapping[Document, DocumentScore],
    pairs: int = 1,
    common: Sequence[Document] = (),
) -> Versus:
    """Return how far `one` is above `best` on the `common` documents, or else on those that the two share.

    The interval is widened so that `pairs` intervals hold together.
    """
    shared = list(common) or _shared([one, best])
    if len(shared) >= MIN_DOCUMENTS:
        kind, difference = PAIRED, _losses(best, shared).gain_over(_losses(one, shared))
    else:
        kind, difference = UNPAIRED, _losses(best, list(best)).estimate.gain_over(_losses(one, list(one)).estimate)
    if not difference.has_enough:
        return Versus(UNKNOWN, len(shared), why=TOO_FEW)
    return Versus(kind, len(shared), difference.value, *difference.interval(pairs))


def _alike(hashes: Mapping[int, str | None]) -> list[int]:
    """Return the places whose hash is the most common one (of several, the first) or is not known."""
    known = Counter(one for one in hashes.values() if one is not None).most_common(1)
    return [place for place, one in hashes.items() if one is None or one == known[0][0]]


def _table(scores: Sequence[DocumentScore]) -> dict[Document, DocumentScore]:
    """Return the scores by document, without documents of 0 tokens; equal documents are numbered, since each counts."""
    seen: Counter[str] = Counter()
    found = {}
    for score in scores:
        if score.tokens:
            found[score.document, seen[score.document]] = score
            seen[score.document] += 1
    return found


def _shared(tables: Sequence[Mapping[Document, DocumentScore]]) -> list[Document]:
    """Return the documents of all `tables` with equal token counts, in the order of the first table."""
    first, *others = tables
    return [key for key in first if all(key in other and other[key].tokens == first[key].tokens for other in others)]


def _losses(table: Mapping[Document, DocumentScore], documents: Sequence[Document]) -> Losses:
    return Losses.of([table[document] for document in documents], "tuned")


# Sameness: whether two runs are identical to the last bit, and if not, at which step they diverge.

# The computed values of a step; its duration is not compared.
_COMPUTED = ("step", "loss", "lr", "grad_norm", "validation_loss", "verdict", "epoch", "tokens", "supervised_tokens")


@dataclass(frozen=True)
class Sameness:
    """What two runs have in common: the `steps` of each, and the first step that differs, if any.

    `first` and `second` are their places. `is_one_run` is true if both experiments use the same training. `models`
    tells whether the exported weights have the same hashes; None if one of them is missing.
    """

    first: int
    second: int
    is_one_run: bool
    steps: tuple[int, int]
    parts_at: int | None
    models: bool | None

    @property
    def is_identical(self) -> bool:
        """Whether every step and the model files are the same."""
        return self.parts_at is None and self.steps[0] == self.steps[1] > 0 and self.models is True


def sameness(found: Sequence[Known], first: int, second: int) -> Sameness:
    """Compare the experiments `first` and `second` of `found` bit by bit."""
    one, other = found[first], found[second]
    models = one.model_hashes == other.model_hashes if one.model_hashes and other.model_hashes else None
    is_one_run = (
        one.subject.store.root.resolve() == other.subject.store.root.resolve()
        and one.subject.parts.get("train") == other.subject.parts.get("train") is not None
    )
    pairs = zip(one.steps, other.steps, strict=False)
    differing = (pair for pair in pairs if any(getattr(pair[0], key) != getattr(pair[1], key) for key in _COMPUTED))
    parts_at = next((min(left.step, right.step) for left, right in differing), None)
    return Sameness(first, second, is_one_run, (len(one.steps), len(other.steps)), parts_at, models)


def describe_sameness(same: Sameness, names: Sequence[str]) -> str:
    """Return a sentence that describes `same`."""
    one, other = names[same.first], names[same.second]
    pair, (left, right) = f"{one} and {other}", same.steps
    if same.is_one_run:
        return f"{pair} use the same training, so its results are the same."
    if not left or not right:
        return f"{one if not left else other} has no steps yet: there is no curve to compare."
    if same.parts_at is not None:
        return f"{pair} first differ at step {same.parts_at:,}." + (
            " Their model files are identical nevertheless." if same.models else ""
        )
    if left != right:
        shorter, longer = (one, other) if left < right else (other, one)
        until = f"up to step {min(left, right):,}, where {shorter} ends; {longer} continues"
        return f"{pair} are the same to the last bit {until}."
    curves = f"{units.count(left, 'steps')} with the same loss, learning rate and gradient norm to the last bit"
    if same.models is None:
        return f"{pair} have the same curves so far: {curves}; at least one of the models does not exist yet."
    if same.models:
        return f"{pair} are identical: {curves}, and the same model files."
    return f"{pair} have the same curves, {curves}, but their model files differ."


# Differences between experiments: config keys, software, data, plans. Equal values are omitted.

NONE = "-"
MAX_VALUE_CHARS = 60
_SOFTWARE = ("code", "python", "torch", "transformers", "tokenizers", "peft", "numpy")


@dataclass(frozen=True)
class Difference:
    """A row that is not the same in all experiments: its name, and its value in each, `-` where it has none."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Differences:
    """All differences; only those in `changing` can change the result.

    `changing` and `placing` are config keys; `placing` are those that only tell where and how the training runs.
    `sources` are the held-out losses of the tuned models by source, in nats per supervised token.
    """

    changing: list[Difference]
    placing: list[Difference]
    software: list[Difference]
    data: list[Difference]
    plan: list[Difference]
    sources: list[Difference]

    @staticmethod
    def between(found: Sequence[Known]) -> "Differences":
        """Return the differences between all of `found`."""
        keys = _differing([_flat(filled(known.subject.config)) for known in found], _value_text)
        changing = [one for one in keys if not _is_place(one.name)]
        return Differences(
            changing=changing + _contents(found, [one.name for one in changing]),
            placing=[one for one in keys if _is_place(one.name)],
            software=_differing([_software(known) for known in found], str),
            data=_differing([_data(known) for known in found], str),
            plan=_differing([_plan(known) for known in found], str),
            sources=_differing([_by_source(known) for known in found], str),
        )


def filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `config` with every missing key set to its default in this version of the code."""
    sections = {name: field.default for name, field in Config.model_fields.items() if not field.is_required()}
    any_data = Data(train=(PydocData(source="pydoc"),))
    of_data = any_data.model_dump(mode="json", exclude={"train"})
    defaults = {name: section.model_dump(mode="json") for name, section in sections.items()}
    return _merged({**defaults, "data": of_data}, config)


def _merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    result = {**defaults, **given}
    for key, default in defaults.items():
        if isinstance(default, dict) and isinstance(given.get(key), dict):
            result[key] = _merged(default, given[key])
    return result


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """Return the leaves of `value` by dotted key, like `data.train[0].path`, without the experiment's name."""
    if isinstance(value, dict):
        inner = [_flat(item, f"{key}.{name}".lstrip(".")) for name, item in value.items()]
        return {name: leaf for each in inner for name, leaf in each.items() if name != "experiment"}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return {name: leaf for index, item in enumerate(value) for name, leaf in _flat(item, f"{key}[{index}]").items()}
    return {key: value}


def _is_place(key: str) -> bool:
    """Return whether `key` only tells where and how something is computed, or where content with a hash is located."""
    section, _, rest = key.partition(".")
    if section == "train":
        return rest in PLACEMENT_KEYS or rest == "replica"
    is_where = section in ("model", "data") and key.rpartition(".")[2] in WHERE_KEYS
    return is_where or section in ("cluster", "tracking")


def _contents(found: Sequence[Known], keys: Iterable[str]) -> list[Difference]:
    """Return the sources whose content differs, by the digest of their download, unless one of `keys` explains it."""
    differences = []
    parts = [
        {part: digest for part, digest in known.subject.parts.items() if part.partition(".")[0] in ("model", "data")}
        for known in found
    ]
    trained = [len(known.subject.config.get("data", {}).get("train", ())) for known in found]
    for difference in _differing(parts, str):
        section, _, index = difference.name.partition(".")
        places = {f"{source_key(int(index), number)}." if section == "data" else f"{section}." for number in trained}
        if not any(key.startswith(tuple(places)) for key in keys):
            differences.append(Difference(f"{difference.name} (content)", difference.values))
    return differences


def _software(known: Known) -> dict[str, str]:
    """Return the versions that the training ran with, or else those of the last sealed stage before it."""
    order = ("train", "shard", "tokenize", "model")
    manifest = next((known.manifests[part] for part in order if part in known.manifests), None)
    versions = manifest.versions if manifest else {}
    return {name: versions[name] for name in _SOFTWARE if name in versions}


def _data(known: Known) -> dict[str, str]:
    total = known.ledger.total if known.ledger.sources else Source()
    index, held_out = known.train_index, known.validation_index
    numbers: dict[str, Any] = {
        "sources": len(known.ledger.sources) or None,
        "rows": total.rows,
        "conversations": total.conversations,
        **{f"rows quarantined: {reason}": number for reason, number in total.quarantined.items()},
        "duplicates dropped": total.duplicates_dropped,
        "samples": total.samples,
        **{f"samples dropped: {reason}": number for reason, number in total.dropped.items()},
        "samples kept": total.kept,
        "of them cut": total.truncated,
        "of them pieces": total.split,
        "tokens": total.tokens,
        "supervised tokens": total.supervised_tokens,
        "training blocks": index.blocks,
        "tokens of a block": index.block_tokens,
        "training documents": index.documents,
        "held-out documents": held_out.documents,
        "held-out supervised tokens": held_out.supervised_tokens,
    }
    padding = {"padding": units.percent(index.padding_fraction)} if index.blocks else {}
    return {name: units.count(number) for name, number in numbers.items() if number is not None} | padding


def _by_source(known: Known) -> dict[str, str]:
    scores = known.evaluation.eval.by_source
    return {one.source: units.real(one.tuned.loss, "", 4) for one in scores if one.tuned.loss is not None}


def _plan(known: Known) -> dict[str, str]:
    plan = known.plan
    batch, way, reshard = plan.batch, plan.prediction, plan.prediction.changes.reshard
    shown: dict[str, tuple[Any, Callable[[Any], str]]] = {
        "strategy": (plan.chosen.strategy, str),
        "machine": (plan.machine.name, str),
        "nodes": (plan.cluster.nodes, units.count),
        "ranks": (plan.cluster.ranks, units.count),
        "device": (plan.cluster.device, str),
        "blocks of a step": (batch.global_batch_blocks, units.count),
        "micro-batch, blocks": (batch.micro_batch_blocks, units.count),
        "accumulation": (batch.accumulation, units.count),
        "tokens of a step": (batch.tokens_per_step, units.count),
        "samples of a step": (batch.samples_per_step, units.compact),
        "steps": (batch.steps, units.count),
        "epochs": (batch.epochs, units.compact),
        "activation checkpointing": (way.changes.recompute, str),
        "offload": (way.changes.offload, str),
        "no reshard after forward": (None if reshard is None else not reshard, _value_text),
        "compiled": (way.changes.compile, _value_text),
        "a step, predicted": (way.step_s.value, brief),
        "memory of a rank, predicted": (way.peak_memory_bytes.value, units.gib),
        "all steps, predicted": (way.run_s.value, brief),
        "GPU hours, predicted": (way.gpu_hours.value, units.rounded),
    }
    return {name: show(value) for name, (value, show) in shown.items() if value is not None}


def _differing(tables: Sequence[Mapping[str, Any]], show: Callable[[Any], str]) -> list[Difference]:
    """Return the keys whose values differ, in order of first appearance; an empty table counts as unknown.

    The values are compared, not their displayed texts.
    """
    known = [table for table in tables if table]
    keys = dict.fromkeys(key for table in known for key in table)
    found = []
    for key in keys:
        values = [canonical_json(table[key]) if key in table else None for table in known]
        if len(set(values)) > 1:
            texts = (show(table[key]) if key in table else NONE for table in tables)
            cells = (text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 4]} ..." for text in texts)
            found.append(Difference(key, tuple(cells)))
    return found


def _number(value: Any) -> float | None:
    """Return `value` if it is a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def _value_text(value: Any) -> str:
    """Return a config value as a user would write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else canonical_json(value)


# The comparison itself: the content of the table, the page and the JSON.

DIGEST_SHOWN = 8


@dataclass(frozen=True)
class Measured:
    """The numbers of an experiment: losses in nats per supervised token, speed over all ranks, hours of a `device`.

    All attempts count. `training_time_s` is the time from the first step to the last; `held_s` is how long the devices
    were occupied, from the start of the ranks to their end. A device is a `GPU` or a `CPU core`. If a rung of its sweep
    stopped it, `rung_loss` is its held-out loss there, after the step `stopped_at`. None means not known, or not yet.
    """

    state: str
    stopped_at: int | None
    rung_loss: float | None
    loss: float | None
    standard_error: float | None
    perplexity: float | None
    final_loss: float | None
    steps: int
    supervised_tokens: int | None
    tokens_per_s: float | None
    mfu: float | None
    peak_memory_bytes: float | None
    training_time_s: float | None
    held_s: float | None
    device: str
    device_hours: float | None
    restarts: int


def measured(known: Known) -> Measured:
    """Return the numbers of `known`, from its sealed files, or from the steps that it has taken so far."""
    scores, training, steps = known.evaluation.eval, known.training, known.steps
    if known.is_trained:
        cost = known.spent
    else:  # from the steps that it has taken so far
        cost = spent(known.plan, Training(train_s=known.training_time_s), steps, RunRecord())
    supervised = [step.supervised_tokens for step in steps if step.supervised_tokens is not None]
    losses = [step.loss for step in steps if step.verdict is None and step.loss is not None]
    planned_device = "GPU" if known.plan.cluster.is_gpu else "CPU core"
    return Measured(
        state=known.state,
        stopped_at=known.stop.step if known.stop else None,
        rung_loss=known.stop.loss if known.stop else None,
        loss=scores.tuned.loss,
        standard_error=scores.tuned.standard_error,
        perplexity=scores.tuned.perplexity,
        final_loss=training.final_loss if known.is_trained else next(reversed(losses), None),
        steps=known.last_step,
        supervised_tokens=training.supervised_tokens or (sum(supervised) if supervised else None),
        tokens_per_s=known.tokens_per_s,
        mfu=known.mfu,
        peak_memory_bytes=known.peak_memory_bytes,
        training_time_s=known.training_time_s,
        held_s=cost.held_s if cost else None,
        device=cost.device if cost else planned_device,
        device_hours=cost.hours if cost else None,
        restarts=known.restarts,
    )


@dataclass(frozen=True)
class Comparison:
    """The experiments in the order in which they were named, and everything that is shown about them."""

    found: list[Known]

    @staticmethod
    def of(subjects: Sequence[Subject]) -> "Comparison":
        """Read all `subjects`."""
        return Comparison([read_known(subject) for subject in subjects])

    @cached_property
    def family(self) -> str:
        """The common prefix, up to a hyphen, of more than two names, like a sweep's name; else empty."""
        first, hyphen, _ = os.path.commonprefix([shown(known.name) for known in self.found]).rpartition("-")
        return first + hyphen if len(self.found) > 2 else ""

    @cached_property
    def title(self) -> str:
        """The title: `a against b`, or for more than two their family and their number."""
        if len(self.names) == 2:
            return " against ".join(self.names)
        count = f"{len(self.names)} experiments"
        return f"{self.family.removesuffix('-')}: {count}" if self.family else count

    @cached_property
    def names(self) -> list[str]:
        """Display names without the family's prefix, made unique by the digest or the store where names are equal."""
        subjects = [known.subject for known in self.found]
        named = [(shown(one.name).removeprefix(self.family), one.parts["report"][:DIGEST_SHOWN]) for one in subjects]
        labels = []
        for (name, digest), subject in zip(named, subjects, strict=True):
            has_other_config = len({other for known, other in named if known == name}) > 1
            label = f"{name} ({digest})" if has_other_config else name
            is_in_two_stores = named.count((name, digest)) > 1
            labels.append(f"{label} in {shown(str(subject.store.root))}" if is_in_two_stores else label)
        return labels

    @cached_property
    def measured(self) -> list[Measured]:
        """The numbers of each experiment."""
        return [measured(known) for known in self.found]

    @cached_property
    def ranking(self) -> Ranking:
        """Which experiment is best, and how the others compare with it."""
        return rank(self.found, self.names)

    @cached_property
    def differences(self) -> Differences:
        """The differences between all experiments."""
        return Differences.between(self.found)

    @cached_property
    def same(self) -> list[Sameness]:
        """Bit-by-bit comparisons of two experiments; of more, of the pairs whose configs mean the same result."""
        places = range(len(self.found))
        pairs = [(one, other) for one in places for other in places if one < other]
        if len(self.found) > 2:
            keys = [tuple(row.values[place] for row in self.differences.changing) for place in places]
            pairs = [(one, other) for one, other in pairs if keys[one] == keys[other]]
        return [sameness(self.found, one, other) for one, other in pairs]

    @cached_property
    def swept(self) -> dict[str, list[float | None]]:
        """The values of each key that differs and holds numbers, by experiment; None where it has no number."""
        tables = [_flat(filled(known.subject.config)) for known in self.found]
        values = {one.name: [_number(table.get(one.name)) for table in tables] for one in self.differences.changing}
        return {name: found for name, found in values.items() if len({*found} - {None}) > 1}

    @property
    def same_texts(self) -> list[str]:
        """The comparisons of `same` as sentences."""
        return [describe_sameness(same, self.names) for same in self.same]

    @property
    def is_identical(self) -> bool:
        """Whether all experiments are the same to the last bit."""
        pairs = len(self.found) * (len(self.found) - 1) // 2
        return len(self.same) == pairs and all(same.is_identical for same in self.same)

    @property
    def notes(self) -> list[str]:
        """Notes on damaged files that were not used, prefixed with the experiment."""
        named = zip(self.names, self.found, strict=True)
        return [f"{name}: {note}" for name, known in named for note in dict.fromkeys(known.notes)]

    @property
    def order(self) -> list[int]:
        """The places in display order: the best, then by loss, then those that a sweep stopped, the latest first."""

        def key(place: int) -> tuple[bool, bool, int, float, int]:
            numbers = self.measured[place]
            versus = self.ranking.versus.get(place, Versus(""))
            known = (versus.difference, numbers.loss, numbers.rung_loss)
            difference = next((one for one in known if one is not None), math.inf)
            return place != self.ranking.best, numbers.loss is None, -(numbers.stopped_at or 0), difference, place

        return sorted(range(len(self.found)), key=key)

    def to_json(self, verdict: str) -> dict[str, Any]:
        """Return everything but the curves as JSON values; the keys are stable."""
        ranking = self.ranking

        def rows(of: Sequence[Difference]) -> dict[str, list[str]]:
            return {row.name: list(row.values) for row in of}

        return {
            "verdict": verdict,
            "identical": self.is_identical,
            "best": None if ranking.best is None else self.names[ranking.best],
            "documents_shared_by_all": ranking.shared,
            "pairs": ranking.pairs,
            "experiments": [
                {
                    "name": known.name,
                    "label": name,
                    "store": str(known.subject.store.root),
                    "report": known.subject.parts["report"],
                    **asdict(numbers),
                    "versus_best": asdict(ranking.versus[place]) if place in ranking.versus else None,
                }
                for place, (name, known, numbers) in enumerate(zip(self.names, self.found, self.measured, strict=True))
            ],
            "held_out_by_source": rows(self.differences.sources),
            "config": rows(self.differences.changing),
            "placement": rows(self.differences.placing),
            "software": rows(self.differences.software),
            "data": rows(self.differences.data),
            "plan": rows(self.differences.plan),
            "same": [
                {**asdict(same), "first": self.names[same.first], "second": self.names[same.second]}
                for same in self.same
            ],
            "notes": self.notes,
        }
