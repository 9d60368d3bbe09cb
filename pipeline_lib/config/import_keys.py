"""The keys of a tool's file, under the names that the tools have in common."""

from collections.abc import Iterator
from typing import Any

from pipeline_lib.config.import_deepspeed import add_deepspeed
from pipeline_lib.config.import_draft import Draft, Given
from pipeline_lib.config.import_tools import ACCELERATE, DEEPSPEED, NAMES, SWIFT
from pipeline_lib.config.other_tools import spelled

OVERRIDDEN = "overridden"
_SECTIONS = ("fsdp_config", "deepspeed_config")
# Of a DeepSpeed JSON that ms-swift brings along, what says something: `zero2`, `zero3_offload`.
_PRESETS = {f"zero{stage}": {"stage": stage} for stage in range(4)} | {
    "zero2_offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero3_offload": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    },
}


def add_keys(
    draft: Draft, tool: str, document: dict[str, Any], file: str, *, gives_way: bool = False
) -> None:
    """Add the keys of `document`; if it `gives_way`, those that were added before decide."""
    if tool == DEEPSPEED:
        add_deepspeed(draft, document, file)
        return
    for name, value in _flat(tool, document):
        key = _common(tool, name, value)
        if key == "deepspeed" and isinstance(value, dict):
            add_deepspeed(draft, value, file, f"{name}.")
        elif key == "deepspeed" and tool == SWIFT and str(value) in _PRESETS:
            draft.add(key, Given(file, name, value))
            _add_preset(draft, str(value), file)
        elif gives_way and draft.has(key):
            draft.given.setdefault(OVERRIDDEN, []).append(Given(file, name, value))
        else:
            draft.add(key, Given(file, name, value))


def _add_preset(draft: Draft, name: str, file: str) -> None:
    preset: dict[str, Any] = {"zero_optimization": _PRESETS[name]}
    add_deepspeed(draft, preset, file, f"{name} of {SWIFT}: ")


def _flat(tool: str, document: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the keys of `document` and of the sections and entries in it: `datasets[0].path`."""
    for name, value in document.items():
        is_entries = isinstance(value, list) and any(isinstance(one, dict) for one in value)
        if tool not in NAMES:
            yield name, value
        elif name in _SECTIONS and isinstance(value, dict) and value:
            yield from _inner(name, value)
        elif is_entries:
            for number, entry in enumerate(value):
                yield from _inner(f"{name}[{number}]", entry)
        else:
            yield name, value


def _inner(above: str, entry: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(entry, dict) or not entry:
        yield above, entry
        return
    for name, value in entry.items():
        if name == "type" and isinstance(value, dict):
            yield from _inner(f"{above}.{name}", value)
        else:
            yield f"{above}.{name}", value


def _common(tool: str, name: str, value: Any) -> str:
    """Return the common name of a tool's key."""
    key = spelled(name).removeprefix("deepspeed_config.")
    if tool == ACCELERATE and key == "distributed_type" and str(value).upper() == "FSDP":
        return "fsdp"
    inner = key.removeprefix("fsdp_config.").removeprefix("fsdp_")
    is_of_fsdp = key.startswith("fsdp_config.") or key == "fsdp_version"
    if is_of_fsdp or (tool == ACCELERATE and key.startswith("fsdp_")):
        return f"fsdp_config.{inner}"
    return NAMES.get(tool, {}).get(key, key)
