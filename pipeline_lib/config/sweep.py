"""The experiments of a config file: one, or with `sweep:` one for each combination of the values that it lists.

Each is the file with other values in it, and is named by what differs: `NAME-lr=0.0002-seed=1`.
"""

import copy
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from pipeline_lib.config.strict_yaml import Document, Keys, dotted, undotted

SWEEP = "sweep"
MAX_EXPERIMENTS = 1000
_MAX_VALUE_CHARS = 24  # of a value within a name; a longer one is numbered
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Axis:
    """A key and the values that it takes, with the line of each; `label` and `texts` stand for them in names."""

    keys: Keys
    values: Sequence[Any]
    lines: Sequence[int]
    label: str
    texts: Sequence[str]


@dataclass(frozen=True)
class Variant:
    """One experiment: the content of a file without a sweep, and the lines of its keys. `tag` says what differs."""

    tag: str
    value: Any
    lines: Mapping[Keys, int]


def variants(document: Document) -> tuple[list[Variant], list[str]]:
    """The experiments of a file, the last axis changing fastest, and what is wrong with its `sweep`.

    There is always one, so that the rest of the file can be checked. The first holds the first value of each list.
    """
    root = document.value
    if not isinstance(root, dict) or SWEEP not in root:
        return [Variant("", root, document.lines)], []
    plain = {key: value for key, value in root.items() if key != SWEEP}
    axes, problems = _axes(root[SWEEP], document.lines)
    count = math.prod(len(axis.values) for axis in axes)
    if count > MAX_EXPERIMENTS:
        problems.append(f"{_line(document.lines)}{SWEEP}: {count} experiments are more than {MAX_EXPERIMENTS}")
    found = []
    for choice in product(*(range(len(axis.values)) for axis in axes)) if not problems else ():
        try:
            found.append(_variant(plain, axes, choice, document.lines))
        except LookupError as error:
            problems.append(str(error.args[0]))
    return found or [Variant("", plain, document.lines)], list(dict.fromkeys(problems))


def _axes(swept: Any, lines: Mapping[Keys, int]) -> tuple[list[Axis], list[str]]:
    if not isinstance(swept, dict) or not swept:
        return [], [f"{_line(lines)}{SWEEP}: holds no keys with lists of values, as in train.lr: [1.0e-4, 2.0e-4]"]
    problems = [f"{_line(lines, name)}{problem}" for name in swept if (problem := _problem(name, swept))]
    if problems:
        return [], problems
    names = {name: undotted(name) for name in swept}
    differing = [keys[-1] for name, keys in names.items() if len(swept[name]) > 1]
    axes = []
    for name, keys in names.items():
        label = str(keys[-1]) if differing.count(keys[-1]) <= 1 else _UNSAFE.sub(".", dotted(keys)).strip(".")
        at = [lines[SWEEP, name, index] for index in range(len(swept[name]))]
        axes.append(Axis(keys, swept[name], at, label, _texts(swept[name])))
    return axes, []


def _problem(name: str, swept: Mapping[str, Any]) -> str | None:
    """What is wrong with one key of a sweep, or with its values."""
    values, keys = swept[name], undotted(name)
    where = f"{SWEEP}: {name}:"
    if isinstance(values, dict):
        inner = next(iter(values), "lr")
        return f"{where} write the whole key and a list of values, as in {name}.{inner}: [...]"
    if not keys or isinstance(keys[-1], int):
        return f"{where} not a key of a section, such as train.lr"
    if len(keys) == 1:
        return f"{where} a section or a name; sweep one of its keys, as in train.lr"
    if not isinstance(values, list) or not values:
        return f"{where} {json.dumps(values)} is not a list of values"
    if len({json.dumps(value) for value in values}) < len(values):
        return f"{where} holds a value twice"
    above = [other for other in swept if other != name and keys[: len(undotted(other))] == undotted(other) != ()]
    return f"{where} lies within {above[0]}, which is swept too; keep one of them" if above else None


def _variant(plain: Any, axes: Sequence[Axis], choice: Sequence[int], lines: Mapping[Keys, int]) -> Variant:
    """The file with the chosen value of each axis. Raises LookupError, with a text, where there is no such key."""
    value, places = copy.deepcopy(plain), dict(lines)
    for axis, index in zip(axes, choice, strict=True):
        if problem := put(value, axis.keys, axis.values[index]):
            raise LookupError(f"line {axis.lines[index]}: {SWEEP}: {problem}")
        for below in [known for known in places if known[: len(axis.keys)] == axis.keys]:
            del places[below]
        places[axis.keys] = axis.lines[index]
    differing = [(axis, index) for axis, index in zip(axes, choice, strict=True) if len(axis.values) > 1]
    tag = "-".join(f"{axis.label}={axis.texts[index]}" for axis, index in differing)
    if tag and isinstance(value.get("experiment"), str):
        value["experiment"] += f"-{tag}"
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
    return f" (with {tags[0]})" if len(tags) == 1 else f" (with {tags[0]}, and {len(tags) - 1} more)"


def _texts(values: Sequence[Any]) -> list[str]:
    """The values as parts of a file name, each another; numbered where they are too long, or come out alike."""
    texts = [_text(value) for value in values]
    is_legible = all(0 < len(text) <= _MAX_VALUE_CHARS for text in texts)
    is_clear = is_legible and len({text.lower() for text in texts}) == len(texts)
    return texts if is_clear else [str(number) for number in range(1, len(texts) + 1)]


def _text(value: Any) -> str:
    if value is None:
        return "none"
    text = value if isinstance(value, str) else json.dumps(value).replace("e+", "e")
    return _UNSAFE.sub("_", text).strip("_.")


def _line(lines: Mapping[Keys, int], *below: str) -> str:
    line = lines.get((SWEEP, *below), lines.get((SWEEP,)))
    return f"line {line}: " if line else ""
