"""The keys of rows, turns and calls that are not read, and those refused as harmful.

Refused are those that would change what is learned. A key is refused by its name in the tables, or
by the sense of its words: a system prompt, tools, thinking or calls under another name. The value
decides too: a number, a name or an identifier is no prompt and no thinking. Any other key is
counted by name. `columns: {KEY: ignore}` allows a key to be left out, a key of KEPT_IN_TURNS only
in rows. Rows of raw text have no refused keys.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Any

from pipeline_lib.config.schema import IGNORE
from pipeline_lib.core.text import redact
from pipeline_lib.data.conversations import BadRow, Reason, WrongFile
from pipeline_lib.data.key_senses import (
    MAX_NAME_CHARS,
    Sense,
    folded,
    is_blank,
    is_text,
    sense_of,
)
from pipeline_lib.data.read_files import printable
from pipeline_lib.data.refusals import (
    COMPARED_NAMES,
    DETAIL_NAMES,
    IN_PARTS,
    ITS_NAME,
    KEPT_IN_TURNS,
    LABELS,
    MIXED,
    OUTCOMES,
    VERDICTS,
    Refusals,
)
from pipeline_lib.data.row_fields import Fields

MAX_KEYS = 100  # keys of a file that are counted by name


@dataclass(eq=False)
class PreferenceData(WrongFile):
    """The error for a row that compares answers, or labels its answer as bad, by its `keys`."""

    keys: tuple[str, ...]

    def __str__(self) -> str:
        ignored = ", ".join(f"{key}: {IGNORE}" for key in self.keys)
        return (
            f"is preference data by its {' and '.join(self.keys)}: only good examples can be "
            "trained on. Keep only those, or take another data set. If the name means something "
            f"else, set columns: {{{ignored}}}"
        )


def check_examples(fields: Fields, *, labels: bool = True) -> None:
    """Raise PreferenceData if the row or turn compares answers or, if `labels`, calls one bad."""
    keys = [key for key in _keys_of(fields) if _is_of_bad_example(fields, key, labels)]
    if keys:
        raise PreferenceData(tuple(sorted(keys)))


def _is_of_bad_example(fields: Fields, key: str, labels: bool) -> bool:
    name = folded(key)
    if name in COMPARED_NAMES:
        return not is_blank(fields.peek(key))
    if not labels:
        return False
    value = fields.peek(key)
    if name in LABELS:
        return _is_zero(value)
    if fields.where:
        return False
    if name == "reward" and value == -1:  # what some environments give for a failure
        return True
    if name in OUTCOMES:
        return _is_zero(value)
    return name in VERDICTS and (value is False or is_text(value, ("false",)))


def _is_zero(value: Any) -> bool:
    return value == 0 or is_text(value, ("0", "0.0", "false"))


def _keys_of(fields: Fields) -> Collection[str]:
    """Return the keys of a row or turn, and our names that `columns` gives to others."""
    return {*fields.values, *fields.names} if fields.names else fields.values.keys()


def refuse(fields: Fields, refusals: Refusals) -> None:
    """Raise BadRow for the first key of the row or turn that `refusals` forbid with its value.

    Raise it also for a key of ours that has a value, if `columns` reads that key from another one
    that is blank.
    """
    for key in fields.displaced(MIXED):
        if is_blank(fields.peek(key)) and not is_blank(fields.values[key]):
            remedy = f"write it as {fields.shown(key)}, or give such files a source of their own"
            text = "not read, because `columns` gives another name"
            raise BadRow(Reason.BAD_VALUE, f"{fields.where}{key}: {text}: {remedy}")
    found = {}
    for key in _keys_of(fields):
        value = fields.peek(key)
        if value is not None and (remedy := refusals.remedy(key, value)):
            found[key] = remedy
    if found and not is_blank(fields.peek("reasoning_content")):  # the thinking, and it is repeated
        found = {key: remedy for key, remedy in found.items() if not _is_thinking(key)}
    for key in sorted(found):
        text = f"{fields.shown(key)}: {found[key].replace(ITS_NAME, key)}"
        is_kept = fields.where and key in KEPT_IN_TURNS
        if not is_kept:
            text += f"; to leave it out set columns: {{{key}: {IGNORE}}}"
        raise BadRow(Reason.BAD_VALUE, text)


def _is_thinking(key: str) -> bool:
    if key == "reasoning_content":
        return False
    return sense_of(key) is Sense.THINKING or folded(key) in DETAIL_NAMES


def refuse_in_parts(turn: Fields) -> None:
    """Raise BadRow for thinking in the calls and the parts of the content of a turn."""
    for part in turn.parts:
        refuse(part, IN_PARTS)


@dataclass
class KeyCounts:
    """Counts of the keys in rows.

    `unread` counts the values of each key that was not read, `others` the values of keys beyond
    MAX_KEYS. A column is counted under its name, a key of turns as `messages[].name`, one of their
    calls as `messages[].tool_calls[].name`. `named` holds the names in `columns` that any row has,
    and `roles` those in `roles` that any turn has; `first` the keys of the first row that is an
    object, and is empty if there was no such row.
    """

    unread: Counter[str] = field(default_factory=Counter)
    others: int = 0
    named: set[str] = field(default_factory=set)
    roles: set[str] = field(default_factory=set)
    first: tuple[str, ...] = ()

    def add(self, more: "KeyCounts") -> None:
        """Add the counts of later rows."""
        for name, number in more.unread.items():
            self._count(name, number)
        self.others += more.others
        self.named |= more.named
        self.roles |= more.roles
        self.first = self.first or more.first

    def count_unread(self, row: Fields) -> None:
        """Count the unread keys of a row, of its turns, and of their calls and parts."""
        for name in row.unread():
            self._count(_shown(name), 1)
        for turns, turn in row.turns:
            for name in turn.unread():
                self._count(f"{turns}[].{_shown(name)}", 1)
            for part in turn.parts:
                for name in part.unread():
                    self._count(f"{turns}[].{part.place}.{_shown(name)}", 1)

    def note(self, row: Fields, names: Collection[str], roles: Collection[str] = ()) -> None:
        """Record which `names` the row or its turns have, the turns' `roles`, and first keys.

        The keys are those of the first row.
        """
        if self.first and not names and not roles:
            return
        objects = [row.values]
        for _, turn in row.turns:
            objects += [turn.values, *(part.values for part in turn.parts)]
        if not self.first:
            keys = {_shown(key) for key in chain(*objects)}
            self.first = tuple(sorted(keys)[:MAX_KEYS])
        for name in names:
            if name not in self.named and any(name in values for values in objects):
                self.named.add(name)
        if len(self.roles) < len(roles):
            of_turns = []
            for _, turn in row.turns:
                of_turns += [turn.peek("role"), turn.peek("from")]
            self.roles.update(role for role in roles if role in of_turns)

    def _count(self, name: str, number: int) -> None:
        if name in self.unread or len(self.unread) < MAX_KEYS:
            self.unread[name] += number
        else:
            self.others += number


@lru_cache(maxsize=4 * MAX_KEYS)
def _shown(key: str) -> str:
    return printable(redact(key[: 4 * MAX_NAME_CHARS])[:MAX_NAME_CHARS])
