"""Reads lines of bytes with their places, however long they are, in bounded memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from pipeline_lib.data.rows.conversation import BadRow, Reason

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
