"""Reads the rows of a parquet file as plain values, a few at a time.

Arrow gives every struct of a column all keys that any of them has, null where a row has none: so null means missing,
and is left out on all levels.

A text that a row group stores once can be the value of all its rows, so a small file may unpack to any size. No value
is larger than its group unpacked: as many rows are read at a time as fit MAX_LINE_BYTES if each were that large.
What this does not bound is a single row whose list repeats a stored text; it is refused, but only once it is unpacked.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from pipeline_lib.base.errors import DataError
from pipeline_lib.data.rows import lines
from pipeline_lib.data.rows.conversation import BadRow, Reason

BATCH_ROWS = 16  # more are read no faster
READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ParquetRow:
    """A row, or why it has no value; `number` is from 1, `of` is how many the file has."""

    number: int
    of: int
    value: Any
    bad: BadRow | None


def parquet_rows(path: Path, name: str) -> Iterator[ParquetRow]:
    """All rows of `path`, which messages call `name`. Raises DataError where it cannot be read on."""
    number = 0
    try:
        with pq.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False, page_checksum_verification=True) as file:
            of = file.metadata.num_rows
            columns = file.schema_arrow.names
            if len(set(columns)) < len(columns):
                twice = next(column for column in columns if columns.count(column) > 1)
                raise DataError(f"{name}: has two columns named {twice!r}; rename one")
            for batch in _batches(file):
                for value, bad in _values(batch):
                    number += 1
                    yield ParquetRow(number, of, _without_nulls(value), bad)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{name}: not parquet, or damaged, after row {number}: {reason}; get the file again") from error


def _batches(file: Any) -> Iterator[Any]:
    for group in range(file.metadata.num_row_groups):
        group_bytes = file.metadata.row_group(group).total_byte_size
        rows = min(BATCH_ROWS, max(1, lines.MAX_LINE_BYTES // max(1, group_bytes)))
        yield from file.iter_batches(rows, row_groups=[group], use_threads=False)


def _values(batch: Any) -> Iterator[tuple[Any, BadRow | None]]:
    if batch.nbytes <= lines.MAX_LINE_BYTES:
        try:
            values = batch.to_pylist(maps_as_pydicts="strict")
        except (ValueError, KeyError, OverflowError):
            pass
        else:
            yield from ((value, None) for value in values)
            return
    for row in range(batch.num_rows):
        yield _value(batch.slice(row, 1))


def _value(row: Any) -> tuple[Any, BadRow | None]:
    if row.nbytes > lines.MAX_LINE_BYTES:
        return None, BadRow(Reason.LINE_TOO_LONG, f"more than {lines.MAX_LINE_BYTES} bytes in one row")
    try:
        return row.to_pylist(maps_as_pydicts="strict")[0], None
    except UnicodeDecodeError as error:
        return None, BadRow(Reason.BAD_UTF8, f"text that is not UTF-8: {error.reason} at byte {error.start + 1} of it")
    except (ValueError, KeyError, OverflowError) as error:  # a map with a key twice, a date before Christ
        return None, BadRow(Reason.BAD_VALUE, str(error).partition("\n")[0])


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
