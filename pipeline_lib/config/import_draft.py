"""A config in the making, and its account: what became of each key of the imported files.

Keys of several tools that mean the same are gathered under one name, that of transformers'
TrainingArguments where it has one: `optimizer.params.lr` of a DeepSpeed JSON is `learning_rate`. So
files that contradict each other are found, and a value is converted in one place, whatever file it
stands in.
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pipeline_lib.config.other_tools import NO_KEY, OUR_KEY, spelled
from pipeline_lib.config.schema import Config
from pipeline_lib.config.section import fields_of
from pipeline_lib.config.train import AUTO, LinearName
from pipeline_lib.core.text import MASK, did_you_mean, shortened

MOST = 1e15  # every number that can be meant is smaller
VALUE_CHARS = 60
# keys that end so hold credentials
SECRETS = ("token", "api_key", "secret", "password", "webhook_url")

Values = Mapping[str, Any]  # our keys, as `train.lr`, and their values


class AccountPart(StrEnum):
    """The parts of the account."""

    TAKEN = "taken over"
    CHANGED = "changed"
    NONE = "without equivalent"


@dataclass(frozen=True)
class Given:
    """A key as it stands in a file: `name` with dots where it is nested."""

    file: str
    name: str
    value: Any

    def __str__(self) -> str:
        if self.value is not None and self.name.lower().endswith(SECRETS):
            return f"{self.name}: {MASK}"
        return f"{self.name}: {shown(self.value)}"


@dataclass(frozen=True)
class Row:
    """A line of the account: keys, or a default that applies `there`, and their result here."""

    part: AccountPart
    keys: tuple[Given, ...]
    there: str
    here: str
    why: str


@dataclass
class Draft:
    """The keys that were found, by common name, and what was made of them so far."""

    given: dict[str, list[Given]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)  # of our keys: `my.json: learning_rate`
    problems: list[str] = field(default_factory=list)
    their_names: Mapping[str, str] = field(default_factory=dict)  # of keys that no file gives

    def add(self, key: str, given: Given) -> None:
        """Note that a file gives `key`, a common name.

        Contradicting values of several files are a problem.
        """
        others = self._with_values(key)
        if _is_value(given.value) and others and others[0].value != given.value:
            text = f"{given.file}: {given}: contradicts {others[0].file}: {others[0]}"
            self.problems.append(f"{text}; correct one of the files")
        self.given.setdefault(key, []).append(given)

    def called(self, key: str) -> str:
        """Return what the files or their tool call `key`, a common name."""
        given = self.given.get(key)
        return given[0].name if given else self.their_names.get(key, key)

    def has(self, key: str) -> bool:
        """Return whether a file gives `key` a value that is neither null nor `auto`."""
        return bool(self._with_values(key))

    def value(self, key: str, default: Any = None) -> Any:
        """Return the value of `key`, of whatever type; `default` if none is given."""
        found = self._with_values(key)
        return found[0].value if found else default

    def _with_values(self, key: str) -> list[Given]:
        """Return what files give under `key`, without null and `auto`; the first decides."""
        return [one for one in self.given.get(key, []) if _is_value(one.value)]

    def number(self, key: str, default: float | None = None) -> float | None:
        """Return the finite number under `key`, even as text, as `1e-4` is in some YAMLs."""
        value = self.value(key, default)
        if isinstance(value, str):
            with suppress(ValueError):
                value = float(value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MOST:
            self._refuse(key, f"a number up to {MOST:g}")
            return default
        return int(value) if value == int(value) else float(value)

    def whole(self, key: str, default: int | None = None) -> int | None:
        """Return the whole number under `key`."""
        value = self.number(key, default)
        if value is None or isinstance(value, int):
            return value
        self._refuse(key, "a whole number")
        return default

    def truth(self, key: str, default: bool = False) -> bool:
        """Return the truth value under `key`; `yes` and `no` count, as in YAML 1.1.

        Other tools read that version.
        """
        value = self.value(key, default)
        word = str(value).lower()
        if isinstance(value, bool) or word in ("true", "false", "yes", "no", "on", "off"):
            return word in ("true", "yes", "on")
        self._refuse(key, "true or false")
        return default

    def text(self, key: str, default: str | None = None) -> str | None:
        """Return the text under `key`."""
        value = self.value(key, default)
        if value is None or isinstance(value, str):
            return value
        self._refuse(key, "text")
        return default

    def words(self, key: str) -> list[str]:
        """Return the words under `key`: a list, or a text with commas."""
        value = self.value(key, [])
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
            self._refuse(key, "words with commas between them")
            return []
        return [item.strip() for item in items if item.strip()]

    def _refuse(self, key: str, wanted: str) -> None:
        one = self._with_values(key)[0]
        problem = f"{one.file}: {one.name}: {shown(one.value)} is not {wanted}"
        if problem not in self.problems:
            self.problems.append(problem)

    def taken(self, keys: str, values: Values | None = None, why: str = "") -> None:
        """Account for `keys`, words: what they say holds here by `values`, or without any."""
        self._account(AccountPart.TAKEN, keys, values or {}, why)

    def changed(self, keys: str, values: Values | None, why: str) -> None:
        """Account for `keys`: `values` do not say the same, or not in the same way."""
        self._account(AccountPart.CHANGED, keys, values or {}, why)

    def without(self, keys: str, why: str) -> None:
        """Account for `keys`, which have no equivalent here."""
        self._account(AccountPart.NONE, keys, {}, why)

    def default(self, key: str, values: Values, why: str) -> None:
        """Write down `values` that follow from the default of a missing `key`, unless ours agree.

        A key is missing if no file gives it. `why` says what differs here, if anything does.
        """
        if not why and all(value == DEFAULTS.get(ours) for ours, value in values.items()):
            return
        name = self.called(key)
        self._put(values, why or f"the default of {name} there", f"{name}, which no file gives")
        part = AccountPart.CHANGED if why else AccountPart.TAKEN
        why = why or "the default there"
        self.rows.append(Row(part, (), f"{name}, not given", _values_text(values), why))

    def default_of_tool(self, key: str, why: str) -> None:
        """Account for `key`, given or not, as changed: what differs here, and no key says it."""
        if key in self.given:
            self.changed(key, None, why)
        else:
            self.rows.append(Row(AccountPart.CHANGED, (), f"{key}, not given", "", why))

    def same(self, key: str, ours: str, there: float | int | None = None) -> None:
        """Take the number under `key` over as `ours`; `there` is the default, or None."""
        value = self.number(key, there)
        if value is not None:
            self.taken(key, {ours: value})

    def _account(self, part: AccountPart, keys: str, values: Values, why: str) -> None:
        found = self._unaccounted(keys.split())
        if not found and values:
            self.default(keys.partition(" ")[0], values, why)
        if not found:
            return
        origin = ", ".join(dict.fromkeys(f"{one.file}: {one.name}" for one in found))
        self._put(values, why if part == AccountPart.CHANGED else "", origin)
        there = ", ".join(map(str, found))
        self.rows.append(Row(part, tuple(found), there, _values_text(values), why))

    def _unaccounted(self, keys: Iterable[str]) -> list[Given]:
        """Return what files give under `keys` and no row is about yet."""
        done = {id(one) for row in self.rows for one in row.keys}
        found = []
        for key in keys:
            found += [one for one in self.given.get(key, []) if id(one) not in done]
        return found

    def _put(self, values: Values, comment: str, origin: str) -> None:
        for number, (ours, value) in enumerate(values.items()):
            self.values[ours] = value
            self.origins[ours] = origin
            if comment and number == 0:
                self.comments[ours] = comment

    def account_for_the_rest(self, reasons: Mapping[str, str]) -> None:
        """Account for the unused keys, by `reasons` and by our table of other tools' keys."""
        by_reason: dict[str, list[Given]] = {}
        for one in self._unaccounted(self.given):
            by_reason.setdefault(_reason(one, reasons), []).append(one)
        for reason, found in by_reason.items():
            there = ", ".join(map(str, found))
            self.rows.append(Row(AccountPart.NONE, tuple(found), there, "", reason))


OFF = "empty or switched off there, so nothing changes"


def _reason(one: Given, reasons: Mapping[str, str]) -> str:
    name = spelled(one.name).removeprefix("deepspeed.")
    is_single = one.value == 1 and name.endswith(("parallel_size", "parallel_degree"))
    if one.value in (None, "", 0, [], {}) or is_single:  # 0 equals false
        return OFF
    for key in (name, name.partition(".")[0]):
        if key in reasons:
            return reasons[key]
    last = name.rpartition(".")[2]
    if last in NO_KEY:
        return NO_KEY[last]
    if last in OUR_KEY:
        return f"not converted; the key for it here is {OUR_KEY[last]}"
    return f"unknown to this import{did_you_mean(name, [*OUR_KEY, *NO_KEY, *reasons], cutoff=0.8)}"


def _is_value(value: Any) -> bool:
    return value is not None and value != AUTO


def shown(value: Any) -> str:
    """Return `value` as people would write it, on one line, with secrets masked."""
    if isinstance(value, float):
        return f"{value:.12g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shortened(text, VALUE_CHARS)


def _values_text(values: Values) -> str:
    return ", ".join(f"{ours}: {_value_text(value)}" for ours, value in values.items())


def _value_text(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return ", ".join(_value_text(item) for item in value)
    if isinstance(value, dict):
        return " ".join(str(value[key]) for key in ("source", "name", "path") if key in value)
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return shown(value)


# Our keys in the order of the schema, as `train.lr`, with their defaults; None for a key that is
# required.
DEFAULTS = {key: None if field.is_required() else field.default for key, field in fields_of(Config)}
LINEAR_NAMES: tuple[str, ...] = LinearName.__args__  # type: ignore[attr-defined]
