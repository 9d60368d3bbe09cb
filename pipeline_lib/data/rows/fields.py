"""Reads the values of a row by our names of its keys, whatever the file calls them.

Lists and objects may also come as JSON text, as csv and parquet files have them: a text is parsed where something
else is expected. Messages name the keys as the file does.
"""

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

from pipeline_lib.config.sources import IGNORE
from pipeline_lib.data.rows.conversation import BadRow, Reason, type_name
from pipeline_lib.data.rows.strict_json import parse

Names = Mapping[str, str | None]
_NOTHING: tuple[Any, ...] = (None, "", [], {})


def names_of(columns: Mapping[str, str]) -> Names:
    """The file's name of each key that has another than ours; None: the file's key of that name is not read."""
    named = {ours: None if theirs == IGNORE else theirs for ours, theirs in columns.items()}
    return {**dict.fromkeys(columns.values()), **named}


class Fields:
    """An object of a row. `where` leads to it within the row: empty, or `messages[2].`.

    `turns` are the objects in its lists, once they were asked for, each with the name of its list.
    """

    def __init__(self, values: Mapping[str, Any], names: Names, where: str = "") -> None:
        """Read `values`, whose keys are called as `names` says."""
        self.values = values
        self.where = where
        self.turns: list[tuple[str, Fields]] = []
        self._names = names
        self._read: set[str | None] = set()

    def value(self, key: str) -> Any:
        """The value, which is read with this; None if it is missing or null."""
        self._read.add(self._names.get(key, key))
        return self.peek(key)

    def peek(self, key: str) -> Any:
        """The value, which does not count as read."""
        return self.values.get(self._names.get(key, key))  # type: ignore[arg-type]  # None is no key

    def among(self, keys: Set[str]) -> list[str]:
        """Those of our `keys` that the object may have, sorted."""
        if keys.isdisjoint(self.values) and keys.isdisjoint(self._names):
            return []
        return sorted(key for key in {*self.values, *self._names} if key in keys)

    def displaced(self, keys: Sequence[str]) -> list[str]:
        """Those of our `keys` that the object has, but that are read from another one."""
        if not self._names:
            return []
        return [
            key
            for key in keys
            if key in self.values
            and self._names.get(key, key) != key
            and not self._is_ignored(key)
            and key not in self._names.values()
        ]

    def mark_read(self, keys: Collection[str]) -> None:
        """Count the file's `keys` as read."""
        self._read.update(keys)

    def unread(self) -> list[str]:
        """The file's names of the keys that hold something and were not read, but for those that are to be ignored."""
        return [
            name
            for name, value in self.values.items()
            if name not in self._read and value not in _NOTHING and not self._is_ignored(name)
        ]

    def _is_ignored(self, name: str) -> bool:
        return name in self._names and self._names[name] is None and name not in self._names.values()

    def shown(self, key: str) -> str:
        """The key in messages."""
        return f"{self.where}{self._names.get(key) or key}"

    def text(self, key: str) -> str:
        """The text; "" if it is missing or null. Raises BadRow if it is something else."""
        value = self.value(key)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise self.unlike(key, "text", value)
        return value

    def items(self, key: str) -> list[Any]:
        """The list; empty if it is missing, null or an empty text. Raises BadRow if it is something else."""
        value = self.value(key)
        if value is None:
            return []
        value = parsed(value, self.shown(key))
        if not isinstance(value, list):
            raise self.unlike(key, "a list", value)
        return value

    def objects(self, key: str, kept: Collection[str] = ()) -> list["Fields"]:
        """The objects in the list under `key`. Raises BadRow if it holds anything else.

        They are read by the names of this object's keys, but keep those of `kept` that are ignored here.
        """
        names = {ours: theirs for ours, theirs in self._names.items() if ours not in kept or not self._is_ignored(ours)}
        found = []
        for number, item in enumerate(self.items(key)):
            where = f"{self.shown(key)}[{number}]"
            found.append(Fields(as_object(item, where), names, f"{where}."))
        self.turns += [(self.shown(key), turn) for turn in found]
        return found

    def unlike(self, key: str, expected: str, value: Any) -> BadRow:
        """The error for a value of a wrong type."""
        return BadRow(Reason.BAD_VALUE, f"{self.shown(key)}: expected {expected}, found {type_name(value)}")


def as_object(value: Any, where: str) -> dict[str, Any]:
    """`value` as an object, parsed if it is JSON text. Raises BadRow."""
    value = parsed(value, where)
    if not isinstance(value, dict):
        raise BadRow(Reason.BAD_VALUE, f"{where}: expected an object, found {type_name(value)}")
    return value


def parsed(value: Any, where: str) -> Any:
    """`value`, parsed if it is text that begins like a list or an object (an empty one counts as a list).

    Raises BadRow if it begins so and is not JSON.
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
