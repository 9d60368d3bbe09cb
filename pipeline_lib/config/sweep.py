"""The experiments of a config file: one, or with `sweep:` one for each combination of what it varies.

Each is the file with other values in it, and is named by what differs: `NAME-lr=0.0002-seed=1`.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from pipeline_lib.config.axes import HALVING, MAX_EXPERIMENTS, SWEEP, UNSAFE, Axis, Choice, axes_of, line_of
from pipeline_lib.config.halving import Halving, read_halving
from pipeline_lib.config.strict_yaml import Document, Keys, as_written, dotted

Labels = Mapping[Keys, str]  # of the keys that differ


@dataclass(frozen=True)
class Variant:
    """One experiment: the content of a file without a sweep, and the lines of its keys. `tag` says what differs."""

    tag: str
    value: Any
    lines: Mapping[Keys, int]


@dataclass(frozen=True)
class Sweep:
    """The experiments of a file, whether the worst are stopped on the way, and what is wrong with its `sweep`.

    There is always one experiment, so that the rest of the file can be checked.
    """

    variants: Sequence[Variant]
    halving: Halving | None
    problems: Sequence[str]


def read_sweep(document: Document) -> Sweep:
    """The experiments, the last axis changing fastest. The first holds the first value of each list."""
    root = document.value
    if not isinstance(root, dict) or SWEEP not in root:
        return Sweep([Variant("", root, document.lines)], None, [])
    plain, swept = {key: value for key, value in root.items() if key != SWEEP}, root[SWEEP]
    axes, problems = axes_of(swept, document.lines)
    count = math.prod(len(axis) for axis in axes)
    if count > MAX_EXPERIMENTS:
        problems.append(f"{line_of(document.lines)}{SWEEP}: {count} experiments are more than {MAX_EXPERIMENTS}")
    halving = None
    if isinstance(swept, dict) and HALVING in swept:
        halving, wrong = read_halving(swept[HALVING])
        wrong += ["there is one experiment, and nothing to compare it with"] if axes and count == 1 else []
        problems += [f"{line_of(document.lines, HALVING)}{SWEEP}: {HALVING}: {problem}" for problem in wrong]
    found, labels = [], _labels(axes)
    for choices in product(*axes) if not problems else ():
        try:
            found.append(_variant(plain, choices, labels, document.lines))
        except LookupError as error:
            problems.append(str(error.args[0]))
    return Sweep(found or [Variant("", plain, document.lines)], halving, list(dict.fromkeys(problems)))


def _labels(axes: Sequence[Axis]) -> Labels:
    """What the keys that differ between experiments are called in names: the last word where that says which."""
    differing: list[Keys] = []
    for axis in axes:
        for keys in dict.fromkeys(one.keys for choice in axis for one in choice):
            texts = {next((one.text for one in choice if one.keys == keys), None) for choice in axis}
            differing += [keys] if len(texts) > 1 else []
    last = [keys[-1] for keys in differing]
    return {
        keys: str(keys[-1]) if last.count(keys[-1]) == 1 else UNSAFE.sub(".", dotted(keys)).strip(".")
        for keys in differing
    }


def _variant(plain: Any, choices: Sequence[Choice], labels: Labels, lines: Mapping[Keys, int]) -> Variant:
    """The file with the chosen values. Raises LookupError, with a text, where there is no such key."""
    value, places = copy.deepcopy(plain), dict(lines)
    settings = [one for choice in choices for one in choice]
    for one in settings:
        if problem := put(value, one.keys, one.value):
            raise LookupError(f"line {one.line}: {SWEEP}: {problem}")
        for below in [known for known in places if known[: len(one.keys)] == one.keys]:
            del places[below]
        places[one.keys] = one.line
    tag = "-".join(f"{labels[one.keys]}={one.text}" for one in settings if one.keys in labels)
    name = as_written(value.get("experiment"))
    if tag and isinstance(name, str):
        value["experiment"] = f"{name}-{tag}"
    return Variant(tag, value, places)


def put(root: Any, keys: Keys, value: Any) -> str | None:
    """Put `value` at `keys` into `root`, making sections that are not there; what is wrong if it cannot be."""
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
    """The problems of all experiments, given with their tags: each once, with which it is of unless it is of all."""
    seen: dict[str, list[str]] = {}
    for tag, own in problems:
        for problem in dict.fromkeys(own):
            seen.setdefault(problem, []).append(tag)
    return [f"{problem}{_of_which(tags, len(problems))}" for problem, tags in seen.items()]


def _of_which(tags: Sequence[str], count: int) -> str:
    if len(tags) == count:
        return ""
    first = tags[0] or "the values of the file"
    return f" (with {first})" if len(tags) == 1 else f" (with {first}, and {len(tags) - 1} more)"
