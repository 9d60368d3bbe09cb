"""Expand a config file with a `sweep` into its experiments.

There is one, or with `sweep:` one for each combination of its axes. Each is the file with other
values in it. Its name lists the values that differ: `NAME-lr=0.0002-seed=1`.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

from pipeline_lib.config.axes import (
    HALVING,
    MAX_EXPERIMENTS,
    MAX_VALUE_CHARS,
    SWEEP,
    UNSAFE,
    Axis,
    Choice,
    axes_of,
    line_of,
    stored,
)
from pipeline_lib.config.halving import Halving, read_halving
from pipeline_lib.config.strict_yaml import Keys, YamlDocument, as_written, dotted, undotted

Found = TypeVar("Found")

Labels = Mapping[Keys, str]  # by the keys whose values differ


@dataclass(frozen=True)
class Variant:
    """One experiment: the content of a file without a sweep, and the lines of its keys.

    `tag` says what differs.
    """

    tag: str
    value: Any
    lines: Mapping[Keys, int]


@dataclass(frozen=True)
class Sweep:
    """A file's experiments, its halving settings if it has them, and its `sweep`'s problems.

    There is always at least one experiment, so that the rest of the file can be checked.
    """

    variants: Sequence[Variant]
    halving: Halving | None
    problems: Sequence[str]


def read_sweep(document: YamlDocument) -> Sweep:
    """Return the experiments, the last axis changing fastest.

    The first has the first value of each list.
    """
    root = document.value
    if not isinstance(root, dict) or SWEEP not in root:
        return Sweep([Variant("", root, document.lines)], None, [])
    plain = {key: value for key, value in root.items() if key != SWEEP}
    swept = root[SWEEP]
    axes, problems = axes_of(swept, document.lines)
    count = math.prod(len(axis) for axis in axes)
    if count > MAX_EXPERIMENTS:
        problems.append(
            f"{line_of(document.lines)}{SWEEP}: {count} experiments are more than {MAX_EXPERIMENTS}"
        )
    halving = None
    if isinstance(swept, dict) and HALVING in swept:
        halving, wrong = read_halving(swept[HALVING])
        if axes and count == 1:
            wrong.append("needs at least two experiments, but the sweep has one")
        at = f"{line_of(document.lines, HALVING)}{SWEEP}: {HALVING}:"
        problems += [f"{at} {problem}" for problem in wrong]
    found = []
    if not problems:
        labels = _labels(axes)
        for choices in product(*axes):
            try:
                found.append(_variant(plain, choices, labels, document.lines))
            except LookupError as error:
                problems.append(str(error.args[0]))
    if not found:
        found = [Variant("", plain, document.lines)]
    return Sweep(found, halving, list(dict.fromkeys(problems)))


def _labels(axes: Sequence[Axis]) -> Labels:
    """Return the label of each differing key: its last word, or the whole key if ambiguous."""
    names: dict[Keys, Keys] = {}
    for axis in axes:
        for keys in _differing(axis):
            names[keys] = stored(keys)
    last = [name[-1] for name in names.values()]
    labels = {}
    for keys, name in names.items():
        is_clear = last.count(name[-1]) == 1
        labels[keys] = str(name[-1]) if is_clear else UNSAFE.sub(".", dotted(name)).strip(".")
    return labels


def _differing(axis: Axis) -> list[Keys]:
    """Return the keys that do not have one value in all choices of `axis`."""
    texts: dict[Keys, list[str]] = {}  # of the choices that set the key
    for choice in axis:
        for one in choice:
            texts.setdefault(one.keys, []).append(one.text)
    differing = []
    for keys, found in texts.items():
        if len(set(found)) > 1 or len(found) < len(axis):
            differing.append(keys)
    return differing


def _variant(
    plain: Any, choices: Sequence[Choice], labels: Labels, lines: Mapping[Keys, int]
) -> Variant:
    """Return the file with the chosen values.

    Raises LookupError, with the problem as text, if there is no such key.
    """
    value = copy.deepcopy(plain)
    places = dict(lines)
    settings = [one for choice in choices for one in choice]
    for one in settings:
        if problem := put(value, one.keys, one.value):
            raise LookupError(f"line {one.line}: {SWEEP}: {problem}")
        for known in list(places):
            if known[: len(one.keys)] == one.keys:
                del places[known]
        places[one.keys] = one.line
    tag = "-".join(f"{labels[one.keys]}={one.text}" for one in settings if one.keys in labels)
    name = as_written(value.get("experiment"))
    if tag and isinstance(name, str):
        value["experiment"] = f"{name}-{tag}"
    return Variant(tag, value, places)


def name_by(root: Any, tag: str, settings: Sequence[str]) -> None:
    """Let the name of the experiment `root` say `settings`, each `KEY=VALUE`, unless one names it.

    They stand before the `tag` of a sweep, and a key goes by its last word: `NAME-lr=0.0002`.
    """
    name = as_written(root.get("experiment"))
    given = [setting.partition("=") for setting in settings]
    if not isinstance(name, str) or any(key == "experiment" for key, _, _ in given):
        return
    labels = []
    for key, _, text in given:
        label = stored(undotted(key))[-1]
        labels.append(f"{label}={UNSAFE.sub('_', text).strip('_.')[:MAX_VALUE_CHARS]}")
    if tag:
        name = name.removesuffix(f"-{tag}")
        labels.append(tag)
    root["experiment"] = "-".join([name, *labels])


def put(root: Any, keys: Keys, value: Any) -> str | None:
    """Put `value` at `keys` into `root`, creating missing sections.

    Return the problem if that is impossible.
    """
    section = root
    for end, part in enumerate(keys[:-1], start=1):
        if isinstance(section, dict) and section.get(str(part)) is None:
            section[str(part)] = {}
        try:
            section = section[part]
        except (TypeError, KeyError, IndexError):
            return f"{dotted(keys[:end])}: there is no such section in the file"
    if not isinstance(section, dict) or isinstance(keys[-1], int):
        return f"{dotted(keys)}: the file has a value or a list there, and no keys"
    section[str(keys[-1])] = copy.deepcopy(value)
    return None


def collapsed(problems: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Return each distinct problem once, with its experiments' tags unless all of them have it."""
    return [f"{problem}{among}" for problem, among in having(problems)]


def having(found: Sequence[tuple[str, Sequence[Found]]]) -> list[tuple[Found, str]]:
    """Return each distinct thing found once, and in words the tags that have it; empty if all."""
    seen: dict[Found, list[str]] = {}
    for tag, own in found:
        for each in dict.fromkeys(own):
            seen.setdefault(each, []).append(tag)
    distinct = []
    for each, tags in seen.items():
        first = tags[0] or "the values of the file"
        others = "" if len(tags) == 1 else f", and {len(tags) - 1} more"
        among = "" if len(tags) == len(found) else f" (with {first}{others})"
        distinct.append((each, among))
    return distinct
