"""Reads the rows of a parquet file as plain values, some hundreds at a time.

Arrow gives every struct of a column all keys that any of them has, null where a row has none: so null means missing,
and is left out on all levels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from pipeline_lib.base.errors import DataError
from pipeline_lib.data.rows.conversation import BadRow, Reason

BATCH_ROWS = 256
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
            for batch in file.iter_batches(BATCH_ROWS, use_threads=False):
                for value, bad in _values(batch):
                    number += 1
                    yield ParquetRow(number, of, _without_nulls(value), bad)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{name}: not parquet, or damaged, after row {number}: {reason}; get the file again") from error


def _values(batch: Any) -> list[tuple[Any, BadRow | None]]:
    try:
        return [(value, None) for value in batch.to_pylist(maps_as_pydicts="strict")]
    except (ValueError, KeyError, OverflowError):
        return [_value(batch.slice(row, 1)) for row in range(batch.num_rows)]


def _value(row: Any) -> tuple[Any, BadRow | None]:
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
