"""Reads lines and JSON arrays in bounded memory, with the place of each row."""

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from pipeline_lib.core.errors import DataError
from pipeline_lib.data.conversations import BadRow, Reason

# Guesses what text that is not UTF-8 is instead, so that an error can say how to convert it.

_HIGH = re.compile(rb"[\x80-\xff]+")
_UTF_16 = {
    "UTF-16": re.compile(re.escape(codecs.BOM_UTF16_LE) + b"|" + re.escape(codecs.BOM_UTF16_BE)),
    "UTF-16LE": re.compile(rb"(?:[\t\n\r -~]\0){2}"),
    "UTF-16BE": re.compile(rb"(?:\0[\t\n\r -~]){2}"),
}


def utf_16_name(beginning: bytes) -> str | None:
    """Which UTF-16 a file is that begins with these 4 bytes: by its byte order mark, or by zeros; None if it is not."""
    return next((name for name, pattern in _UTF_16.items() if pattern.match(beginning)), None)


def guess(text: bytes) -> str:
    """What `text`, which is not UTF-8, probably is, and how to convert its file."""
    if (zero := text.find(b"\0")) >= 0:  # one of the two bytes of each character that ASCII has
        return f"the file is probably UTF-16: iconv -f {'UTF-16LE' if zero % 2 else 'UTF-16BE'} -t UTF-8"
    # In Chinese text nearly all characters are two bytes above 127; in Western text hardly two stand together.
    runs = _HIGH.findall(text)
    if 2 * sum(len(run) for run in runs if len(run) > 1) > sum(map(len, runs)) and _is_gb18030(text):
        return "the file is probably GBK: iconv -f GB18030 -t UTF-8"
    return "the file is probably Windows-1252 or Latin-1: iconv -f CP1252 -t UTF-8"


def _is_gb18030(text: bytes) -> bool:
    """Whether `text`, whose end may be cut, can be GB 18030, which holds GBK and GB 2312."""
    try:
        codecs.getincrementaldecoder("gb18030")().decode(text)
    except UnicodeDecodeError:
        return False
    return True


# Reads lines of bytes with their places, however long they are, in bounded memory.

BOM = b"\xef\xbb\xbf"
MAX_LINE_BYTES = 64 << 20  # of a line, and of a row in the kinds of files where a row has several lines
KEPT_BYTES = 4096  # of a line that is too long: enough to show how it begins


@dataclass(frozen=True, slots=True)
class Line:
    """A line with its end; `number` is from 1. One that is too long is cut, and `bad` says so."""

    number: int
    byte_offset: int
    text: bytes
    bad: BadRow | None = None


def lines(file: BinaryIO) -> Iterator[Line]:
    """All lines of `file`, blank ones too, the first without byte order mark. The last one needs no end."""
    offset = 0
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        size_bytes = len(raw)
        bad = None
        if size_bytes > MAX_LINE_BYTES:
            ends = "; its lines may end in CR alone" if b"\r" in raw[:KEPT_BYTES] else ""
            bad = BadRow(Reason.LINE_TOO_LONG, f"more than {MAX_LINE_BYTES} bytes in one line{ends}")
            size_bytes += 0 if raw.endswith(b"\n") else _skip_line(file)
            raw = raw[:KEPT_BYTES]
        yield Line(number, offset, raw.removeprefix(BOM) if number == 1 else raw, bad)
        offset += size_bytes


def _skip_line(file: BinaryIO) -> int:
    skipped = 0
    while part := file.readline(1 << 20):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


# Finds the elements of one large JSON array, a chunk of the file at a time.
#
# Elements are handed out as bytes: the decoder here only has to find where they end, so it lets pass what spoils no
# more than one element (NaN, a control character, a byte that is not UTF-8) for the reader of that row to refuse.

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
            if len(self._text) - self._at > MAX_LINE_BYTES:
                raise self._error(f"a row of more than {MAX_LINE_BYTES} bytes; is a quote or a bracket missing?")
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
