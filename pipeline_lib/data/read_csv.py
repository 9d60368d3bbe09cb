"""Reads a csv file's records: with a header, commas, double quotes, and newlines in quotes."""

import csv
from collections.abc import Iterator
from typing import BinaryIO

from pipeline_lib.core.errors import DataError
from pipeline_lib.data import read_json
from pipeline_lib.data.conversations import BadRow, Reason
from pipeline_lib.data.encodings import guess
from pipeline_lib.data.read_json import Line, RawRow, RowPosition

OTHER_SEPARATORS = (";", "\t", "|")


def records(file: BinaryIO, name: str) -> Iterator[RawRow]:
    """Yield all records of `file`, which messages call `name`; blank lines are skipped.

    Raises DataError if the header cannot be used, or if unbalanced quotes make the end of a record
    uncertain.
    """
    # process-wide; the csv module's default is 128 KiB
    csv.field_size_limit(read_json.MAX_LINE_BYTES)
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
            value = None
            if fields is not None and bad is None:
                value, bad = _named(header, fields)
            place = RowPosition(name, line=source.first_line, byte_offset=source.byte_offset)
            yield RawRow(place, source.beginning if bad else None, value, bad)


def _named(header: list[str], fields: list[str]) -> tuple[dict[str, str] | None, BadRow | None]:
    """Return the fields by name, or the reason why the record is bad.

    Spreadsheets leave empty columns without a name at the end. A single unnamed column may hold
    values, because some programs write row numbers there. Values in several unnamed columns would
    be lost, whether they are notes or the rest of a text with an unquoted comma, so such a record
    is bad.
    """
    if len(fields) != len(header):
        return None, BadRow(
            Reason.BAD_CSV, f"{len(fields)} fields where the header has {len(header)}"
        )
    if header.count("") > 1:
        lost = next(
            (
                field
                for name, field in zip(header, fields, strict=True)
                if not name and field.strip()
            ),
            None,
        )
        if lost is not None:
            return None, BadRow(
                Reason.BAD_CSV,
                f"{lost!r:.60} stands in a column without a name; name it or empty it",
            )
        return {name: field for name, field in zip(header, fields, strict=True) if name}, None
    return dict(zip(header, fields, strict=True)), None


def _checked_header(fields: list[str] | None, bad: BadRow | None, where: str) -> list[str]:
    if fields is None or bad is not None:
        problem = bad.detail if bad else "it is missing"
        if "new-line character" in problem:
            problem = "its lines end in CR alone, or a field holds one and no quotes"
        raise DataError(
            f"{where}: cannot read the header: {problem}; save the file as csv in UTF-8 with lines "
            "that end in LF"
        )
    separator = next(
        (mark for mark in OTHER_SEPARATORS if len(fields) == 1 and mark in fields[0]), None
    )
    if separator is not None:
        problem = (
            f"the header is one column, {fields[0]!r:.60}: it is probably separated by "
            f"{separator!r}"
        )
        raise DataError(f"{where}: {problem}; save the file with commas")
    twice = [field for field in fields if field and fields.count(field) > 1]
    if twice:
        raise DataError(f"{where}: the header has {twice[0]!r} twice; rename one")
    return fields


def _undecodable(fields: list[str]) -> BadRow | None:
    """Return the reason if a field is not UTF-8: its bad bytes became lone surrogates.

    UTF-8 has no lone surrogates.
    """
    for number, field in enumerate(fields, start=1):
        try:
            field.encode()
        except UnicodeEncodeError:
            what = guess(field.encode("utf-8", "surrogateescape"))
            return BadRow(Reason.BAD_UTF8, f"field {number} is not UTF-8; {what}")
    return None


class _RecordLines:
    """An iterator over a file's lines for csv.reader, which takes each record's lines."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._lines = read_json.lines(file)
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
        """Return the next line.

        Raises DataError if the record gets too long, because its end is then unknown.
        """
        line = next(self._lines)
        if not self.first_line:
            self.first_line = line.number
            self.byte_offset = line.byte_offset
            self.beginning = line.text[: read_json.KEPT_BYTES]
        self._last = line
        self._size_bytes += len(line.text)
        if line.bad or self._size_bytes > read_json.MAX_LINE_BYTES:
            raise self._lost(f"a row of more than {read_json.MAX_LINE_BYTES} bytes")
        return line.text.decode("utf-8", "surrogateescape")

    def check_line_by_itself(self, error: csv.Error) -> None:
        """Raise DataError unless, despite `error`, the next line surely begins another record."""
        if self._last.number != self.first_line or self._last.text.count(b'"') % 2:
            raise self._lost(str(error))

    def _lost(self, problem: str) -> DataError:
        place = f"{self._name}:{self.first_line}"
        up_to = f" up to line {self._last.number}" if self._last.number != self.first_line else ""
        remedy = (
            "cannot tell where the row ends; mend its quotes (within quotes '\"' is written '\"\"')"
        )
        return DataError(f"{place}: {problem}{up_to}: {remedy}")
