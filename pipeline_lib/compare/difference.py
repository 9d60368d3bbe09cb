"""What is different between experiments: keys of their configs, software, data, plans. What is the same is left out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline_lib.base.fsio import canonical_json
from pipeline_lib.compare.read import Known
from pipeline_lib.config.compile import WHERE_KEYS
from pipeline_lib.config.schema import PLACEMENT_KEYS, Config
from pipeline_lib.plan.units import seconds
from pipeline_lib.publish import units
from pipeline_lib.publish.results import Source

NONE = "-"
MAX_VALUE_CHARS = 60
_WHERE_SECTIONS = ("cluster", "tracking")
_SOFTWARE = ("code", "python", "torch", "transformers", "tokenizers", "peft", "numpy")


@dataclass(frozen=True)
class Difference:
    """A line that is not the same in all experiments: what it is of, and its value in each, `-` where it has none."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Differences:
    """All of them. `changing` are config keys that can change the result, `placing` those that say where it is made."""

    changing: list[Difference]
    placing: list[Difference]
    software: list[Difference]
    data: list[Difference]
    plan: list[Difference]

    @staticmethod
    def between(found: Sequence[Known]) -> "Differences":
        """Those between all of `found`."""
        keys = _differing([_flat(filled(known.subject.config)) for known in found], _value_text)
        changing = [one for one in keys if not _is_place(one.name)]
        named = {one.name for one in changing}
        return Differences(
            changing=changing + [one for one in _contents(found) if not _is_explained(one.name, named)],
            placing=[one for one in keys if _is_place(one.name)],
            software=_differing([_software(known) for known in found], str),
            data=_differing([_data(known) for known in found], str),
            plan=_differing([_plan(known) for known in found], str),
        )


def filled(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the default of every key that it does not hold, as of this version of the code."""
    sections = {name: field.default for name, field in Config.model_fields.items() if not field.is_required()}
    defaults = {name: section.model_dump(mode="json") for name, section in sections.items()}
    return _merged(defaults, config)


def _merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    result = {**defaults, **given}
    for key, default in defaults.items():
        if isinstance(default, dict) and isinstance(given.get(key), dict):
            result[key] = _merged(default, given[key])
    return result


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    """The leaves of `value` by dotted key, as `data.train[0].path`. The experiment's name is what its column says."""
    if isinstance(value, dict):
        inner = [_flat(item, f"{key}.{name}".lstrip(".")) for name, item in value.items()]
        return {name: leaf for each in inner for name, leaf in each.items() if name != "experiment"}
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return {name: leaf for index, item in enumerate(value) for name, leaf in _flat(item, f"{key}[{index}]").items()}
    return {key: value}


def _is_place(key: str) -> bool:
    """Whether the key only says where and how something is computed; or where content lies, which has a hash."""
    section, _, rest = key.partition(".")
    if section in _WHERE_SECTIONS:
        return True
    if section == "train":
        return rest in PLACEMENT_KEYS or rest == "replica"
    return section in ("model", "data") and key.rpartition(".")[2] in WHERE_KEYS


def _contents(found: Sequence[Known]) -> list[Difference]:
    """Sources whose content is not the same, by the digest of their download."""
    parts = [
        {part: digest for part, digest in known.subject.parts.items() if part.partition(".")[0] in ("model", "data")}
        for known in found
    ]
    named = [{f"{part} (content)": digest for part, digest in each.items()} for each in parts]
    return _differing(named, str)


def _is_explained(name: str, keys: Iterable[str]) -> bool:
    """Whether other keys of the same source tell already why its content differs."""
    part = name.removesuffix(" (content)")
    section, _, index = part.partition(".")
    place = f"data.train[{index}]" if section == "data" else section
    return any(key.startswith(f"{place}.") for key in keys)


def _software(known: Known) -> dict[str, str]:
    """What the training ran with; while there is none, the last stage that is sealed."""
    order = ("train", "shard", "tokenize", "model")
    manifest = next((known.manifests[part] for part in order if part in known.manifests), None)
    versions = manifest.versions if manifest else {}
    return {name: versions[name] for name in _SOFTWARE if name in versions}


def _data(known: Known) -> dict[str, str]:
    """The ledger's numbers, and those of the blocks that were packed."""
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


def _plan(known: Known) -> dict[str, str]:
    """How the training was to be placed, and what was expected of that."""
    plan = known.plan
    batch, way = plan.batch, plan.prediction
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
        "steps": (batch.steps, units.count),
        "epochs": (batch.epochs, units.compact),
        "recompute": (way.changes.recompute, str),
        "offload": (way.changes.offload, str),
        "layers stay gathered": (_opposite(way.changes.reshard), _value_text),
        "compiled": (way.changes.compile, _value_text),
        "a step, predicted": (way.step_s.value, seconds),
        "memory of a rank, predicted": (way.peak_memory_bytes.value, units.gib),
        "all steps, predicted": (way.run_s.value, seconds),
        "GPU hours, predicted": (way.gpu_hours.value, units.rounded),
    }
    return {name: show(value) for name, (value, show) in shown.items() if value is not None}


def _opposite(value: bool | None) -> bool | None:
    return None if value is None else not value


def _differing(tables: Sequence[Mapping[str, Any]], show: Callable[[Any], str]) -> list[Difference]:
    """The keys whose values differ, in the order in which they come up. An empty table, of what is not there, is none.

    Values are compared, not how they are shown.
    """
    known = [table for table in tables if table]
    keys = dict.fromkeys(key for table in known for key in table)
    found = []
    for key in keys:
        values = [canonical_json(table[key]) if key in table else None for table in known]
        if len(set(values)) > 1:
            found.append(Difference(key, tuple(_cell(table, key, show) for table in tables)))
    return found


def _cell(table: Mapping[str, Any], key: str, show: Callable[[Any], str]) -> str:
    if key not in table:
        return NONE
    text = show(table[key])
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 4]} ..."


def _value_text(value: Any) -> str:
    """A value of a config as one would write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else canonical_json(value)
