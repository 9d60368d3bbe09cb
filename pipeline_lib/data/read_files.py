"""Reads data files row by row, in bounded memory: .json, .jsonl and .csv, each also with .gz, and .parquet.

Every row is handed out with its place, or with the reason why it is none; no row is lost. JSON is not parsed here
but by `value_of`, so that whoever has many processors can do that on all of them.
"""

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from pipeline_lib.core.errors import DataError
from pipeline_lib.core.text import redact
from pipeline_lib.data.conversations import BadRow, Reason, parse
from pipeline_lib.data.read_json import BOM, KEPT_BYTES, JsonArray, guess, lines, utf_16_name
from pipeline_lib.data.read_tables import records

EXCERPT_CHARS = 200
ROWS_PER_UPDATE = 256  # of fraction_read


@dataclass(frozen=True)
class Place:
    """Where a row lies: its first line, or its number in an array or table, from 1; its first byte where known.

    In a compressed file bytes are counted as they are when unpacked.
    """

    file: str
    line: int | None = None
    row: int | None = None
    byte_offset: int | None = None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line is not None else f"{self.file}: row {self.row}"


@dataclass(frozen=True)
class RawRow:
    """A row before it is understood: one JSON text, a value that is already there, or why it is neither.

    A bad row's `text` is how it begins, if that is known.
    """

    place: Place
    text: bytes | None = None
    value: Any = None
    bad: BadRow | None = None


@dataclass(frozen=True)
class Rejected:
    """A row that cannot be used, and how it begins; both texts are fit to be shown."""

    reason: Reason
    detail: str
    place: Place
    excerpt: str

    def to_json(self) -> dict[str, Any]:
        """The form in which quarantine.jsonl holds it."""
        place = {key: value for key, value in vars(self.place).items() if value is not None}
        return {"reason": self.reason, "detail": self.detail, **place, "excerpt": self.excerpt}


class CorpusFile:
    """The rows of one file, in order. `fraction_read` follows the reading, from 0 to 1."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """Read `path`, whose suffix tells its kind; `name` is what messages call it."""
        self.path = path
        self.name = name or str(path)
        self.fraction_read = 0.0
        self._is_parquet = path.suffix.lower() == ".parquet"

    def __iter__(self) -> Iterator[RawRow]:
        """All rows. Raises DataError if the file has none, is of no known kind, or cannot be read on."""
        number = 0
        for row in self._parquet() if self._is_parquet else self._text():
            number += 1
            yield row
        if not number:
            raise DataError(f"{self.name}: holds no rows; remove it from data.train or fill it")
        self.fraction_read = 1.0

    def schema_names(self) -> set[str]:
        """The names of columns and keys that the file declares, whatever its rows hold; only parquet declares any."""
        if not self._is_parquet:
            return set()
        from pipeline_lib.data.read_tables import schema_names

        return schema_names(self.path)

    def _parquet(self) -> Iterator[RawRow]:
        # Here, because the processes that only parse rows would load all of Arrow for nothing.
        from pipeline_lib.data.read_tables import parquet_rows

        for row in parquet_rows(self.path, self.name):
            self.fraction_read = row.number / row.of
            yield RawRow(Place(self.name, row=row.number), None, row.value, row.bad)

    def _text(self) -> Iterator[RawRow]:
        size_bytes = max(1, self.path.stat().st_size)
        number = 0
        with self.path.open("rb") as stored:
            try:
                for row in self._rows(stored):
                    number += 1
                    if number % ROWS_PER_UPDATE == 0:
                        self.fraction_read = stored.tell() / size_bytes
                    yield row
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                problem = f"the compressed data is cut or damaged after row {number}: {error}"
                raise DataError(f"{self.name}: {problem}; get the file again") from error

    def _rows(self, stored: io.BufferedReader) -> Iterator[RawRow]:
        name = self.path.name.lower()
        file = stored
        if name.endswith(".gz"):
            name = name.removesuffix(".gz")
            file = io.BufferedReader(cast(io.RawIOBase, gzip.GzipFile(fileobj=stored)), 1 << 16)
        if wide := utf_16_name(file.peek(4)[:4]):
            raise DataError(f"{self.name}: the text is UTF-16; convert the file to UTF-8: iconv -f {wide} -t UTF-8")
        if name.endswith(".jsonl"):
            return self._lines(file)
        if name.endswith(".csv"):
            return self._csv(file)
        if name.endswith(".json"):
            return self._json(file)
        raise DataError(f"{self.name}: expected .json, .jsonl or .csv (each also with .gz), or .parquet; rename it")

    def _json(self, file: BinaryIO) -> Iterator[RawRow]:
        first = _first_character(file)
        if first == b"{":
            return self._lines(file, checked=True)
        if first != b"[":
            what = "the file is empty" if not first else f"begins with {first.decode(errors='replace')!r}"
            problem = f"{what}; expected an array of rows, or one object a line"
            raise DataError(f"{self.name}: {problem}; mend it, or remove it from data.train")
        return self._array(file)

    def _array(self, file: BinaryIO) -> Iterator[RawRow]:
        for element in JsonArray(file, self.name):
            place = Place(self.name, row=element.number, byte_offset=element.byte_offset)
            yield RawRow(place, element.text)

    def _lines(self, file: BinaryIO, *, checked: bool = False) -> Iterator[RawRow]:
        """The rows of a file that has one a line. If it is `checked`, the first shows that it is such a file."""
        is_first = True
        for line in lines(file):
            if line.text.strip() or line.bad:
                bad = line.bad
                if is_first and checked:
                    self._check_whole(line.text, line.number)
                elif is_first and line.text.lstrip().startswith(b"["):
                    bad = BadRow(
                        Reason.NOT_AN_OBJECT, "begins with '[': a file that is one array is called .json; rename it"
                    )
                is_first = False
                place = Place(self.name, line=line.number, byte_offset=line.byte_offset)
                yield RawRow(place, line.text, None, bad)

    def _check_whole(self, text: bytes, line: int) -> None:
        try:
            json.JSONDecoder(strict=False).decode(text.decode(errors="replace"))
        except (ValueError, RecursionError) as error:
            problem = "begins with an object that is not whole on its line"
            remedy = "a .json file has to be one array of rows, [{...}, ...], or to have one object a line"
            raise DataError(f"{self.name}:{line}: {problem}; {remedy}") from error

    def _csv(self, file: BinaryIO) -> Iterator[RawRow]:
        for record in records(file, self.name):
            place = Place(self.name, line=record.line, byte_offset=record.byte_offset)
            yield RawRow(place, record.text if record.bad else None, record.fields, record.bad)


def _first_character(file: BinaryIO) -> bytes:
    """The first byte of `file` that is neither space nor byte order mark; `file` is at its start again."""
    head = file.read(len(BOM)).removeprefix(BOM).lstrip()
    while not head and (read := file.read(4096)):
        head = read.lstrip()
    file.seek(0)
    return head[:1]


def value_of(row: RawRow) -> Any:
    """The value of `row`, parsed if it is JSON text. Raises BadRow."""
    if row.bad is not None:
        raise row.bad
    if row.text is None:
        return row.value
    try:
        return parse(row.text.decode())
    except UnicodeDecodeError as error:
        detail = f"byte {error.start + 1} of the row is not UTF-8; {guess(row.text)}"
        raise BadRow(Reason.BAD_UTF8, detail) from error
    except ValueError as error:
        ends = (
            "; lines that end in CR alone are not told apart: let them end in LF" if b"\r" in row.text.strip() else ""
        )
        raise BadRow(Reason.BAD_JSON, f"{error}{ends}") from error


def rejected(row: RawRow, bad: BadRow) -> Rejected:
    """The entry in the quarantine for `row`, which is `bad`; credentials in it are masked."""
    return Rejected(bad.reason, redact(printable(bad.detail)), row.place, excerpt(row))


def excerpt(row: RawRow) -> str:
    """How `row` begins, credentials masked: at most EXCERPT_CHARS characters."""
    if row.text is not None:
        text = row.text[:KEPT_BYTES].decode(errors="replace").strip()
    else:
        text = json.dumps(row.value, ensure_ascii=False, default=str, skipkeys=True)[:KEPT_BYTES]
    return printable(redact(text)[:EXCERPT_CHARS])


def printable(text: str) -> str:
    """`text` with what UTF-8 cannot hold replaced by question marks."""
    return text.encode(errors="replace").decode()
