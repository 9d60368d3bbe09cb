"""Rows with their positions, and reading lines and multi-line JSON in bounded memory.

Text that is not UTF-8 is not converted: errors name the probable encoding and the command that
converts the file.
"""

import codecs
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, BinaryIO

from pipeline_lib.core.errors import DataError
from pipeline_lib.data.conversations import BadRow, Reason
from pipeline_lib.data.encodings import guess


@dataclass(frozen=True)
class RowPosition:
    """A row's position: its first line, or its number in an array or table, from 1.

    Its first byte is given if it is known. In a compressed file, byte offsets refer to the
    decompressed data.
    """

    file: str
    line: int | None = None
    row: int | None = None
    byte_offset: int | None = None

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line}" if self.line is not None else f"{self.file}: row {self.row}"
        )


@dataclass(frozen=True)
class RawRow:
    """A raw row: a JSON text, a value that is already parsed, or the reason why it is bad.

    The `text` of a bad row is its beginning, if known.
    """

    place: RowPosition
    text: bytes | None = None
    value: Any = None
    bad: BadRow | None = None


BOM = b"\xef\xbb\xbf"
# limit for a line, and for a row in file types where a row may span several lines
MAX_LINE_BYTES = 64 << 20
KEPT_BYTES = 4096  # kept of a line that is too long, to show how it begins


@dataclass(frozen=True, slots=True)
class Line:
    """A line with its line ending; `number` counts from 1.

    A line that is too long is cut, and `bad` is set.
    """

    number: int
    byte_offset: int
    text: bytes
    bad: BadRow | None = None


def lines(file: BinaryIO) -> Iterator[Line]:
    """Yield all lines of `file`, also blank ones, without a byte order mark.

    The last needs no line ending.
    """
    offset = 0
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        size_bytes = len(raw)
        bad = None
        if size_bytes > MAX_LINE_BYTES:
            ends = "; its lines may end in CR alone" if b"\r" in raw[:KEPT_BYTES] else ""
            bad = BadRow(
                Reason.LINE_TOO_LONG, f"more than {MAX_LINE_BYTES} bytes in one line{ends}"
            )
            part = raw
            while part and not part.endswith(b"\n"):
                part = file.readline(1 << 20)
                size_bytes += len(part)
            raw = raw[:KEPT_BYTES]
        yield Line(number, offset, raw.removeprefix(BOM) if number == 1 else raw, bad)
        offset += size_bytes


HEAD_BYTES = 1 << 20
WRAPPERS = (
    "data",
    "rows",
    "train",
    "examples",
    "instances",
    "samples",
    "records",
    "items",
    "dataset",
)
_WRAPPED = re.compile(r'\s*\{\s*"(\w+)"\s*:\s*\[\s*(?=\{)')
_ROLES = ("role", "from")  # keys of turns


class Form(StrEnum):
    """The forms of files with rows of JSON."""

    LINES = "lines"  # one row a line
    ARRAY = "array"  # [row, row, ...]
    WRAPPED = "wrapped"  # {"data": [row, row, ...]}
    SEQUENCE = "sequence"  # one row after the other, each over several lines


def form_of(head: bytes, own_keys: Collection[str]) -> Form:
    """Return the form of a file with JSON rows that begins with `head`: LINES if none is clear.

    `own_keys` are keys of rows, which wrap no rows.
    """
    text = head.removeprefix(BOM).decode(errors="replace").lstrip()
    if text.startswith("["):
        return Form.ARRAY
    line, _, more = text.partition("\n")
    try:
        row = _ANY_VALUE.decode(line)
    except json.JSONDecodeError as error:
        is_cut = error.pos >= len(line.rstrip()) and not error.msg.startswith("Unterminated")
        if _is_wrapped(text, own_keys) and (is_cut or not more):
            return Form.WRAPPED
        is_over_lines = (
            is_cut and bool(more) and text.startswith("{") and _begins_with_value(text, len(head))
        )
        return Form.SEQUENCE if is_over_lines else Form.LINES
    except RecursionError:
        return Form.LINES
    is_all = isinstance(row, dict) and len(row) == 1 and not more.strip()
    return Form.WRAPPED if is_all and _is_wrapped(text, own_keys) else Form.LINES


def _begins_with_value(text: str, read_bytes: int) -> bool:
    try:
        _ANY_VALUE.raw_decode(text)
    except (json.JSONDecodeError, RecursionError):
        return read_bytes >= HEAD_BYTES  # the value may go on behind what was read
    return True


def _is_wrapped(text: str, own_keys: Collection[str]) -> bool:
    """Return whether `text` begins with an object whose first key holds rows, not turns."""
    found = _WRAPPED.match(text)
    if found is None or found[1] not in WRAPPERS or found[1] in own_keys:
        return False
    try:
        first, _ = _ANY_VALUE.raw_decode(text, found.end())
    except (json.JSONDecodeError, RecursionError):
        return True  # longer than what was read
    return not any(key in first for key in _ROLES)


# Splits one large JSON array, or a sequence of objects, into its elements, a chunk of the file at a
# time. Elements are returned as bytes. The decoder only finds where they end: it accepts errors
# that affect a single element (NaN, a control character, a byte that is not UTF-8), so that only
# that row is rejected later.

CHUNK_BYTES = 1 << 16
_SPACE = re.compile(r"[ \t\r\n]*")
_ANY_VALUE = json.JSONDecoder(parse_int=str, parse_float=str, strict=False)  # numbers of any size
# characters; a value or an error this near the end of the text may be an effect of the cut
_LONGEST_WORD = 16


class JsonArray:
    """An iterable over a file's JSON array elements, as rows with the text of one element each.

    The array may be wrapped, or a sequence without brackets.
    """

    def __init__(self, file: BinaryIO, name: str, form: Form = Form.ARRAY) -> None:
        """Read from `file`, which messages call `name`. Reading starts with the iteration."""
        self._file = file
        self._name = name
        self._form = form
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._text = ""  # decoded text; the part from `_at` on is not consumed yet
        self._at = 0
        self._ended = False
        self._offset, self._line, self._column = 0, 1, 1  # position of `_at` in the file

    def __iter__(self) -> Iterator[RawRow]:
        """Yield all elements in order.

        Raises DataError with line and column where the file is not a JSON array.
        """
        if self._peek() == "\ufeff":
            self._offset += len(self._take(self._at + 1))
            self._column = 1
        if self._form == Form.SEQUENCE:
            yield from self._sequence()
            return
        if self._form == Form.WRAPPED:
            self._expect("{")
            self._peek()
            self._value()
            self._expect(":")
        self._expect("[")
        number = 0
        if self._peek() != "]":
            while True:
                number += 1
                yield self._element(number)
                if self._peek() == "]":
                    break
                self._expect(",")
        self._expect("]")
        if self._form == Form.WRAPPED:
            if self._peek() == ",":
                raise self._error(
                    "the object holds more than its list of rows: write that list alone, [{...}, "
                    "...]"
                )
            self._expect("}")
        if self._peek():
            raise self._error("more text after the end of the array")

    def _sequence(self) -> Iterator[RawRow]:
        number = 0
        while self._peek():
            number += 1
            yield self._element(number)

    def _element(self, number: int) -> RawRow:
        self._peek()
        place = RowPosition(self._name, row=number, byte_offset=self._offset)
        return RawRow(place, self._value())

    def _peek(self) -> str:
        """Skip whitespace and return the next character without consuming it; "" at the end."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._take(space.end() if space else self._at)
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read()

    def _expect(self, mark: str) -> None:
        if self._peek() != mark:
            found = (
                "the file ends"
                if self._at == len(self._text)
                else f"found {self._text[self._at]!r}"
            )
            raise self._error(f"expected {mark!r}, {found}")
        self._take(self._at + 1)

    def _value(self) -> bytes:
        while True:
            try:
                _, end = _ANY_VALUE.raw_decode(self._text, self._at)
                whole = self._text[end - 1] in '}]"' or end <= len(self._text) - _LONGEST_WORD
                if whole or self._ended:
                    return self._take(end)
            except json.JSONDecodeError as error:
                cut = (
                    error.msg.startswith("Unterminated")
                    or error.pos >= len(self._text) - _LONGEST_WORD
                )
                if self._ended or not cut:
                    self._take(error.pos)
                    raise self._error(error.msg) from error
            except RecursionError as error:
                raise self._error("nested too deeply") from error
            if len(self._text) - self._at > MAX_LINE_BYTES:
                raise self._error(
                    f"a row of more than {MAX_LINE_BYTES} bytes; is a quote or a bracket missing?"
                )
            self._read()

    def _take(self, end: int) -> bytes:
        """Consume the text up to `end` and return it as bytes."""
        piece = self._text[self._at : end]
        raw = piece.encode("utf-8", "surrogateescape")
        newlines = piece.count("\n")
        if newlines:
            self._line += newlines
            self._column = len(piece) - piece.rfind("\n")
        else:
            self._column += len(piece)
        self._offset += len(raw)
        self._at = end
        return raw

    def _read(self) -> None:
        """Read more of the file: twice as much each time, so that costs stay linear.

        It reads more while a value does not end.
        """
        raw = self._file.read(max(CHUNK_BYTES, len(self._text) - self._at))
        self._ended = not raw
        self._text = self._text[self._at :] + self._decode(raw, self._ended)
        self._at = 0

    def _error(self, problem: str) -> DataError:
        encoding = ""
        raw = self._text.encode("utf-8", "surrogateescape")
        try:
            raw.decode()
        except UnicodeDecodeError:
            encoding = f" ({guess(raw)})"
        return DataError(
            f"{self._name}:{self._line}:{self._column}: not JSON: {problem}; mend the "
            f"file{encoding}"
        )
