"""Finds the elements of one large JSON array, a chunk of the file at a time.

Elements are handed out as bytes: the decoder here only has to find where they end, so it lets pass what spoils no
more than one element (NaN, a control character, a byte that is not UTF-8) for the reader of that row to refuse.
"""

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from pipeline_lib.base.errors import DataError
from pipeline_lib.data.rows import lines
from pipeline_lib.data.rows.encodings import guess

CHUNK_BYTES = 1 << 16
_SPACE = re.compile(r"[ \t\r\n]*")
_ANY_VALUE = json.JSONDecoder(parse_int=str, parse_float=str, strict=False)  # numbers of any size
_LONGEST_WORD = 16  # what ends or fails so near the end of the text may only be cut there


@dataclass(frozen=True, slots=True)
class Element:
    """An element of the array; `number` is from 1."""

    number: int
    byte_offset: int
    text: bytes


class JsonArray:
    """The elements of the array in `file`, which messages call `name`."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Nothing is read yet."""
        self._file = file
        self._name = name
        self._decode = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
        self._text = ""  # what was read and not handed out, from `_at` on
        self._at = 0
        self._ended = False
        self._offset, self._line, self._column = 0, 1, 1  # of `_at`

    def __iter__(self) -> Iterator[Element]:
        """All elements, in order. Raises DataError with line and column where the file is no JSON array."""
        if self._peek() == "\ufeff":
            self._offset += len(self._take(self._at + 1))
            self._column = 1
        self._expect("[")
        number = 0
        if self._peek() != "]":
            while True:
                number += 1
                self._peek()
                offset = self._offset
                yield Element(number, offset, self._value())
                if self._peek() == "]":
                    break
                self._expect(",")
        self._expect("]")
        if self._peek():
            raise self._error("more text after the end of the array")

    def _peek(self) -> str:
        """The next character that is no space; "" at the end of the file."""
        while True:
            space = _SPACE.match(self._text, self._at)
            self._take(space.end() if space else self._at)
            if self._at < len(self._text) or self._ended:
                return self._text[self._at : self._at + 1]
            self._read()

    def _expect(self, mark: str) -> None:
        if self._peek() != mark:
            found = "the file ends" if self._at == len(self._text) else f"found {self._text[self._at]!r}"
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
                cut = error.msg.startswith("Unterminated") or error.pos >= len(self._text) - _LONGEST_WORD
                if self._ended or not cut:
                    self._take(error.pos)
                    raise self._error(error.msg) from error
            except RecursionError as error:
                raise self._error("nested too deeply") from error
            if len(self._text) - self._at > lines.MAX_LINE_BYTES:
                raise self._error(f"a row of more than {lines.MAX_LINE_BYTES} bytes; is a quote or a bracket missing?")
            self._read()

    def _take(self, end: int) -> bytes:
        """The bytes up to `end`, which is where reading goes on."""
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
        """Read on; twice as much each time that a value does not end, so that long ones cost no more."""
        raw = self._file.read(max(CHUNK_BYTES, len(self._text) - self._at))
        self._ended = not raw
        self._text = self._text[self._at :] + self._decode(raw, self._ended)
        self._at = 0

    def _error(self, problem: str) -> DataError:
        text = self._text
        what = "" if text.isascii() else _encoding(text.encode("utf-8", "surrogateescape"))
        return DataError(f"{self._name}:{self._line}:{self._column}: not JSON: {problem}; mend the file{what}")


def _encoding(text: bytes) -> str:
    try:
        text.decode()
    except UnicodeDecodeError:
        return f" ({guess(text)})"
    return ""
