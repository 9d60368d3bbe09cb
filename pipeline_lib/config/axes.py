"""What a `sweep` varies: lists of values (a grid), a list of experiments, and random draws, each an axis.

Any of them together give every combination, as the lists of a grid do.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from pipeline_lib.config.draw import draw, range_problem
from pipeline_lib.config.strict_yaml import Keys, undotted

SWEEP, LIST, RANDOM, HALVING = "sweep", "list", "random", "halving"
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
MAX_EXPERIMENTS = 1000
_MAX_VALUE_CHARS = 24  # of a value within a name; a longer one is numbered
_EXAMPLE = "as in train.lr: [1.0e-4, 2.0e-4]"
_DRAW_EXAMPLE = "as in {experiments: 8, seed: 0, train.lr: {low: 1.0e-5, high: 1.0e-3, scale: log}}"
_OPTIONS = ("experiments", "seed")  # of random draws, beside their keys

Lines = Mapping[Keys, int]


@dataclass(frozen=True)
class Setting:
    """A value for a key, the line that it is from, and what stands for it in a name."""

    keys: Keys
    value: Any
    line: int
    text: str


Choice = tuple[Setting, ...]  # what is set together
Axis = Sequence[Choice]


def axes_of(swept: Any, lines: Lines) -> tuple[list[Axis], list[str]]:
    """The axes of a `sweep`, in the order of the file, and what is wrong with it: then there are none."""
    names = [name for name in swept if name != HALVING] if isinstance(swept, dict) else []
    if not names:
        return [], [f"{line_of(lines)}{SWEEP}: holds no keys with lists of values, {_EXAMPLE}"]
    problems = [problem for name in names for problem in _problems(name, swept[name], lines)]
    problems = problems or list(_overlaps({name: _keys_in(name, swept[name]) for name in names}, lines))
    if problems:
        return [], problems
    return [_axis(name, swept[name], lines) for name in names], []


def line_of(lines: Lines, *below: str | int) -> str:
    """`line N: ` of a key within the sweep, or of the nearest above it."""
    path: Keys = (SWEEP, *below)
    found = next((lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), None)
    return f"line {found}: " if found else ""


def _axis(name: str, given: Any, lines: Lines) -> Axis:
    if name == LIST:
        return _listed(given, lines)
    return _drawn(given, lines) if name == RANDOM else _grid(name, given, lines)


def _grid(name: str, values: Sequence[Any], lines: Lines) -> Axis:
    keys, texts = undotted(name), _texts(values)
    return [(Setting(keys, value, lines[SWEEP, name, index], texts[index]),) for index, value in enumerate(values)]


def _listed(entries: Sequence[Mapping[str, Any]], lines: Lines) -> Axis:
    texts = {name: _texts_of(entry[name] for entry in entries if name in entry) for name in _keys_in(LIST, entries)}
    return [
        tuple(
            Setting(undotted(name), value, lines[SWEEP, LIST, index, name], texts[name][json.dumps(value)])
            for name, value in entry.items()
        )
        for index, entry in enumerate(entries)
    ]


def _drawn(random: Mapping[str, Any], lines: Lines) -> Axis:
    """Draws that come out alike are one experiment."""
    names, seed = _keys_in(RANDOM, random), random.get("seed", 0)
    draws = [{name: draw(seed, name, index, random[name]) for name in names} for index in range(random["experiments"])]
    draws = list({json.dumps(one): one for one in draws}.values())
    texts = {
        name: _texts_of(random[name] if isinstance(random[name], list) else (one[name] for one in draws))
        for name in names
    }
    return [
        tuple(
            Setting(undotted(name), value, lines[SWEEP, RANDOM, name], texts[name][json.dumps(value)])
            for name, value in one.items()
        )
        for one in draws
    ]


def _problems(name: str, given: Any, lines: Lines) -> Iterator[str]:
    if name == LIST:
        return _list_problems(given, lines)
    return _random_problems(given, lines) if name == RANDOM else _grid_problems(name, given, lines)


def _grid_problems(name: str, values: Any, lines: Lines) -> Iterator[str]:
    at, keys = f"{line_of(lines, name)}{SWEEP}: {name}:", undotted(name)
    if isinstance(values, dict):
        inner = next(iter(values), "lr")
        yield f"{at} write the whole key and a list of values, as in {name}.{inner}: [...]"
    elif (problem := _key_problem(keys)) or (problem := _values_problem(values)):
        yield f"{at} {problem}"


def _list_problems(entries: Any, lines: Lines) -> Iterator[str]:
    if not isinstance(entries, list) or not entries:
        yield f"{line_of(lines, LIST)}{SWEEP}: {LIST}: holds no experiments, as in [{{train.lr: 1.0e-4}}]"
        return
    seen: dict[str, int] = {}
    for index, entry in enumerate(entries):
        at = f"{line_of(lines, LIST, index)}{SWEEP}: {LIST}[{index}]:"
        if not isinstance(entry, dict):
            yield f"{at} {json.dumps(entry)} is not keys with values, as in {{train.lr: 1.0e-4}}"
            continue
        for name in entry:
            if problem := _key_problem(undotted(name)):
                yield f"{line_of(lines, LIST, index, name)}{SWEEP}: {LIST}[{index}]: {name}: {problem}"
        first = seen.setdefault(json.dumps(entry, sort_keys=True), index)
        if first != index:
            yield f"{at} the same as {LIST}[{first}]"


def _random_problems(random: Any, lines: Lines) -> Iterator[str]:
    at = f"{line_of(lines, RANDOM)}{SWEEP}: {RANDOM}:"
    if not isinstance(random, dict) or not _keys_in(RANDOM, random):
        yield f"{at} holds no keys to draw values of, {_DRAW_EXAMPLE}"
        return
    for option, least in (("experiments", 1), ("seed", 0)):
        value = random.get(option, None if least else 0)
        if value is None:
            yield f"{at} {option}: missing; how many are drawn, up to {MAX_EXPERIMENTS}"
        elif isinstance(value, bool) or not isinstance(value, int) or value < least:
            told = f"{json.dumps(value)} is not a whole number of at least {least}"
            yield f"{line_of(lines, RANDOM, option)}{SWEEP}: {RANDOM}: {option}: {told}"
        elif option == "experiments" and value > MAX_EXPERIMENTS:
            told = f"{value} experiments are more than {MAX_EXPERIMENTS}"
            yield f"{line_of(lines, RANDOM, option)}{SWEEP}: {RANDOM}: {option}: {told}"
    for name in _keys_in(RANDOM, random):
        at, values = f"{line_of(lines, RANDOM, name)}{SWEEP}: {RANDOM}: {name}:", random[name]
        problem = range_problem(values) if isinstance(values, dict) else _values_problem(values, "or a range")
        if problem := _key_problem(undotted(name), _OPTIONS) or problem:
            yield f"{at} {problem}"


def _key_problem(keys: Keys, options: Sequence[str] = (LIST, RANDOM, HALVING)) -> str | None:
    if not keys or isinstance(keys[-1], int):
        return "not a key of a section, such as train.lr"
    if len(keys) > 1:
        return None
    close = get_close_matches(str(keys[0]), options, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else ""
    return f"a section or a name; sweep one of its keys, as in train.lr{meant}"


def _values_problem(values: Any, other: str = "") -> str | None:
    if not isinstance(values, list) or not values:
        return f"{json.dumps(values)} is not a list of values{other and f' {other}'}"
    if len({json.dumps(value) for value in values}) < len(values):
        return "holds a value twice"
    return None


def _keys_in(form: str, given: Any) -> list[str]:
    """The names of the keys that one form sets."""
    if form == LIST:
        return list(dict.fromkeys(name for entry in given for name in entry))
    if form == RANDOM:
        return [name for name in given if name not in _OPTIONS]
    return [form]


def _overlaps(forms: Mapping[str, Sequence[str]], lines: Lines) -> Iterator[str]:
    """Keys that are set twice, by two forms, or one within another."""
    named = [(form, name) for form, names in forms.items() for name in names]
    paths = {name: undotted(name) for _, name in named}
    for form, name in named:
        keys, where = paths[name], name if form == name else f"{form}: {name}"
        above = [
            other
            for form_of_other, other in named
            if (form_of_other, other) != (form, name) and keys[: len(paths[other])] == paths[other]
        ]
        at = f"{line_of(lines, form) if form != name else line_of(lines, name)}{SWEEP}: {where}:"
        if above and above[0] != name:
            yield f"{at} lies within {above[0]}, which is swept too; keep one of them"
        elif above and form != name:
            yield f"{at} is swept twice; keep one of them"


def _texts_of(values: Iterable[Any]) -> dict[str, str]:
    """The text of each value, by its JSON."""
    distinct = {json.dumps(value): value for value in values}
    return dict(zip(distinct, _texts(list(distinct.values())), strict=True))


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
    return UNSAFE.sub("_", text).strip("_.")
