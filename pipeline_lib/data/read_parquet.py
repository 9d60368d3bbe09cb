"""Reads the rows of a parquet file as plain values, a few at a time.

Arrow gives every struct of a column all keys that any row has, and null where a row lacks one. So a null in a struct
means a missing key and is left out; in maps and lists it is a value.

A text that a row group stores once can be the value of all its rows, so a small file may decompress to any size. No
value is larger than its decompressed row group, so the number of rows read at a time fits MAX_LINE_BYTES even if each
is that large. This does not bound a single row whose list repeats a stored text: it is rejected, but only after it was
decompressed. Import this module only where there is a parquet file: pyarrow takes memory and starts a thread.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from pipeline_lib.core.errors import DataError
from pipeline_lib.data import read_json
from pipeline_lib.data.conversations import BadRow, Reason
from pipeline_lib.data.read_json import Place, RawRow

BATCH_ROWS = 16  # larger batches are not faster
READ_BYTES = 1 << 20
Cleaner = Callable[[Any], Any]
_LISTS = (
    *(pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list),
    *(pa.types.is_list_view, pa.types.is_large_list_view),
)


def parquet_rows(path: Path, name: str) -> Iterator[tuple[RawRow, int]]:
    """Yield each row of `path`, which messages call `name`, and the number of rows in the file.

    Raises DataError if the file is damaged or repeats a column.
    """
    number = 0
    try:
        with pq.ParquetFile(path, buffer_size=READ_BYTES, pre_buffer=False, page_checksum_verification=True) as file:
            columns = file.schema_arrow.names
            if len(set(columns)) < len(columns):
                twice = next(column for column in columns if columns.count(column) > 1)
                raise DataError(f"{name}: has two columns named {twice!r}; rename one")
            cleaners = {field.name: _cleaner(field.type) for field in file.schema_arrow}
            for group in range(file.metadata.num_row_groups):
                group_bytes = file.metadata.row_group(group).total_byte_size
                batch_rows = min(BATCH_ROWS, max(1, read_json.MAX_LINE_BYTES // max(1, group_bytes)))
                for batch in file.iter_batches(batch_rows, row_groups=[group], use_threads=False):
                    for value, bad in _values(batch):
                        number += 1
                        if value is not None:
                            value = {key: _cleaned(item, cleaners[key]) for key, item in value.items()}
                        yield RawRow(Place(name, row=number), None, value, bad), file.metadata.num_rows
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{name}: not parquet, or damaged, after row {number}: {reason}; get the file again") from error


def _values(batch: Any) -> Iterator[tuple[Any, BadRow | None]]:
    if batch.nbytes <= read_json.MAX_LINE_BYTES:
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
    if row.nbytes > read_json.MAX_LINE_BYTES:
        return None, BadRow(Reason.LINE_TOO_LONG, f"more than {read_json.MAX_LINE_BYTES} bytes in one row")
    try:
        return row.to_pylist(maps_as_pydicts="strict")[0], None
    except UnicodeDecodeError as error:
        return None, BadRow(Reason.BAD_UTF8, f"text that is not UTF-8: {error.reason} at byte {error.start + 1} of it")
    except (ValueError, KeyError, OverflowError) as error:  # a map with a key twice, a date before Christ
        return None, BadRow(Reason.BAD_VALUE, str(error).partition("\n")[0])


def schema_names(path: Path) -> set[str]:
    """Return the names of the columns of the parquet file `path`, and of the fields of their structs."""
    with pq.ParquetFile(path) as file:
        return set(_names(pa.struct(list(file.schema_arrow))))


def _names(kind: Any) -> Iterator[str]:
    if isinstance(kind, pa.BaseExtensionType):
        yield from _names(kind.storage_type)
    elif pa.types.is_struct(kind):
        for field in kind:
            yield field.name
            yield from _names(field.type)
    elif pa.types.is_map(kind):
        yield from _names(kind.item_type)
    elif any(is_kind(kind) for is_kind in _LISTS):
        yield from _names(kind.value_type)


def _cleaner(kind: Any) -> Cleaner | None:
    """Return a function that removes nulls from the structs in a value of type `kind`; None if it has no structs."""
    if isinstance(kind, pa.BaseExtensionType):
        return _cleaner(kind.storage_type)
    if pa.types.is_struct(kind):
        return partial(_clean_struct, {field.name: _cleaner(field.type) for field in kind})
    inner = None
    if pa.types.is_map(kind):
        inner = _cleaner(kind.item_type)
    elif any(is_kind(kind) for is_kind in _LISTS):
        inner = _cleaner(kind.value_type)
    return inner and partial(_clean_items, inner)


def _clean_struct(cleaners: Mapping[str, Cleaner | None], value: dict[str, Any]) -> dict[str, Any]:
    return {key: _cleaned(item, cleaners[key]) for key, item in value.items() if item is not None}


def _clean_items(cleaner: Cleaner, value: Any) -> Any:
    """Clean each item of a list or a map; nulls among the items are values and stay."""
    if isinstance(value, dict):
        return {key: _cleaned(item, cleaner) for key, item in value.items()}
    return [_cleaned(item, cleaner) for item in value]


def _cleaned(value: Any, cleaner: Cleaner | None) -> Any:
    return value if value is None or cleaner is None else cleaner(value)
