"""Access to the values of a row by our names of its keys; `columns` maps them to the file's names.

Csv and parquet files may store lists and objects as JSON text, so a text is parsed where another
type is expected. Messages use the file's names of keys.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from pipeline_lib.config.schema import IGNORE
from pipeline_lib.data.conversations import BadRow, Reason, type_name
from pipeline_lib.data.strict_json import parse

Names = Mapping[str, str | None]
_NOTHING: tuple[Any, ...] = (None, "", [], {})


def names_of(columns: Mapping[str, str]) -> Names:
    """Return the file's name of each key if it differs from ours; None if it is not read."""
    named = {ours: None if theirs == IGNORE else theirs for ours, theirs in columns.items()}
    return {**dict.fromkeys(columns.values()), **named}


@dataclass
class Fields:
    """The `values` of an object of a row; `names` maps our names of keys to the file's."""

    values: Mapping[str, Any]
    names: Names
    where: str = ""  # the path within the row: empty, or `messages[2].`
    # returned by `objects`, with the name of the list
    turns: list[tuple[str, "Fields"]] = field(default_factory=list)
    # objects of a turn: its calls, the parts of its content
    parts: list["Fields"] = field(default_factory=list)
    place: str = ""  # of a part within its turn: `tool_calls[].function`
    _read: set[str | None] = field(default_factory=set)

    def value(self, key: str) -> Any:
        """Return the value of our `key` and count it as read; None if it is missing or null."""
        self._read.add(self.names.get(key, key))
        return self.peek(key)

    def peek(self, key: str) -> Any:
        """Return the value of our `key` without counting it as read."""
        return self.values.get(self.names.get(key, key))  # type: ignore[arg-type]  # None is no key

    def among(self, keys: Set[str]) -> list[str]:
        """Return those of `keys` that occur in the object or in the names of `columns`, sorted."""
        if keys.isdisjoint(self.values) and keys.isdisjoint(self.names):
            return []
        return sorted(key for key in {*self.values, *self.names} if key in keys)

    def displaced(self, keys: Sequence[str]) -> list[str]:
        """Return the `keys` that the object has, but that `columns` reads from another key."""
        theirs = self.names.values()
        displaced = []
        for key in keys:
            is_read_elsewhere = self.names.get(key, key) not in (key, None)
            if key in self.values and is_read_elsewhere and key not in theirs:
                displaced.append(key)
        return displaced

    def mark_read(self, keys: Collection[str]) -> None:
        """Count the file's `keys` as read."""
        self._read.update(keys)

    def add_part(
        self, values: Mapping[str, Any], where: str, place: str, read: Collection[str]
    ) -> None:
        """Add a part of this turn, whose keys `read` are read; `where` and `place` are its path."""
        part = Fields(values, self.names, f"{where}.", place=place)
        part.mark_read(read)
        self.parts.append(part)

    def unread(self) -> list[str]:
        """Return the file's names of keys that have a value, were not read and are not ignored."""
        unread = []
        for name, value in self.values.items():
            if name not in self._read and value not in _NOTHING and not self._is_ignored(name):
                unread.append(name)
        return unread

    def _is_ignored(self, name: str) -> bool:
        return name in self.names and self.names[name] is None and name not in self.names.values()

    def shown(self, key: str) -> str:
        """Return the path and the file's name of `key`, for messages."""
        return f"{self.where}{self.name_of(key)}"

    def name_of(self, key: str) -> str:
        """Return the file's name of `key`, for messages."""
        return self.names.get(key) or key

    def text(self, key: str) -> str:
        """Return the text under `key`; "" if it is missing or null.

        Raises BadRow for any other type.
        """
        value = self.value(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.unlike(key, "text", value)
        return value

    def items(self, key: str) -> list[Any]:
        """Return the list under `key`; empty if it is missing, null or blank text.

        Raises BadRow for any other type.
        """
        value = self.value(key)
        if value is None:
            return []
        value = parsed(value, self.shown(key))
        if not isinstance(value, list):
            raise self.unlike(key, "a list", value)
        return value

    def objects(self, key: str, kept: Collection[str] = ()) -> list["Fields"]:
        """Return the objects in the list under `key`. Raises BadRow if an item is not an object.

        They use the key names of this object, but do not ignore the keys in `kept` that this object
        ignores.
        """
        names = {}
        for ours, theirs in self.names.items():
            if ours not in kept or not self._is_ignored(ours):
                names[ours] = theirs
        found = []
        for number, item in enumerate(self.items(key)):
            where = f"{self.shown(key)}[{number}]"
            found.append(Fields(as_object(item, where), names, f"{where}."))
        self.turns += [(self.shown(key), turn) for turn in found]
        return found

    def unlike(self, key: str, expected: str, value: Any) -> BadRow:
        """Return the error for a `value` of the wrong type."""
        return BadRow(
            Reason.BAD_VALUE, f"{self.shown(key)}: expected {expected}, found {type_name(value)}"
        )


def is_turns(value: Any) -> bool:
    """Return whether `value` is a list of turns: objects with a role, or with ShareGPT's `from`."""
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(turn, dict) and ("role" in turn or "from" in turn) for turn in value)


def as_object(value: Any, where: str) -> dict[str, Any]:
    """Return `value` as an object, parsed if it is JSON text.

    Raises BadRow if it is not an object.
    """
    value = parsed(value, where)
    if not isinstance(value, dict):
        raise BadRow(Reason.BAD_VALUE, f"{where}: expected an object, found {type_name(value)}")
    return value


def parsed(value: Any, where: str) -> Any:
    """Return `value`, parsed if it is text like a list or an object; blank text is an empty list.

    Raises BadRow if such a text is not JSON.
    """
    if not isinstance(value, str):
        return value
    if not value.strip():
        return []
    if value.lstrip()[0] not in "[{":
        return value
    try:
        return parse(value)
    except ValueError as error:
        raise BadRow(Reason.BAD_VALUE, f"{where}: text that is not JSON: {error}") from error
