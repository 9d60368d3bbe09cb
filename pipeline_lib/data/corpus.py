"""Reads conversation files row by row: each row is a Conversation or is Rejected with a reason, never lost.

A .jsonl file is streamed, so its size costs no memory; a .json array is read whole. Blank lines are no rows.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from pipeline_lib.base.errors import DataError
from pipeline_lib.data.rows import BadRow, Format, Message, Reason, detect, to_messages, type_name

RowFormat = Format | Literal["auto"]

EXCERPT_CHARS = 200
MAX_LINE_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Place:
    """Where a row lies: its line (jsonl) or its number in the array (json), from 1; its first byte where known."""

    file: str
    line: int | None = None
    row: int | None = None
    byte_offset: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line is not None else f"{self.file}: row {self.row}"


@dataclass(frozen=True)
class Conversation:
    """Messages in which user and assistant take turns, after at most one system message."""

    messages: list[Message]
    place: Place


@dataclass(frozen=True)
class Rejected:
    """A row that cannot be used, and how it begins."""

    reason: Reason
    detail: str
    place: Place
    excerpt: str

    def to_json(self) -> dict[str, Any]:
        """The form in which quarantine.jsonl holds it."""
        place = {key: value for key, value in vars(self.place).items() if value is not None}
        return {"reason": self.reason, "detail": printable(self.detail), **place, "excerpt": self.excerpt}


@dataclass(frozen=True)
class _Row:
    """A row before it is understood: its JSON value, or why it has none."""

    place: Place
    value: Any
    bad: BadRow | None
    raw: bytes | None


class CorpusFile:
    """The rows of one file, in order. `format` is known once a usable row was read, or from the start if given."""

    def __init__(self, path: Path, row_format: RowFormat = "auto", name: str | None = None) -> None:
        """Read `path`; `name` is what messages call it."""
        self.path = path
        self.name = name or str(path)
        self.format: Format | None = None if row_format == "auto" else row_format
        self.rows = 0
        self.fraction_read = 0.0

    def __iter__(self) -> Iterator[Conversation | Rejected]:
        """All rows. Raises DataError if the file has none, or if it is an array that is not JSON."""
        for row in _lines(self.path, self.name) if self.path.suffix == ".jsonl" else self._array():
            self.rows += 1
            if row.place.byte_offset is not None:
                self.fraction_read = row.place.byte_offset / max(1, self.path.stat().st_size)
            yield self._understand(row)
        if not self.rows:
            raise DataError(f"{self.name}: holds no rows; remove it from data.train or fill it")
        self.fraction_read = 1.0

    def _understand(self, row: _Row) -> Conversation | Rejected:
        try:
            if row.bad is not None:
                raise row.bad
            row_format = self.format or detect(row.value)
            messages = to_messages(row.value, row_format)
        except BadRow as bad:
            return Rejected(bad.reason, bad.detail, row.place, _excerpt(row))
        self.format = row_format
        return Conversation(messages, row.place)

    def _array(self) -> Iterator[_Row]:
        values = _load_array(self.path, self.name)
        for number, value in enumerate(values, start=1):
            self.fraction_read = number / len(values)
            yield _Row(Place(self.name, row=number), value, None, None)


def _lines(path: Path, name: str) -> Iterator[_Row]:
    offset = 0
    line = 0
    with path.open("rb") as file:
        while raw := file.readline(MAX_LINE_BYTES):
            line += 1
            size_bytes = len(raw)
            bad = None
            if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                bad = BadRow(Reason.LINE_TOO_LONG, f"more than {MAX_LINE_BYTES} bytes in one line")
                size_bytes += _skip_line(file.readline)
            text = raw.removeprefix(_BOM) if line == 1 else raw
            if bad is not None:
                yield _Row(Place(name, line=line, byte_offset=offset), None, bad, text[: 4 * EXCERPT_CHARS])
            elif text.strip():
                yield _parse_line(text, Place(name, line=line, byte_offset=offset))
            offset += size_bytes


def _skip_line(readline: Any) -> int:
    skipped = 0
    while part := readline(MAX_LINE_BYTES):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _parse_line(raw: bytes, place: Place) -> _Row:
    try:
        return _Row(place, _parse(raw.decode()), None, raw)
    except UnicodeDecodeError as error:
        bad = BadRow(Reason.BAD_UTF8, f"byte {error.start + 1} of the line is not UTF-8")
    except json.JSONDecodeError as error:
        bad = BadRow(Reason.BAD_JSON, f"{error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        bad = BadRow(Reason.BAD_JSON, _first_line(error))
    return _Row(place, None, bad, raw)


def _load_array(path: Path, name: str) -> list[Any]:
    raw = path.read_bytes().removeprefix(_BOM)
    try:
        value = _parse(raw.decode())
    except UnicodeDecodeError as error:
        line, column = raw.count(b"\n", 0, error.start) + 1, error.start - raw.rfind(b"\n", 0, error.start)
        raise DataError(f"{name}:{line}:{column}: not UTF-8; convert the file") from error
    except json.JSONDecodeError as error:
        if not raw.strip():
            raise DataError(f"{name}: the file is empty; remove it from data.train or fill it") from error
        hint = "; if it holds one object a line, call it .jsonl" if error.msg == "Extra data" else "; mend the file"
        raise DataError(f"{name}:{error.lineno}:{error.colno}: not JSON: {error.msg}{hint}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: not usable JSON: {_first_line(error)}; mend the file") from error
    if not isinstance(value, list):
        raise DataError(f"{name}: expected an array of rows, found {type_name(value)}")
    return value


def _parse(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _first_line(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]


def _excerpt(row: _Row) -> str:
    if row.raw is not None:
        return printable(row.raw[: 4 * EXCERPT_CHARS].decode(errors="replace").strip()[:EXCERPT_CHARS])
    try:
        text = json.dumps(row.value, ensure_ascii=False)
    except RecursionError:
        text = "nested too deeply"
    return printable(text[:EXCERPT_CHARS])


def printable(text: str) -> str:
    """`text` with what UTF-8 cannot hold replaced by question marks."""
    return text.encode(errors="replace").decode()
