"""What the first rows of a local data file show before anything runs: layout, pictures, preference data, damage."""

from contextlib import suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path

from pipeline_lib.config.schema import FileData
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.conversations import BadRow, Content, WrongFile
from pipeline_lib.data.layouts import Layout, detect, to_content
from pipeline_lib.data.read_files import CorpusFile, rejected, value_of


def first_row_problem(path: Path, source: FileData, *, may_be_bad: bool) -> str | None:
    """Return why the tokenize stage would refuse the file at `path` of `source` at its first row; None if it would not.

    If the row `may_be_bad`, the stage would put it aside and go on, so only what stops it in any case is returned.
    """
    status = path.stat()
    reading = source.model_dump_json(include={"source", "path", "format", "columns", "roles"})
    return _problem(path, (status.st_size, status.st_mtime_ns), reading, may_be_bad)


@lru_cache(maxsize=1024)
def _problem(path: Path, _stamp: tuple[int, int], reading: str, may_be_bad: bool) -> str | None:
    """Return the problem, cached by the file's size and time: the experiments of a sweep share their files."""
    source = FileData.model_validate_json(reading)
    try:
        file = CorpusFile(path)
        file.refuse_media(source.ignored)
        row = next(iter(file))
        try:
            value = value_of(row)
            row_format = detect(value, source.columns) if source.format == "auto" else source.format
            to_content(value, Layout(row_format, source.columns, source.roles))
        except BadRow as bad:
            return None if may_be_bad else f"{row.place}: {rejected(row, bad).detail}"
        except WrongFile as wrong:
            return f"{row.place}: the row {wrong}"
    except DataError as error:
        return str(error)
    return None


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
