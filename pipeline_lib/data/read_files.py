"""Read data files by row in bounded memory: .json, .jsonl, .csv (also .gz), .parquet and .arrow.

Every row is yielded with its position, and with the reason if it is unusable; no row is lost.
`value_of` parses the JSON, so that workers can parse rows in parallel.
"""

import gzip
import io
import json
import re
import zlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from pipeline_lib.config.schema import IGNORE
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.text import redact
from pipeline_lib.data.conversations import BadRow, Reason
from pipeline_lib.data.encodings import guess, utf_16_name
from pipeline_lib.data.read_csv import records
from pipeline_lib.data.read_json import (
    BOM,
    HEAD_BYTES,
    KEPT_BYTES,
    Form,
    JsonArray,
    RawRow,
    RowPosition,
    form_of,
    lines,
)
from pipeline_lib.data.row_fields import is_turns
from pipeline_lib.data.strict_json import parse

EXCERPT_CHARS = 200
_PYTHON = re.compile(rb"[\[{]+\s*'")
ROWS_PER_UPDATE = 256  # of fraction_read


@dataclass(frozen=True)
class Rejected:
    """A row that cannot be used, with its beginning.

    Credentials in `detail` and `excerpt` are masked.
    """

    reason: Reason
    detail: str
    place: RowPosition
    excerpt: str

    def to_json(self) -> dict[str, Any]:
        """Return the entry for quarantine.jsonl."""
        place = {key: value for key, value in vars(self.place).items() if value is not None}
        return {"reason": self.reason, "detail": self.detail, **place, "excerpt": self.excerpt}


class CorpusFile:
    """An iterable over the rows of one file, in order.

    `fraction_read` is the progress, from 0 to 1.
    """

    def __init__(self, path: Path, name: str | None = None, own_keys: Collection[str] = ()) -> None:
        """Read from `path`, whose suffix determines its file type; messages call it `name`.

        `own_keys` are the keys of rows that the config names.
        """
        self.path = path
        self._own_keys = own_keys
        self.name = name or str(path)
        self.fraction_read = 0.0
        self._is_columnar = path.suffix.lower() in (".parquet", ".arrow")

    def __iter__(self) -> Iterator[RawRow]:
        """Yield all rows.

        Raises DataError if the file has no rows, has an unknown type, or is damaged.
        """
        number = 0
        rows = self._columns() if self._is_columnar else self._text()
        for row in rows:
            number += 1
            yield row
        if not number:
            raise DataError(f"{self.name}: holds no rows; remove it from the config or fill it")
        self.fraction_read = 1.0

    def schema_names(self) -> set[str]:
        """Return the names of columns and keys in the file's schema, if parquet or Arrow.

        It is empty for other files.
        """
        if not self._is_columnar:
            return set()
        from pipeline_lib.data.read_arrow import schema_names

        return schema_names(self.path)

    def refuse_media(self, ignored: Collection[str]) -> None:
        """Raise DataError if a column or key holds media by the schema and is not `ignored`.

        Media are pictures and sound.
        """
        if not self._is_columnar:
            return
        from pipeline_lib.data.read_arrow import media_columns

        for key, kind in media_columns(self.path).items():
            if key not in ignored:
                raise DataError(
                    f"{self.name}: {key!r} is of type {kind}, by the features that `datasets` "
                    "wrote: only text is "
                    f"supported; to leave it out set columns: {{{key}: {IGNORE}}}"
                )

    def _columns(self) -> Iterator[RawRow]:
        # Imported here, because processes that only parse rows do not need Arrow.
        from pipeline_lib.data.read_arrow import columnar_rows

        for row, fraction in columnar_rows(self.path, self.name):
            self.fraction_read = fraction
            yield row

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
            raise DataError(
                f"{self.name}: the text is UTF-16; convert the file to UTF-8: iconv -f {wide} -t "
                "UTF-8"
            )
        if name.endswith(".csv"):
            return records(file, self.name)
        if not name.endswith((".json", ".jsonl")):
            raise DataError(
                f"{self.name}: expected .json, .jsonl or .csv (each also with .gz), .parquet or "
                ".arrow; rename it"
            )
        head = _head_of(file)
        form = form_of(head, self._own_keys)
        if form in (Form.WRAPPED, Form.SEQUENCE):
            return iter(JsonArray(file, self.name, form))
        if name.endswith(".jsonl"):
            return self._lines(file)
        return self._json(file, head)

    def _json(self, file: BinaryIO, head: bytes) -> Iterator[RawRow]:
        head = head.removeprefix(BOM).lstrip()
        while not head and (read := file.read(HEAD_BYTES)):
            head = read.lstrip()
        file.seek(0)
        first = head[:1]
        if first == b"{":
            return self._lines(file, checked=True)
        if first != b"[":
            what = (
                "the file is empty"
                if not first
                else f"begins with {first.decode(errors='replace')!r}"
            )
            problem = f"{what}; expected an array of rows, or one object a line"
            raise DataError(f"{self.name}: {problem}; mend it, or remove it from the config")
        return iter(JsonArray(file, self.name))

    def _lines(self, file: BinaryIO, *, checked: bool = False) -> Iterator[RawRow]:
        """Yield the rows of a file with one row a line.

        If `checked`, raise DataError unless the first line is JSON.
        """
        is_first = True
        for line in lines(file):
            if line.text.strip() or line.bad:
                bad = line.bad
                if is_first and checked:
                    try:
                        json.JSONDecoder(strict=False).decode(line.text.decode(errors="replace"))
                    except (ValueError, RecursionError) as error:
                        problem = "begins with an object that is not whole on its line"
                        remedy = (
                            "a .json file has to be one array of rows, [{...}, ...], or to "
                            "have one object a line"
                        )
                        raise DataError(
                            f"{self.name}:{line.number}: {problem}; {remedy}"
                        ) from error
                elif (
                    is_first and line.text.lstrip().startswith(b"[") and not _is_of_turns(line.text)
                ):
                    bad = BadRow(
                        Reason.NOT_AN_OBJECT,
                        "begins with '[': a file that is one array is called .json; rename it",
                    )
                is_first = False
                place = RowPosition(self.name, line=line.number, byte_offset=line.byte_offset)
                yield RawRow(place, line.text, None, bad)


def count_rows(path: Path, own_keys: Collection[str] = ()) -> int:
    """Return the number of rows in the file at `path`, unusable ones too; all of it is read.

    `own_keys` are the keys of rows that the config names. Raises DataError as CorpusFile does, and
    OSError.
    """
    return sum(1 for _ in CorpusFile(path, own_keys=own_keys))


def _head_of(file: io.BufferedReader) -> bytes:
    """Return the beginning of `file`, as far as it is not damaged, and go back to its start."""
    head = b""
    with suppress(EOFError, gzip.BadGzipFile, zlib.error):
        while len(head) < HEAD_BYTES and (more := file.read1(1 << 16)):
            head += more
    file.seek(0)
    return head


def _is_of_turns(text: bytes) -> bool:
    """Return whether a line is a list of turns: a conversation without a key."""
    try:
        return is_turns(parse(text.decode()))
    except ValueError:
        return False


def value_of(row: RawRow) -> Any:
    """Return the value of `row`, parsed if it is JSON text. Raises BadRow."""
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
        raise BadRow(Reason.BAD_JSON, f"{error}{_json_remedy(row.text.strip())}") from error


def _json_remedy(text: bytes) -> str:
    """Return what to do about `text`, which is not JSON; "" if its shape is not known."""
    if b"\r" in text:
        return "; lines that end in CR alone are not told apart: let them end in LF"
    if _PYTHON.match(text):
        return (
            "; this is an object as Python prints it, in single quotes: write each row with "
            "json.dumps"
        )
    if text in (b"{", b"[", b"}", b"]", b"},"):
        return (
            "; an object goes over several lines: write one row a line, or one array into a "
            ".json file"
        )
    return ""


def rejected(row: RawRow, bad: BadRow) -> Rejected:
    """Return the quarantine entry for `row`, which is `bad`, with credentials masked."""
    return Rejected(bad.reason, redact(printable(bad.detail)), row.place, excerpt(row))


def excerpt(row: RawRow) -> str:
    """Return the beginning of `row`, at most EXCERPT_CHARS characters, with credentials masked."""
    if row.text is not None:
        text = row.text[:KEPT_BYTES].decode(errors="replace").strip()
    else:
        text = json.dumps(row.value, ensure_ascii=False, default=str, skipkeys=True)[:KEPT_BYTES]
    return printable(redact(text)[:EXCERPT_CHARS])


def printable(text: str) -> str:
    """Return `text` with characters that UTF-8 cannot encode replaced by question marks."""
    return text.encode(errors="replace").decode()
