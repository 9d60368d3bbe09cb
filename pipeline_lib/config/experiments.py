"""Several experiments in one file: each is the file with the keys of its entry in `experiments`."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline_lib.config.axes import HALVING, SWEEP, line_of
from pipeline_lib.config.strict_yaml import Keys, YamlDocument, dotted

EXPERIMENT, EXPERIMENTS = "experiment", "experiments"
# Sections that an entry replaces as a whole: `source` decides which other keys there are.
_WHOLE: tuple[Keys, ...] = (("model",),)


@dataclass(frozen=True)
class NamedExperiment:
    """An experiment of a file before its `sweep`: its name in `experiments`, and its content.

    The name is empty in a file without `experiments`.
    """

    name: str
    document: YamlDocument


def entries_of(document: YamlDocument) -> tuple[list[NamedExperiment], list[str]]:
    """Return the experiments of a file, in its order, and what is wrong with `experiments`.

    There is always at least one, so that the rest of the file can be checked.
    """
    root = document.value
    if not isinstance(root, dict) or EXPERIMENTS not in root:
        return [NamedExperiment("", document)], []
    shared = {key: value for key, value in root.items() if key != EXPERIMENTS}
    shared_lines = {keys: line for keys, line in document.lines.items() if keys[0] != EXPERIMENTS}
    # stands for the experiments if there are none, under a name that no message is about
    without = YamlDocument({EXPERIMENT: EXPERIMENTS, **shared}, shared_lines)
    given = root[EXPERIMENTS]
    if not isinstance(given, dict) or not given:
        problem = (
            f"{_at(document, (EXPERIMENTS,))}: holds no experiments, as in text: {{data: ...}}"
        )
        return [NamedExperiment("", without)], [problem]
    problems = []
    if EXPERIMENT in shared:
        at = _at(document, (EXPERIMENT,))
        problems.append(f"{at}: the names stand in `{EXPERIMENTS}`; remove this one")
    entries = []
    for name, own in given.items():
        at = _at(document, (EXPERIMENTS, name))
        if own is not None and not isinstance(own, dict):
            problems.append(f"{at}: is not keys with values, as in {{data: ...}}")
            continue
        one = _with_own(shared, shared_lines, name, own or {}, document.lines)
        if EXPERIMENT in (own or {}):
            problems.append(f"{at}: `{EXPERIMENT}` has no place here; its name is {name!r}")
        problems += _halved(one, name)
        entries.append(NamedExperiment(name, one))
    return entries or [NamedExperiment("", without)], problems


def _at(document: YamlDocument, keys: Keys) -> str:
    line = document.lines.get(keys)
    return f"line {line}: {dotted(keys)}" if line else dotted(keys)


def _halved(one: YamlDocument, name: str) -> list[str]:
    """Return a problem if the sweep of the experiment `name` stops some of its trainings."""
    swept = one.value.get(SWEEP)
    if not isinstance(swept, dict) or HALVING not in swept:
        return []
    where = line_of(one.lines, HALVING)
    return [
        f"{where}{SWEEP}: halving: stops experiments of a file, and {EXPERIMENTS}.{name} is one of "
        "several that may go on from one another; give the sweep a file of its own"
    ]


def _with_own(
    shared: Mapping[str, Any],
    shared_lines: Mapping[Keys, int],
    name: str,
    own: Mapping[str, Any],
    lines: Mapping[Keys, int],
) -> YamlDocument:
    """Return the file's keys with those of the entry `name` in their place, and all their lines."""
    value = copy.deepcopy(dict(shared))
    own_lines = {keys[2:]: line for keys, line in lines.items() if keys[:2] == (EXPERIMENTS, name)}
    replaced: list[Keys] = []
    _put_all(value, own, (), replaced)
    kept = {}
    for keys, line in shared_lines.items():
        if not any(keys[: len(each)] == each for each in replaced):
            kept[keys] = line
    value[EXPERIMENT] = name
    merged = {**kept, **own_lines}
    if () in own_lines:  # of the entry, whose key is the name
        merged[(EXPERIMENT,)] = merged.pop(())
    return YamlDocument(value, merged)


def _put_all(
    into: dict[str, Any], own: Mapping[str, Any], above: Keys, replaced: list[Keys]
) -> None:
    """Put the keys of `own` into `into`, section by section; `replaced` gets the keys put whole."""
    for key, value in own.items():
        here = (*above, key)
        there = into.get(key)
        if isinstance(value, dict) and isinstance(there, dict) and here not in _WHOLE:
            _put_all(there, value, here, replaced)
        else:
            into[key] = copy.deepcopy(value)
            replaced.append(here)
