"""Recognises the format of a row and turns the row into a Conversation or a Text.

What the formats are is in formats.py, what a conversation has to be in conversation.py; users of rows import
the names of both from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline_lib.data.rows.conversation import (
    BadRow,
    Content,
    Conversation,
    Message,
    Reason,
    Text,
    check,
    type_name,
)
from pipeline_lib.data.rows.fields import Fields, names_of
from pipeline_lib.data.rows.formats import KEYS, Format, turns_of
from pipeline_lib.data.rows.tool_calls import tools_of

__all__ = [
    "AmbiguousRow",
    "BadRow",
    "Content",
    "Conversation",
    "Format",
    "Layout",
    "Message",
    "Reason",
    "Text",
    "detect",
    "to_content",
]

_KEYS = [(row_format, frozenset(keys)) for row_format, alternatives in KEYS.items() for keys in alternatives]
_OTHER_NAMES = "other names are told by `columns`"
_ALL_KEYS = frozenset().union(*(keys for _, keys in _KEYS))


class AmbiguousRow(Exception):
    """A row that has the keys of several formats: which one is meant has to be said."""

    def __init__(self, formats: tuple[Format, ...]) -> None:
        """Keep the `formats` that fit."""
        super().__init__(formats)
        self.formats = formats

    def __str__(self) -> str:
        return f"fits {' and '.join(self.formats)}: set `format` of the source to the one that is meant"


@dataclass(frozen=True)
class Layout:
    """How the rows of one file are read.

    `columns`: our name of a key -> the file's, in rows and in turns. `roles`: the file's name of a role -> ours
    (system, user, assistant, tool, function_call), beside those that the format has.
    """

    format: Format
    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)


def detect(row: Any, columns: Mapping[str, str]) -> Format:
    """The format whose keys `row` has, null counting as missing.

    Raises BadRow if it has those of none, AmbiguousRow if it has those of several.
    """
    fields = _fields(row, columns)
    present = {key for key in _ALL_KEYS if fields.value(key) is not None}
    fitting = tuple(dict.fromkeys(row_format for row_format, keys in _KEYS if keys <= present))
    if len(fitting) > 1:
        raise AmbiguousRow(fitting)
    if not fitting:
        raise BadRow(Reason.WRONG_FORMAT, f"none of {', '.join(KEYS)}; it has {_keys(row)}; {_OTHER_NAMES}")
    return fitting[0]


def to_content(row: Any, layout: Layout) -> Content:
    """What `row`, read as `layout` says, holds; keys of other formats are ignored. Raises BadRow."""
    fields = _fields(row, layout.columns)
    alternatives = KEYS[layout.format]
    if not any(all(fields.has(key) for key in keys) for keys in alternatives):
        wanted = " or ".join(" and ".join(map(fields.shown, keys)) for keys in alternatives)
        raise BadRow(Reason.WRONG_FORMAT, f"{layout.format} needs {wanted}; it has {_keys(row)}; {_OTHER_NAMES}")
    content: Content
    if layout.format == "text":
        content = Text(fields.text("text"))
    else:
        turns = turns_of(fields, layout.format, layout.roles)
        supervised = tuple(
            number for number, (message, trained) in enumerate(turns) if trained and message["role"] == "assistant"
        )
        content = Conversation([message for message, _ in turns], tools_of(fields), supervised)
    check(content)
    return content


def _fields(row: Any, columns: Mapping[str, str]) -> Fields:
    if not isinstance(row, dict):
        raise BadRow(Reason.NOT_AN_OBJECT, f"expected an object, found {type_name(row)}")
    return Fields(row, names_of(columns))


def _keys(row: Mapping[str, Any]) -> str:
    keys = [f"{key!r:.40}{' (null)' if row[key] is None else ''}" for key in sorted(row)[:8]]
    return ", ".join(keys) or "no keys"
