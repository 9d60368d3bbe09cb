"""The axes of a `sweep`: lists of values (a grid), a list of experiments, and random draws.

Several axes together give every combination.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline_lib.config.draws import draw, range_problem
from pipeline_lib.config.strict_yaml import Keys, at_nearest, dotted, undotted
from pipeline_lib.config.train import RENAMED
from pipeline_lib.core.text import did_you_mean

SWEEP, LIST, RANDOM, HALVING = "sweep", "list", "random", "halving"
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
MAX_EXPERIMENTS = 1000
MAX_VALUE_CHARS = 24  # of a value in a name; longer values are numbered
_EXAMPLE = "as in train.lr: [1.0e-4, 2.0e-4]"
_DRAW_EXAMPLE = "as in {experiments: 8, seed: 0, train.lr: {low: 1.0e-5, high: 1.0e-3, scale: log}}"
_OPTIONS = ("experiments", "seed")  # of random draws; every other name there is a key to draw

Lines = Mapping[Keys, int]


@dataclass(frozen=True)
class SweepSetting:
    """A value for a key, the line it comes from, and the text that stands for it in a name."""

    keys: Keys
    value: Any
    line: int
    text: str


Choice = tuple[SweepSetting, ...]  # settings that apply together
Axis = Sequence[Choice]


def axes_of(swept: Any, lines: Lines) -> tuple[list[Axis], list[str]]:
    """Return the axes of a `sweep`, in file order, and its problems; with problems, no axes."""
    forms = swept if isinstance(swept, dict) else {}
    names = [name for name in forms if name != HALVING]
    if not names:
        return [], [f"{line_of(lines)}{SWEEP}: holds no keys with lists of values, {_EXAMPLE}"]
    problems: list[str] = []
    for name in names:
        if name == LIST:
            problems += _list_problems(swept[name], lines)
        elif name == RANDOM:
            problems += _random_problems(swept[name], lines)
        else:
            problems += _grid_problems(name, swept[name], lines)
    if not problems:
        problems += _overlaps({name: _keys_in(name, swept[name]) for name in names}, lines)
    if problems:
        return [], problems
    return [_axis(name, swept[name], lines) for name in names], []


def _axis(name: str, given: Any, lines: Lines) -> Axis:
    """Return the axis of one valid form: `given` is the value of `name` in the `sweep`."""
    if name == LIST:
        return _listed(given, lines)
    if name == RANDOM:
        return _drawn(given, lines)
    return _grid(name, given, lines)


def stored(keys: Keys) -> Keys:
    """Return a key under the name that specs and names of experiments have for it, see RENAMED."""
    for name, new in RENAMED.items():
        if keys == ("train", new):
            return ("train", name)
    return keys


def line_of(lines: Lines, *below: str | int) -> str:
    """Return `line N: ` for a sweep's key or the nearest key above it; empty if unknown."""
    found = at_nearest(lines, (SWEEP, *below))
    return f"line {found}: " if found else ""


def _grid(name: str, values: Sequence[Any], lines: Lines) -> Axis:
    keys = undotted(name)
    texts = _texts(values)
    return [
        (SweepSetting(keys, value, lines[SWEEP, name, index], texts[index]),)
        for index, value in enumerate(values)
    ]


def _listed(entries: Sequence[Mapping[str, Any]], lines: Lines) -> Axis:
    values = {}
    for name in _keys_in(LIST, entries):
        values[name] = [entry[name] for entry in entries if name in entry]
    at = []
    for index, entry in enumerate(entries):
        at.append({name: lines[SWEEP, LIST, index, name] for name in entry})
    return _choices(entries, values, at)


def _drawn(random: Mapping[str, Any], lines: Lines) -> Axis:
    """Return the distinct draws: equal draws are one experiment."""
    names = _keys_in(RANDOM, random)
    seed = random.get("seed", 0)
    distinct: dict[str, dict[str, Any]] = {}
    for index in range(random["experiments"]):
        drawn = {}
        for name in names:
            drawn[name] = draw(seed, dotted(stored(undotted(name))), index, random[name])
        distinct[json.dumps(drawn)] = drawn
    draws = list(distinct.values())
    values = {}
    for name in names:
        is_list = isinstance(random[name], list)
        values[name] = random[name] if is_list else [drawn[name] for drawn in draws]
    at = {name: lines[SWEEP, RANDOM, name] for name in names}
    return _choices(draws, values, [at] * len(draws))


def _choices(
    entries: Sequence[Mapping[str, Any]],
    values: Mapping[str, Sequence[Any]],
    at: Sequence[Mapping[str, int]],
) -> Axis:
    """Return a choice for each entry.

    `values` are those that each key can have; `at` has the line of each setting.
    """
    texts = {}
    for name, possible in values.items():
        distinct = {json.dumps(value): value for value in possible}
        texts[name] = dict(zip(distinct, _texts(list(distinct.values())), strict=True))
    choices = []
    for entry, own in zip(entries, at, strict=True):
        settings = []
        for name, value in entry.items():
            text = texts[name][json.dumps(value)]
            settings.append(SweepSetting(undotted(name), value, own[name], text))
        choices.append(tuple(settings))
    return choices


def _grid_problems(name: str, values: Any, lines: Lines) -> Iterator[str]:
    at = f"{line_of(lines, name)}{SWEEP}: {name}:"
    keys = undotted(name)
    if isinstance(values, dict):
        inner = next(iter(values), "lr")
        yield f"{at} write the whole key and a list of values, as in {name}.{inner}: [...]"
    elif (problem := _key_problem(keys)) or (problem := _values_problem(values)):
        yield f"{at} {problem}"


def _list_problems(entries: Any, lines: Lines) -> Iterator[str]:
    if not isinstance(entries, list) or not entries:
        at = f"{line_of(lines, LIST)}{SWEEP}: {LIST}:"
        yield f"{at} holds no experiments, as in [{{train.lr: 1.0e-4}}]"
        return
    seen: dict[str, int] = {}
    for index, entry in enumerate(entries):
        at = f"{line_of(lines, LIST, index)}{SWEEP}: {LIST}[{index}]:"
        if not isinstance(entry, dict):
            yield f"{at} {json.dumps(entry)} is not keys with values, as in {{train.lr: 1.0e-4}}"
            continue
        for name in entry:
            if problem := _key_problem(undotted(name)):
                line = line_of(lines, LIST, index, name)
                yield f"{line}{SWEEP}: {LIST}[{index}]: {name}: {problem}"
        first = seen.setdefault(json.dumps(entry, sort_keys=True), index)
        if first != index:
            yield f"{at} the same as {LIST}[{first}]"


def _random_problems(random: Any, lines: Lines) -> Iterator[str]:
    if not isinstance(random, dict) or not _keys_in(RANDOM, random):
        at = f"{line_of(lines, RANDOM)}{SWEEP}: {RANDOM}:"
        yield f"{at} holds no keys to draw values of, {_DRAW_EXAMPLE}"
        return
    problems = {
        "experiments": _count_problem(random.get("experiments")),
        "seed": _whole_problem(random.get("seed", 0), least=0),
    }
    for name in _keys_in(RANDOM, random):
        values = random[name]
        if isinstance(values, dict):
            problem = range_problem(values)
        else:
            problem = _values_problem(values, "or a range")
        problems[name] = _key_problem(undotted(name), _OPTIONS) or problem
    for name, problem in problems.items():
        if problem:
            yield f"{line_of(lines, RANDOM, name)}{SWEEP}: {RANDOM}: {name}: {problem}"


def _count_problem(experiments: Any) -> str | None:
    if experiments is None:
        return f"missing; how many are drawn, up to {MAX_EXPERIMENTS}"
    if problem := _whole_problem(experiments, least=1):
        return problem
    if experiments > MAX_EXPERIMENTS:
        return f"{experiments} experiments are more than {MAX_EXPERIMENTS}"
    return None


def _whole_problem(value: Any, least: int) -> str | None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        return f"{json.dumps(value)} is not a whole number of at least {least}"
    return None


def _key_problem(keys: Keys, options: Sequence[str] = (LIST, RANDOM, HALVING)) -> str | None:
    if not keys or isinstance(keys[-1], int):
        return "not a key of a section, such as train.lr"
    if len(keys) > 1:
        return None
    return (
        "a section or a name; sweep one of its keys, as in "
        f"train.lr{did_you_mean(str(keys[0]), options)}"
    )


def _values_problem(values: Any, other: str = "") -> str | None:
    if not isinstance(values, list) or not values:
        return f"{json.dumps(values)} is not a list of values {other}".rstrip()
    if len({json.dumps(value) for value in values}) < len(values):
        return "holds a value twice"
    return None


def _keys_in(form: str, given: Any) -> list[str]:
    """Return the names of the keys that one form sets."""
    if form == LIST:
        return list(dict.fromkeys(name for entry in given for name in entry))
    if form == RANDOM:
        return [name for name in given if name not in _OPTIONS]
    return [form]


def _overlaps(forms: Mapping[str, Sequence[str]], lines: Lines) -> Iterator[str]:
    """Yield a problem for each key that is set by two forms, or lies within another swept key."""
    named = [(form, name) for form, names in forms.items() for name in names]
    for form, name in named:
        others = [other for other in named if other != (form, name)]
        above = [other for _, other in others if _is_within(name, other)]
        where = name if form == name else f"{form}: {name}"
        at = f"{line_of(lines, form)}{SWEEP}: {where}:"
        if above and above[0] != name:
            yield f"{at} lies within {above[0]}, which is swept too; keep one of them"
        elif above and form != name:
            yield f"{at} is swept twice; keep one of them"


def _is_within(name: str, other: str) -> bool:
    """Return whether `name` is the key `other`, or one below it."""
    above = undotted(other)
    return undotted(name)[: len(above)] == above


def _texts(values: Sequence[Any]) -> list[str]:
    """Return distinct texts for file names; numbers from 1 if any are empty, too long or alike."""
    texts = []
    for value in values:
        text = value if isinstance(value, str) else json.dumps(value).replace("e+", "e")
        texts.append("none" if value is None else UNSAFE.sub("_", text).strip("_."))
    is_legible = all(0 < len(text) <= MAX_VALUE_CHARS for text in texts)
    if is_legible and len({text.lower() for text in texts}) == len(texts):
        return texts
    return [str(number) for number in range(1, len(texts) + 1)]
