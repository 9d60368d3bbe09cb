"""What the first rows of a local data file show before anything runs: layout, pictures, preference data, damage."""

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

from pipeline_lib.config.schema import FileData
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.conversations import BadRow, Content, WrongFile
from pipeline_lib.data.layouts import Layout, detect, to_content
from pipeline_lib.data.read_files import CorpusFile, rejected, value_of


@dataclass(frozen=True)
class FirstRow:
    """The `format` of a file's first row, None if it is not known, and why the tokenize stage would refuse the file."""

    format: str | None = None
    problem: str | None = None


def first_row(path: Path, source: FileData, *, may_be_bad: bool) -> FirstRow:
    """Return what the first row of the file at `path` of `source` shows.

    If the row `may_be_bad`, the stage would put it aside and go on, so it is a problem only if the stage would stop in
    any case.
    """
    status = path.stat()
    reading = source.model_dump_json(include={"source", "path", "format", "columns", "roles"})
    return _first_row(path, (status.st_size, status.st_mtime_ns), reading, may_be_bad)


@lru_cache(maxsize=1024)
def _first_row(path: Path, _stamp: tuple[int, int], reading: str, may_be_bad: bool) -> FirstRow:
    """Return the first row, cached by the file's size and time: the experiments of a sweep share their files."""
    source = FileData.model_validate_json(reading)
    row_format = None if source.format == "auto" else source.format
    try:
        file = CorpusFile(path)
        file.refuse_media(source.ignored)
        row = next(iter(file))
        try:
            value = value_of(row)
            row_format = row_format or detect(value, source.columns)
            to_content(value, Layout(row_format, source.columns, source.roles))
        except BadRow as bad:
            return FirstRow(row_format, None if may_be_bad else f"{row.place}: {rejected(row, bad).detail}")
        except WrongFile as wrong:
            return FirstRow(row_format, f"{row.place}: the row {wrong}")
    except DataError as error:
        return FirstRow(row_format, str(error))
    return FirstRow(row_format)


def first_contents(path: Path, source: FileData, most: int) -> tuple[list[Content], float]:
    """Return the content of the first `most` rows of the file at `path`, and how many times as many rows it has.

    Rows that cannot be used are left out: the tokenize stage tells what is wrong with them.
    """
    file, contents, rows, layout = CorpusFile(path), list[Content](), 0, None
    with suppress(DataError, WrongFile, OSError):
        for row in islice(file, most):
            rows += 1
            with suppress(BadRow):
                value = value_of(row)
                if layout is None:
                    row_format = detect(value, source.columns) if source.format == "auto" else source.format
                    layout = Layout(row_format, source.columns, source.roles)
                contents.append(to_content(value, layout))
    return contents, 1.0 if rows < most or not file.fraction_read else 1 / file.fraction_read
