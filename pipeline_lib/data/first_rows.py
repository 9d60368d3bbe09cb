"""What a local data file's first rows show before a run: layout, pictures, preferences, damage."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Generic, TypeVar

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
    return _first_row(path, stamp_of(path), _reading_of(source), may_be_bad)


def _reading_of(source: FileData) -> str:
    """Return the settings of `source` by which its rows are read, as JSON: the key of a cache."""
    return source.model_dump_json(include={"source", "path", "format", "columns", "roles"})


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
    """Return what is wrong with a row, and where it is."""
    reason = bad.reason.value.replace("_", " ")
    text = f"{row.place}: {reason}: {rejected(row, bad).detail}"
    if bad.reason == Reason.BAD_JSON and b"," in (row.text or b""):
        text += "; if the file is a table with commas, call it .csv"
    return text


@dataclass(frozen=True)
class FirstRows(Generic[T]):
    """What the first `rows` rows of a file show, which stand for `times` as many.

    `used` is what is made of each row that can be used. `bad` others cannot, and `first_bad` says
    where the first of them is and why.
    """

    used: tuple[T, ...]
    rows: int
    times: float
    bad: int
    first_bad: str


def first_rows(path: Path, source: FileData, most: int, of: Callable[[Content], T]) -> FirstRows[T]:
    """Return the first rows at `path`, with `of` the content of each that can be used.

    They are `most` at most, and of MOST_BYTES about; none of a file that cannot be read at all: the
    tokenize stage tells what is wrong with it.
    """
    file = CorpusFile(path, own_keys=source.columns.values())
    used = list[T]()
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
                used.append(of(to_content(value, layout)))
            except BadRow as found:
                bad += 1
                first_bad = first_bad or _problem_of(row, found)
    times = 1 / min(1.0, share) if share else 1.0
    return FirstRows(tuple(used), read, times, bad, first_bad)


def sizes_of_first_rows(path: Path, source: FileData, most: int) -> FirstRows[int]:
    """Return the first rows at `path` with the UTF-8 bytes of the text of each."""
    return _sizes_of_first_rows(path, stamp_of(path), _reading_of(source), most)


@lru_cache(maxsize=1024)
def _sizes_of_first_rows(path: Path, _stamp: Stamp, reading: str, most: int) -> FirstRows[int]:
    """Return them, cached by the file's size and time: a sweep shares its files."""
    return first_rows(path, FileData.model_validate_json(reading), most, _bytes_of)


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
