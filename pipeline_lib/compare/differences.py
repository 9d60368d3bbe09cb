"""Differences between experiments: config keys, software, data, plans. Equal values are omitted."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from pydantic_core import to_jsonable_python

from pipeline_lib.compare.read import Known
from pipeline_lib.config.schema import Config, Data, PydocData, source_key
from pipeline_lib.config.spec_settings import WHERE_KEYS
from pipeline_lib.config.train import PLACEMENT_KEYS
from pipeline_lib.core import units
from pipeline_lib.core.files import canonical_json
from pipeline_lib.core.units import brief
from pipeline_lib.records.plan import PlannedWay

NONE = "-"
PARENT = "model.parent."  # before the keys of the experiment that one goes on from
MAX_VALUE_CHARS = 60
_SOFTWARE = ("code", "python", "torch", "transformers", "tokenizers", "peft", "numpy")


@dataclass(frozen=True)
class DifferingRow:
    """A row that differs between experiments: its name and its values, `-` where it has none."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Differences:
    """All differences; only those in `changing` can change the result.

    `changing` and `placing` are config keys; `placing` are those that only tell where and how the
    training runs. `sources` are the held-out losses of the tuned models by source, in nats per
    supervised token.
    """

    changing: list[DifferingRow]
    placing: list[DifferingRow]
    software: list[DifferingRow]
    data: list[DifferingRow]
    plan: list[DifferingRow]
    sources: list[DifferingRow]

    @staticmethod
    def between(found: Sequence[Known]) -> "Differences":
        """Return the differences between all of `found`."""
        configs = [by_dotted_key(filled(known.subject.config)) for known in found]
        keys = _differing(configs, _value_text)
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
    defaults: dict[str, Any] = {}
    for name, field in Config.model_fields.items():
        if not field.is_required():
            defaults[name] = to_jsonable_python(field.default)
    any_data = Data(train=(PydocData(source="pydoc"),))
    defaults["data"] = any_data.model_dump(mode="json", exclude={"train"})
    return _merged(defaults, config)


def _merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    result = {**defaults, **given}
    for key, default in defaults.items():
        if isinstance(default, dict) and isinstance(given.get(key), dict):
            result[key] = _merged(default, given[key])
    return result


def by_dotted_key(value: Any, key: str = "") -> dict[str, Any]:
    """Return the leaves of `value` by dotted key, like `data.train[0].path`, without the name."""
    leaves: dict[str, Any] = {}
    if isinstance(value, dict):
        for name, item in value.items():
            leaves |= by_dotted_key(item, f"{key}.{name}".lstrip("."))
        leaves.pop("experiment", None)
        return leaves
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            leaves |= by_dotted_key(item, f"{key}[{index}]")
        return leaves
    return {key: value}


def _is_place(key: str) -> bool:
    """Return whether `key` changes no weights: where and how to compute, or what is made of them."""
    own_key = key.rpartition(PARENT)[2]
    if own_key in ("experiment", "model.config"):  # the name of a parent, and its file
        return True
    section, _, rest = own_key.partition(".")
    if section == "train":
        return rest in PLACEMENT_KEYS or rest == "replica"
    is_where = section in ("model", "data") and own_key.rpartition(".")[2] in WHERE_KEYS
    return is_where or section in ("cluster", "tracking", "export", "ship", "report")


def _contents(found: Sequence[Known], keys: Iterable[str]) -> list[DifferingRow]:
    """Return sources with different content, by download digest, unless `keys` explains it."""
    differences = []
    trained = {len(known.subject.config.get("data", {}).get("train", ())) for known in found}
    for difference in _differing([_downloads(known) for known in found], str):
        section, _, index = difference.name.partition(".")
        places = [f"{section}."]
        if section == "data":
            places = [f"{source_key(int(index), number)}." for number in trained]
        if not any(key.startswith(tuple(places)) for key in keys):
            differences.append(DifferingRow(f"{difference.name} (content)", difference.values))
    return differences


def _downloads(known: Known) -> dict[str, str]:
    """Return the digests of the downloads by part: `model`, `data.0`."""
    digests = {}
    for part, digest in known.subject.parts.items():
        if part.partition(".")[0] in ("model", "data"):
            digests[part] = digest
    return digests


def _software(known: Known) -> dict[str, str]:
    """Return the versions that training ran with, or the last sealed stage's before it."""
    for part in ("train", "shard", "tokenize", "model"):
        if part in known.manifests:
            versions = known.manifests[part].versions
            return {name: versions[name] for name in _SOFTWARE if name in versions}
    return {}


def _data(known: Known) -> dict[str, str]:
    ledger = known.ledger
    index = known.train_index
    held_out = known.validation_index
    numbers: dict[str, int] = {}
    if ledger is not None:
        total = ledger.total
        numbers["sources"] = len(ledger.sources)
        numbers["rows"] = total.rows
        numbers["conversations"] = total.conversations
        for reason, number in total.quarantined.items():
            numbers[f"rows quarantined: {reason}"] = number
        numbers["duplicates dropped"] = total.duplicates_dropped
        numbers["samples"] = total.samples
        for reason, number in total.dropped.items():
            numbers[f"samples dropped: {reason}"] = number
        numbers["samples kept"] = total.kept
        numbers["of them cut"] = total.truncated
        numbers["of them pieces"] = total.split
        numbers["tokens"] = total.tokens
        numbers["supervised tokens"] = total.supervised_tokens
    if index is not None:
        numbers["training blocks"] = index.blocks
        numbers["tokens of a block"] = index.block_tokens
        numbers["training documents"] = index.documents
    if held_out is not None:
        numbers["held-out documents"] = held_out.documents
        numbers["held-out supervised tokens"] = held_out.supervised_tokens
    shown = {name: units.count(number) for name, number in numbers.items()}
    if index is not None and index.blocks:
        shown["padding"] = units.percent(index.padding_fraction)
    return shown


def _by_source(known: Known) -> dict[str, str]:
    shown: dict[str, str] = {}
    if known.scores is None:
        return shown
    for one in known.scores.by_source:
        if one.tuned is not None:
            shown[one.source] = units.real(one.tuned.loss, "", 4)
    return shown


def _plan(known: Known) -> dict[str, str]:
    plan = known.plan
    if plan is None:
        return {}
    batch = plan.batch
    shown: dict[str, tuple[Any, Callable[[Any], str]]] = {
        "strategy": (plan.chosen.strategy, str),
        "machine": (plan.machine.name if plan.machine else None, str),
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
    }
    if plan.prediction is not None:
        shown |= _predicted(plan.prediction)
    return {name: show(value) for name, (value, show) in shown.items() if value is not None}


def _predicted(way: PlannedWay) -> dict[str, tuple[Any, Callable[[Any], str]]]:
    changes = way.changes
    return {
        "activation checkpointing": (changes.recompute, str),
        "offload": (changes.offload, str),
        "no reshard after forward": (not changes.reshard, _value_text),
        "compiled": (changes.compile, _value_text),
        "a step, predicted": (way.step_s.value, brief),
        "memory of a rank, predicted": (way.peak_memory_bytes.value, units.gib),
        "all steps, predicted": (way.run_s.value if way.run_s else None, brief),
        "GPU hours, predicted": (way.gpu_hours.value if way.gpu_hours else None, units.rounded),
    }


def _differing(
    tables: Sequence[Mapping[str, Any]], show: Callable[[Any], str]
) -> list[DifferingRow]:
    """Return the keys with different values, in order of appearance; an empty table is unknown.

    The values are compared, not their displayed texts.
    """
    known = [table for table in tables if table]
    keys = dict.fromkeys(chain(*known))
    found = []
    for key in keys:
        values = {canonical_json(table[key]) if key in table else None for table in known}
        if len(values) > 1:
            texts = [show(table[key]) if key in table else NONE for table in tables]
            found.append(DifferingRow(key, tuple(map(_shortened, texts))))
    return found


def _shortened(text: str) -> str:
    if len(text) <= MAX_VALUE_CHARS:
        return text
    return f"{text[: MAX_VALUE_CHARS - 4]} ..."


def as_number(value: Any) -> float | None:
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
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return canonical_json(value)
