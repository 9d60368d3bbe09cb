"""What a local data file's first rows show before a run: layout, pictures, preferences, damage."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from pipeline_lib.config.schema import FileData
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.conversations import BadRow, Content, Reason, Text, WrongFile
from pipeline_lib.data.layouts import layout_of, to_content
from pipeline_lib.data.read_files import CorpusFile, rejected, value_of
from pipeline_lib.data.read_json import RawRow

T = TypeVar("T")
MOST_BYTES = 1 << 25  # of text, of which a file's first rows are read


@dataclass(frozen=True)
class Stamp:
    """What changes with a file's content; a sweep's experiments share what was read of one."""

    size: int
    mtime_ns: int


def stamp_of(path: Path) -> Stamp:
    """Return the stamp of the file at `path`. Raise OSError."""
    status = path.stat()
    return Stamp(status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class FirstRow:
    """The `format` of a file's first row, or None, and why tokenize would refuse the file."""

    format: str | None = None
    problem: str | None = None


def first_row(path: Path, source: FileData, *, may_be_bad: bool) -> FirstRow:
    """Return what the first row of the file at `path` of `source` shows.

    If the row `may_be_bad`, the stage would put it aside and go on, so it is a problem only if the
    stage would stop in any case.
    """
    reading = source.model_dump_json(include={"source", "path", "format", "columns", "roles"})
    return _first_row(path, stamp_of(path), reading, may_be_bad)


@lru_cache(maxsize=1024)
def _first_row(path: Path, _stamp: Stamp, reading: str, may_be_bad: bool) -> FirstRow:
    """Return the first row, cached by the file's size and time: a sweep shares its files."""
    source = FileData.model_validate_json(reading)
    row_format = None if source.format == "auto" else source.format
    try:
        file = CorpusFile(path, own_keys=source.columns.values())
        file.refuse_media(source.ignored)
        row = next(iter(file))
        try:
            value = value_of(row)
            layout = layout_of(value, source)
            row_format = layout.format
            to_content(value, layout)
        except BadRow as bad:
            return FirstRow(row_format, None if may_be_bad else _problem_of(row, bad))
        except WrongFile as wrong:
            return FirstRow(row_format, f"{row.place}: the row {wrong}")
    except DataError as error:
        return FirstRow(row_format, str(error))
    return FirstRow(row_format)


def _problem_of(row: RawRow, bad: BadRow) -> str:
    """Return what is wrong with the first row of a file."""
    reason = bad.reason.value.replace("_", " ")
    text = f"{row.place}: {reason}: {rejected(row, bad).detail}"
    if bad.reason == Reason.BAD_JSON and b"," in (row.text or b""):
        text += "; if the file is a table with commas, call it .csv"
    return text


def first_rows(
    path: Path, source: FileData, most: int, of: Callable[[Content], T]
) -> tuple[list[T], float]:
    """Return `of` the content of the first rows at `path`, and the ratio of all rows to these.

    They are `most` at most, and of MOST_BYTES about. Rows that cannot be used are left out: the
    tokenize stage tells what is wrong with them.
    """
    file = CorpusFile(path, own_keys=source.columns.values())
    found = list[T]()
    layout = None
    read = 0
    share = 1.0
    with suppress(DataError, WrongFile, OSError):
        for row in file:
            offset = row.place.byte_offset
            if read == most or (offset or 0) > MOST_BYTES:
                share = file.fraction_read if offset is None else offset / _text_bytes(path)
                break
            read += 1
            with suppress(BadRow):
                value = value_of(row)
                layout = layout or layout_of(value, source)
                found.append(of(to_content(value, layout)))
    return found, 1 / min(1.0, share) if share else 1.0


@dataclass(frozen=True)
class SeenRows:
    """What the first rows of a file show: `rows` of them, which stand for `times` as many.

    `bad` cannot be used, and `first_bad` says where the first of them is and why. `bytes_of` are
    the UTF-8 bytes of the text of each of the others.
    """

    rows: int = 0
    times: float = 1.0
    bad: int = 0
    first_bad: str = ""
    bytes_of: tuple[int, ...] = ()


def seen_rows(path: Path, source: FileData, most: int) -> SeenRows:
    """Return what at most `most` rows at `path` show; none where the file cannot be read at all."""
    reading = source.model_dump_json(include={"source", "path", "format", "columns", "roles"})
    return _seen_rows(path, stamp_of(path), reading, most)


@lru_cache(maxsize=1024)
def _seen_rows(path: Path, _stamp: Stamp, reading: str, most: int) -> SeenRows:
    """Return what the rows show, cached by the file's size and time: a sweep shares its files."""
    source = FileData.model_validate_json(reading)
    file = CorpusFile(path, own_keys=source.columns.values())
    bytes_of = list[int]()
    layout = None
    read = 0
    bad = 0
    first_bad = ""
    share = 1.0
    with suppress(DataError, WrongFile, OSError):
        for row in file:
            offset = row.place.byte_offset
            if read == most or (offset or 0) > MOST_BYTES:
                share = file.fraction_read if offset is None else offset / _text_bytes(path)
                break
            read += 1
            try:
                value = value_of(row)
                layout = layout or layout_of(value, source)
                bytes_of.append(_bytes_of(to_content(value, layout)))
            except BadRow as found:
                bad += 1
                first_bad = first_bad or _problem_of(row, found)
    return SeenRows(read, 1 / min(1.0, share) if share else 1.0, bad, first_bad, tuple(bytes_of))


def _bytes_of(content: Content) -> int:
    """Return the bytes of a text, or of all messages."""
    if isinstance(content, Text):
        return len(content.text.encode(errors="replace"))
    return sum(len(message["content"].encode(errors="replace")) for message in content.messages)


def _text_bytes(path: Path) -> int:
    """Return the size of a file's text: gzip writes it at the end, modulo 2^32."""
    size = path.stat().st_size
    if path.suffix.lower() != ".gz":
        return max(1, size)
    with path.open("rb") as file:
        file.seek(max(0, size - 4))
        text = int.from_bytes(file.read(4), "little")
    while text < size:  # text does not grow when it is compressed
        text += 1 << 32
    return text
