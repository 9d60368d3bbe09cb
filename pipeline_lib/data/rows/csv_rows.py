"""Reads the records of a csv file: a header, commas, double quotes, newlines within quotes."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from pipeline_lib.base.errors import DataError
from pipeline_lib.data.rows import lines
from pipeline_lib.data.rows.conversation import BadRow, Reason
from pipeline_lib.data.rows.encodings import guess
from pipeline_lib.data.rows.lines import Line

OTHER_SEPARATORS = (";", "\t", "|")


@dataclass(frozen=True, slots=True)
class Record:
    """A record under the names of the header, or why it is none; `text` is how it begins."""

    line: int
    byte_offset: int
    text: bytes
    fields: dict[str, str] | None
    bad: BadRow | None


def records(file: BinaryIO, name: str) -> Iterator[Record]:
    """All records of `file`, which messages call `name`; blank lines are none.

    Raises DataError if the header cannot be used, or where quotes that do not match leave open which lines belong
    together.
    """
    csv.field_size_limit(lines.MAX_LINE_BYTES)  # the csv module has one limit for the process: 128 KiB
    source = _RecordLines(file, name)
    reader = csv.reader(source, strict=True)
    header: list[str] | None = None
    while True:
        source.begin_record()
        fields, bad = None, None
        try:
            fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            source.check_line_by_itself(error)
            bad = BadRow(Reason.BAD_CSV, str(error))
        if fields == []:
            continue
        bad = bad or _undecodable(fields or [])
        if header is None:
            if bad is not None and b"\0" in source.beginning:
                raise DataError(f"{name}: the header holds zero bytes; {guess(source.beginning)}")
            header = _checked_header(fields, bad, f"{name}:{source.first_line}")
        else:
            yield _record(source, header, fields, bad)


def _record(source: "_RecordLines", header: list[str], fields: list[str] | None, bad: BadRow | None) -> Record:
    if fields is not None and bad is None and len(fields) != len(header):
        bad = BadRow(Reason.BAD_CSV, f"{len(fields)} fields where the header has {len(header)}")
    named = None
    if fields is not None and bad is None:
        named, bad = _named(header, fields)
    return Record(source.first_line, source.byte_offset, source.beginning, named, bad)


def _named(header: list[str], fields: list[str]) -> tuple[dict[str, str] | None, BadRow | None]:
    """The fields by name, or why that cannot be.

    Spreadsheets leave empty columns without a name at the end. A single one may hold values: some write the numbers
    of the rows so. Values of several would be lost, be they notes or the rest of a text whose comma stands unquoted.
    """
    if header.count("") > 1:
        lost = next((field for name, field in zip(header, fields, strict=True) if not name and field.strip()), None)
        if lost is not None:
            return None, BadRow(Reason.BAD_CSV, f"{lost!r:.60} stands in a column without a name; name it or empty it")
        return {name: field for name, field in zip(header, fields, strict=True) if name}, None
    return dict(zip(header, fields, strict=True)), None


def _checked_header(fields: list[str] | None, bad: BadRow | None, where: str) -> list[str]:
    if fields is None or bad is not None:
        problem = bad.detail if bad else "it is missing"
        if "new-line character" in problem:
            problem = "its lines end in CR alone, or a field holds one and no quotes"
        raise DataError(
            f"{where}: cannot read the header: {problem}; save the file as csv in UTF-8 with lines that end in LF"
        )
    separator = next((mark for mark in OTHER_SEPARATORS if len(fields) == 1 and mark in fields[0]), None)
    if separator is not None:
        problem = f"the header is one column, {fields[0]!r:.60}: it is probably separated by {separator!r}"
        raise DataError(f"{where}: {problem}; save the file with commas")
    twice = [field for field in fields if field and fields.count(field) > 1]
    if twice:
        raise DataError(f"{where}: the header has {twice[0]!r} twice; rename one")
    return fields


def _undecodable(fields: list[str]) -> BadRow | None:
    """Bytes that are not UTF-8 were let through as half surrogates, which UTF-8 cannot express otherwise."""
    for field in fields:
        try:
            field.encode()
        except UnicodeEncodeError:
            what = guess(field.encode("utf-8", "surrogateescape"))
            return BadRow(Reason.BAD_UTF8, f"{field!r:.60} is not UTF-8; {what}")
    return None


class _RecordLines:
    """The lines of a file for csv.reader, which asks for as many as a record has."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._lines = lines.lines(file)
        self._name = name
        self.begin_record()

    def begin_record(self) -> None:
        self.first_line = 0
        self.byte_offset = 0
        self.beginning = b""
        self._last = Line(0, 0, b"")
        self._size_bytes = 0

    def __iter__(self) -> "_RecordLines":
        return self

    def __next__(self) -> str:
        """The next line. Raises DataError if the record gets too long: where it ends cannot be known."""
        line = next(self._lines)
        if not self.first_line:
            self.first_line, self.byte_offset = line.number, line.byte_offset
            self.beginning = line.text[: lines.KEPT_BYTES]
        self._last = line
        self._size_bytes += len(line.text)
        if line.bad or self._size_bytes > lines.MAX_LINE_BYTES:
            raise self._lost(f"a row of more than {lines.MAX_LINE_BYTES} bytes")
        return line.text.decode("utf-8", "surrogateescape")

    def check_line_by_itself(self, error: csv.Error) -> None:
        """Raise DataError unless the next line surely begins another record, in spite of `error`."""
        if self._last.number != self.first_line or self._last.text.count(b'"') % 2:
            raise self._lost(str(error))

    def _lost(self, problem: str) -> DataError:
        place = f"{self._name}:{self.first_line}"
        up_to = f" up to line {self._last.number}" if self._last.number != self.first_line else ""
        remedy = "cannot tell where the row ends; mend its quotes (within quotes '\"' is written '\"\"')"
        return DataError(f"{place}: {problem}{up_to}: {remedy}")
