"""What the first rows of local files tell before a run: broken ones, long ones, too few held out."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from pipeline_lib.config.content import data_files
from pipeline_lib.config.findings import Finding, finding_of
from pipeline_lib.config.schema import Config, DataSource, FileData
from pipeline_lib.core import units
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.first_rows import FirstRows, sizes_of_first_rows
from pipeline_lib.records.evaluation import MIN_DOCUMENTS

_READ_ROWS = 1024  # of each file
_READ_FILES = 20  # of a source
_BYTES_OF_TOKEN = 7  # at most, in any language: Chinese has 6 to 7, English 4 to 5
_MARGIN = 1.25  # what is held out is chosen by chance
_MOST_HELD_OUT = 0.5


@dataclass(frozen=True)
class _Seen:
    """What was seen of a source, and about how many rows that can be used it has in all."""

    files: tuple[FirstRows[int], ...]
    rows: float


def on_rows(config: Config) -> Iterator[Finding]:
    """Yield warnings about the rows of local files that the run would end at, or prove nothing by.

    Nothing is said of a source whose files cannot be read here: other findings name it.
    """
    seen = [_seen(source) for source in config.data.sources]
    known = [one for one in seen if one is not None]
    files = [file for one in known for file in one.files]
    yield from _broken(config, files)
    yield from _long(config, files)
    if len(known) == len(seen):
        yield from _held_out(config, known)


def _seen(source: DataSource) -> _Seen | None:
    if not isinstance(source, FileData):
        return None
    try:
        paths = data_files(source.path, source.split)
        files = tuple(sizes_of_first_rows(path, source, _READ_ROWS) for path in paths[:_READ_FILES])
    except (DataError, OSError):
        return None
    rows = sum(len(file.used) * file.times for file in files)
    rows *= len(paths) / max(1, len(files))
    return _Seen(files, min(rows, source.max_rows or math.inf))


def _broken(config: Config, files: list[FirstRows[int]]) -> Iterator[Finding]:
    """Yield a warning if more rows cannot be used than the tokenize stage allows."""
    rows = sum(file.rows for file in files)
    bad = sum(file.bad for file in files)
    allowed = config.tokenize.max_quarantined_fraction
    if not bad or bad <= allowed * rows:
        return
    first = next(file.first_bad for file in files if file.bad)
    yield finding_of(
        "warning",
        f"data.train: {units.count(bad, 'rows')} of the first {rows:,} cannot be used, and the run "
        f"would stop at tokenize. The first: {first}. Correct them, or allow them by "
        "tokenize.max_quarantined_fraction",
    )


def _long(config: Config, files: list[FirstRows[int]]) -> Iterator[Finding]:
    """Yield a warning if more rows are surely too long than the tokenize stage allows to drop."""
    tokenize = config.tokenize
    lengths = [size / _BYTES_OF_TOKEN for file in files for size in file.used]
    long = [length for length in lengths if length > tokenize.max_tokens]
    if tokenize.over_long != "drop" or len(long) <= tokenize.max_dropped_fraction * len(lengths):
        return
    yield finding_of(
        "warning",
        f"tokenize.max_tokens: {units.count(len(long), 'rows')} of the first {len(lengths):,} are "
        f"longer than {tokenize.max_tokens:,} tokens, and the run would stop at tokenize; set it, "
        f"with shard.block_tokens, to {_next_power(max(long)):,} or more, or set tokenize.over_long",
    )


def _held_out(config: Config, seen: list[_Seen]) -> Iterator[Finding]:
    """Yield a warning if so few documents are held out that nothing can be said by them."""
    data = config.data
    rows = sum(one.rows for one in seen[: len(data.train)])
    held_out = rows * data.held_out_fraction
    remedy = f"data.validation_fraction {_enough(rows)} would hold out {MIN_DOCUMENTS}"
    if _enough(rows) > _MOST_HELD_OUT:
        remedy = "more rows are needed, or a file of their own in data.validation"
    key = "data.validation_fraction"
    if data.validation:
        held_out = sum(one.rows for one in seen[len(data.train) :])
        key, remedy = "data.validation", "add rows to it"
    if not 0 < held_out < MIN_DOCUMENTS:
        return
    yield finding_of(
        "warning",
        f"{key}: about {units.count(round(held_out), 'rows')} would be held out, and with fewer "
        f"than {MIN_DOCUMENTS} the report cannot tell whether the model is better; {remedy}",
    )


def _enough(rows: float) -> float:
    """Return the fraction of `rows` that holds out MIN_DOCUMENTS, in hundredths."""
    return math.ceil(100 * _MARGIN * MIN_DOCUMENTS / max(1.0, rows)) / 100


def _next_power(tokens: float) -> int:
    return int(2 ** math.ceil(math.log2(tokens)))
