"""Expand a config file with a `sweep` into its experiments."""

import copy
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, TypeVar

from pipeline_lib.config.halving import Halving, read_halving
from pipeline_lib.config.strict_yaml import Keys, YamlDocument, as_written, dotted, undotted
from pipeline_lib.config.train import RENAMED
from pipeline_lib.core.text import did_you_mean

Found = TypeVar("Found")

# Random values for a sweep. Each is a pure function of the seed, the name of its key and the index
# of its experiment: a further experiment or key does not change earlier draws. Values have few
# digits, so they are readable in names and the same on every machine, however its `exp` rounds.

DIGITS = 3
SCALES = ("linear", "log")
_RANGE_KEYS = ("low", "high", "scale")


def draw(seed: int, name: str, index: int, choices: Any) -> Any:
    """Return the key `name`'s value in experiment `index`, from a list or a valid range."""
    digest = hashlib.sha256(json.dumps([seed, name, index]).encode()).digest()
    at = (int.from_bytes(digest[:8], "big") >> 11) / (1 << 53)  # in [0, 1)
    if isinstance(choices, Sequence):
        return choices[int(at * len(choices))]
    low = choices["low"]
    high = choices["high"]
    is_log = choices.get("scale") == "log"
    is_whole = isinstance(low, int) and isinstance(high, int)
    if is_whole and not is_log:
        return low + int(at * (high - low + 1))
    value = low * math.exp(at * math.log(high / low)) if is_log else low + at * (high - low)
    value = round(value) if is_whole else float(f"{value:.{DIGITS}g}")
    return min(max(value, low), high)


def range_problem(choices: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a range `{low: .., high: .., scale: ..}`; None if it is valid."""
    if unknown := [key for key in choices if key not in _RANGE_KEYS]:
        return f"unknown key {unknown[0]!r}{did_you_mean(str(unknown[0]), _RANGE_KEYS)}"
    if missing := [key for key in ("low", "high") if key not in choices]:
        return (
            f"{' and '.join(missing)} missing; a range is {{low: 1.0e-5, high: 1.0e-3, scale: log}}"
        )
    low = choices["low"]
    high = choices["high"]
    scale = choices.get("scale", "linear")
    for value in (low, high):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return f"{json.dumps(value)} is not a number"
    if scale not in SCALES:
        return f"scale {json.dumps(scale)} is not one of {', '.join(SCALES)}"
    if low >= high:
        return f"low {low} is not below high {high}"
    return (
        f"scale log, and low is {low}; it has to be above 0"
        if scale == "log" and low <= 0
        else None
    )


# The axes of a `sweep`: lists of values (a grid), a list of experiments, and random draws.
# Several axes together give every combination.

SWEEP, LIST, RANDOM, HALVING = "sweep", "list", "random", "halving"
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
MAX_EXPERIMENTS = 1000
_MAX_VALUE_CHARS = 24  # of a value in a name; longer values are numbered
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
    names = [name for name in swept if name != HALVING] if isinstance(swept, dict) else []
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
    problems = problems or list(
        _overlaps({name: _keys_in(name, swept[name]) for name in names}, lines)
    )
    if problems:
        return [], problems
    axes: list[Axis] = []
    for name in names:
        if name == LIST:
            axes.append(_listed(swept[name], lines))
        else:
            axes.append(
                _drawn(swept[name], lines) if name == RANDOM else _grid(name, swept[name], lines)
            )
    return axes, []


def stored(keys: Keys) -> Keys:
    """Return a key under the name that specs and names of experiments have for it, see RENAMED."""
    return next(((keys[0], name) for name, new in RENAMED.items() if keys == ("train", new)), keys)


def line_of(lines: Lines, *below: str | int) -> str:
    """Return `line N: ` for a sweep's key or the nearest key above it; empty if unknown."""
    path: Keys = (SWEEP, *below)
    found = next(
        (lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in lines), None
    )
    return f"line {found}: " if found else ""


def _grid(name: str, values: Sequence[Any], lines: Lines) -> Axis:
    keys = undotted(name)
    texts = _texts(values)
    return [
        (SweepSetting(keys, value, lines[SWEEP, name, index], texts[index]),)
        for index, value in enumerate(values)
    ]


def _listed(entries: Sequence[Mapping[str, Any]], lines: Lines) -> Axis:
    values = {
        name: [entry[name] for entry in entries if name in entry]
        for name in _keys_in(LIST, entries)
    }
    at = [
        {name: lines[SWEEP, LIST, index, name] for name in entry}
        for index, entry in enumerate(entries)
    ]
    return _choices(entries, values, at)


def _drawn(random: Mapping[str, Any], lines: Lines) -> Axis:
    """Return the distinct draws: equal draws are one experiment."""
    names = _keys_in(RANDOM, random)
    seed = random.get("seed", 0)
    draws = [
        {name: draw(seed, dotted(stored(undotted(name))), index, random[name]) for name in names}
        for index in range(random["experiments"])
    ]
    draws = list({json.dumps(one): one for one in draws}.values())
    values = {
        name: random[name] if isinstance(random[name], list) else [one[name] for one in draws]
        for name in names
    }
    return _choices(
        draws, values, [{name: lines[SWEEP, RANDOM, name] for name in names}] * len(draws)
    )


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
    return [
        tuple(
            SweepSetting(undotted(name), value, own[name], texts[name][json.dumps(value)])
            for name, value in entry.items()
        )
        for entry, own in zip(entries, at, strict=True)
    ]


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
        yield (
            f"{line_of(lines, LIST)}{SWEEP}: {LIST}: holds no experiments, as in [{{train.lr: "
            f"1.0e-4}}]"
        )
        return
    seen: dict[str, int] = {}
    for index, entry in enumerate(entries):
        at = f"{line_of(lines, LIST, index)}{SWEEP}: {LIST}[{index}]:"
        if not isinstance(entry, dict):
            yield f"{at} {json.dumps(entry)} is not keys with values, as in {{train.lr: 1.0e-4}}"
            continue
        for name in entry:
            if problem := _key_problem(undotted(name)):
                yield (
                    f"{line_of(lines, LIST, index, name)}{SWEEP}: {LIST}[{index}]: {name}: "
                    f"{problem}"
                )
        first = seen.setdefault(json.dumps(entry, sort_keys=True), index)
        if first != index:
            yield f"{at} the same as {LIST}[{first}]"


def _random_problems(random: Any, lines: Lines) -> Iterator[str]:
    if not isinstance(random, dict) or not _keys_in(RANDOM, random):
        yield (
            f"{line_of(lines, RANDOM)}{SWEEP}: {RANDOM}: holds no keys to draw values of, "
            f"{_DRAW_EXAMPLE}"
        )
        return
    problems: dict[str, str | None] = {}
    for option, least in (("experiments", 1), ("seed", 0)):
        value = random.get(option, None if least else 0)
        if value is None:
            problems[option] = f"missing; how many are drawn, up to {MAX_EXPERIMENTS}"
        elif isinstance(value, bool) or not isinstance(value, int) or value < least:
            problems[option] = f"{json.dumps(value)} is not a whole number of at least {least}"
        elif option == "experiments" and value > MAX_EXPERIMENTS:
            problems[option] = f"{value} experiments are more than {MAX_EXPERIMENTS}"
    for name in _keys_in(RANDOM, random):
        values = random[name]
        problem = (
            range_problem(values)
            if isinstance(values, dict)
            else _values_problem(values, "or a range")
        )
        problems[name] = _key_problem(undotted(name), _OPTIONS) or problem
    for name, problem in problems.items():
        if problem:
            yield f"{line_of(lines, RANDOM, name)}{SWEEP}: {RANDOM}: {name}: {problem}"


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
        return f"{json.dumps(values)} is not a list of values{other and f' {other}'}"
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
    paths = {name: undotted(name) for _, name in named}
    for form, name in named:
        keys = paths[name]
        where = name if form == name else f"{form}: {name}"
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


def _texts(values: Sequence[Any]) -> list[str]:
    """Return distinct texts for file names; numbers from 1 if any are empty, too long or alike."""
    texts = []
    for value in values:
        text = value if isinstance(value, str) else json.dumps(value).replace("e+", "e")
        texts.append("none" if value is None else UNSAFE.sub("_", text).strip("_."))
    is_legible = all(0 < len(text) <= _MAX_VALUE_CHARS for text in texts)
    is_clear = is_legible and len({text.lower() for text in texts}) == len(texts)
    return texts if is_clear else [str(number) for number in range(1, len(texts) + 1)]


# The experiments of a config file: one, or with `sweep:` one for each combination of its axes. Each
# is the file with other values in it. Its name lists the values that differ:
# `NAME-lr=0.0002-seed=1`.

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
        wrong += (
            ["needs at least two experiments, but the sweep has one"] if axes and count == 1 else []
        )
        problems += [
            f"{line_of(document.lines, HALVING)}{SWEEP}: {HALVING}: {problem}" for problem in wrong
        ]
    found = []
    labels = _labels(axes)
    for choices in product(*axes) if not problems else ():
        try:
            found.append(_variant(plain, choices, labels, document.lines))
        except LookupError as error:
            problems.append(str(error.args[0]))
    return Sweep(
        found or [Variant("", plain, document.lines)], halving, list(dict.fromkeys(problems))
    )


def _labels(axes: Sequence[Axis]) -> Labels:
    """Return the label of each differing key: its last word, or the whole key if ambiguous."""
    differing: list[Keys] = []
    for axis in axes:
        for keys in dict.fromkeys(one.keys for choice in axis for one in choice):
            texts = {
                next((one.text for one in choice if one.keys == keys), None) for choice in axis
            }
            differing += [keys] if len(texts) > 1 else []
    names = {keys: stored(keys) for keys in differing}
    last = [name[-1] for name in names.values()]
    return {
        keys: str(name[-1])
        if last.count(name[-1]) == 1
        else UNSAFE.sub(".", dotted(name)).strip(".")
        for keys, name in names.items()
    }


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
        for below in [known for known in places if known[: len(one.keys)] == one.keys]:
            del places[below]
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
        labels.append(f"{label}={UNSAFE.sub('_', text).strip('_.')[:_MAX_VALUE_CHARS]}")
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
