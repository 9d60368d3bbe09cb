"""Recognises the format of a row and turns the row into a Conversation or a Text.

What the formats are is in formats.py, what a conversation has to be in conversation.py; users of rows import
the names of both from here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline_lib.config.sources import IGNORE
from pipeline_lib.data.rows.conversation import (
    BadRow,
    Content,
    Conversation,
    Message,
    Reason,
    Text,
    WrongFile,
    check,
    type_name,
)
from pipeline_lib.data.rows.fields import Fields, names_of
from pipeline_lib.data.rows.formats import KEYS, Format, turns_of
from pipeline_lib.data.rows.tool_calls import conversation_tools
from pipeline_lib.data.rows.unread import KeyCounts, PreferenceData, check_examples

__all__ = [
    "AmbiguousRow",
    "BadRow",
    "Content",
    "Conversation",
    "Format",
    "KeyCounts",
    "Layout",
    "Message",
    "PreferenceData",
    "Reason",
    "Text",
    "WrongFile",
    "detect",
    "to_content",
]

_KEYS = [(row_format, frozenset(keys)) for row_format, alternatives in KEYS.items() for keys in alternatives]
_ALL_KEYS = frozenset().union(*(keys for _, keys in _KEYS))


class AmbiguousRow(WrongFile):
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

    `columns`: our name of a key -> the file's, in rows and in turns, or `ignore`. `roles`: the file's name of a role ->
    ours (system, user, assistant, tool, function_call), beside those that the format has.
    """

    format: Format
    columns: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)


def detect(row: Any, columns: Mapping[str, str]) -> Format:
    """The format whose keys `row` has, null counting as missing.

    Raises BadRow if it has those of none, AmbiguousRow if it has those of several, PreferenceData if it has no answer
    to follow but answers that are compared.
    """
    fields = _fields(row, columns)
    present = {key for key in _ALL_KEYS if fields.peek(key) is not None}
    fitting = tuple(dict.fromkeys(row_format for row_format, keys in _KEYS if keys <= present))
    if len(fitting) > 1:
        raise AmbiguousRow(fitting)
    if not fitting:
        check_examples(fields, labels=False)
        raise BadRow(Reason.WRONG_FORMAT, f"none of {', '.join(KEYS)}; {_keys(row, columns)}")
    return fitting[0]


def to_content(row: Any, layout: Layout, counts: KeyCounts | None = None) -> Content:
    """What `row`, read as `layout` says, holds; `counts` is told of its keys. Raises BadRow, PreferenceData."""
    counts = KeyCounts() if counts is None else counts
    fields = _fields(row, layout.columns)
    try:
        content = _content(fields, layout)
    finally:
        counts.note(fields, layout.columns.values())
    counts.count_unread(fields)
    return content


def _content(fields: Fields, layout: Layout) -> Content:
    alternatives = KEYS[layout.format]
    if not any(all(fields.peek(key) is not None for key in keys) for keys in alternatives):
        if layout.format != "text":
            check_examples(fields, labels=False)
        wanted = " or ".join(" and ".join(map(fields.shown, keys)) for keys in alternatives)
        raise BadRow(Reason.WRONG_FORMAT, f"{layout.format} needs {wanted}; {_keys(fields.values, layout.columns)}")
    content: Content
    if layout.format == "text":
        content = Text(fields.text("text"))
    else:
        turns = turns_of(fields, layout.format, layout.roles)
        supervised = tuple(
            number for number, (message, trained) in enumerate(turns) if trained and message["role"] == "assistant"
        )
        content = Conversation([message for message, _ in turns], conversation_tools(fields), supervised)
    check(content)
    return content


def _fields(row: Any, columns: Mapping[str, str]) -> Fields:
    if not isinstance(row, dict):
        raise BadRow(Reason.NOT_AN_OBJECT, f"expected an object, found {type_name(row)}")
    return Fields(row, names_of(columns))


def _keys(row: Mapping[str, Any], columns: Mapping[str, str]) -> str:
    """What a row has instead of the keys of its format."""
    keys = [f"{key!r:.40}{' (null)' if row[key] is None else ''}" for key in sorted(row)[:8]]
    missing = [f"{theirs!r:.40}" for theirs in columns.values() if theirs not in (IGNORE, *row)]
    hint = f"`columns` names {', '.join(missing)}" if missing else "other names are told by `columns`"
    return f"it has {', '.join(keys) or 'no keys'}; {hint}"
