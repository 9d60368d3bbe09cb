"""Reads the rows of a parquet or Arrow file as plain values, a few at a time.

Arrow files are those of `datasets` (IPC streams) and of Feather (IPC files). They are
memory-mapped, so rows become values without a copy of the file in memory, unless its batches are
compressed.

Arrow gives every struct of a column all keys that any row has, and null where a row lacks one. So a
null in a struct means a missing key and is left out; in maps and lists it is a value.

A text that a row group stores once can be the value of all its rows, so a small file may decompress
to any size. No value is larger than its decompressed row group, so the number of rows read at a
time fits MAX_LINE_BYTES even if each is that large. This does not bound a single row whose list
repeats a stored text: it is rejected, but only after it was decompressed. Import this module only
where there is such a file: pyarrow takes memory and starts a thread.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]

from pipeline_lib.core.errors import DataError
from pipeline_lib.data import read_json
from pipeline_lib.data.conversations import BadRow, Reason
from pipeline_lib.data.read_json import RawRow, RowPosition
from pipeline_lib.data.strict_json import parse

BATCH_ROWS = 16  # larger batches are not faster
READ_BYTES = 1 << 20
Cleaner = Callable[[Any], Any]
_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)
_ARROW_FILE = b"ARROW1"  # an IPC file begins with it, and an IPC stream does not
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
# The features of `datasets` that are no text, in its metadata of a schema.
_MEDIA = ("Image", "Audio", "Video", "Pdf", "Nifti", "Mesh", "BioStructure")


def columnar_rows(path: Path, name: str) -> Iterator[tuple[RawRow, float]]:
    """Yield each row of `path`, which messages call `name`, and the fraction of the file read.

    Raises DataError if the file is damaged, not whole or repeats a column.
    """
    is_parquet = _is_parquet(path)
    batches_of = _parquet_batches if is_parquet else _arrow_batches
    number = 0
    read = 0.0
    try:
        for batch, fraction in batches_of(path, name):
            if not number:
                cleaners = {field.name: _cleaner(field.type) for field in batch.schema}
            for position, (value, bad) in enumerate(_values(batch), 1):
                number += 1
                if value is not None:
                    value, bad = _without_filling(value, cleaners)
                with_it = read + (fraction - read) * position / batch.num_rows
                yield RawRow(RowPosition(name, row=number), None, value, bad), with_it
            read = fraction
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        kind = "parquet" if is_parquet else "Arrow"
        raise DataError(
            f"{name}: not {kind}, or damaged, after row {number}: {reason}; get the file again"
        ) from error


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() == ".parquet"


def _parquet_batches(path: Path, name: str) -> Iterator[tuple[Any, float]]:
    """Yield batches of a few rows, and the fraction of the file that is read with each."""
    with pq.ParquetFile(
        path, buffer_size=READ_BYTES, pre_buffer=False, page_checksum_verification=True
    ) as file:
        _refuse_repeated(file.schema_arrow, name)
        rows = 0
        for group in range(file.metadata.num_row_groups):
            group_bytes = file.metadata.row_group(group).total_byte_size
            batch_rows = min(BATCH_ROWS, max(1, read_json.MAX_LINE_BYTES // max(1, group_bytes)))
            for batch in file.iter_batches(batch_rows, row_groups=[group], use_threads=False):
                rows += batch.num_rows
                yield batch, rows / file.metadata.num_rows


def _arrow_batches(path: Path, name: str) -> Iterator[tuple[Any, float]]:
    """Yield the same of an Arrow file.

    Raises DataError if a stream has no end: rows would be missing.
    """
    with pa.memory_map(str(path)) as source:
        if _is_arrow_file(source):
            file = pa.ipc.open_file(source)
            _refuse_repeated(file.schema, name)
            for index in range(file.num_record_batches):
                whole = file.get_batch(index)
                for batch, fraction in _slices(whole):
                    yield batch, (index + fraction) / file.num_record_batches
            return
        stream = pa.ipc.open_stream(source)
        _refuse_repeated(stream.schema, name)
        begin = source.tell()
        for whole in stream:
            for batch, fraction in _slices(whole):
                yield batch, (begin + fraction * (source.tell() - begin)) / source.size()
            begin = source.tell()
        end = source.tell()
        source.seek(end - len(_END_OF_STREAM))
        if end != source.size() or source.read() != _END_OF_STREAM:
            problem = "it goes on behind its end" if end != source.size() else "its end is missing"
            raise DataError(f"{name}: not one whole Arrow stream: {problem}; write the file again")


def _is_arrow_file(source: Any) -> bool:
    is_file: bool = source.read(len(_ARROW_FILE)) == _ARROW_FILE
    source.seek(0)
    return is_file


def _slices(batch: Any) -> Iterator[tuple[Any, float]]:
    """Yield a few rows of `batch` at a time, and the fraction of it that is read with them."""
    # its offsets are used as they are, so wrong ones would read any memory
    batch.validate(full=True)
    for begin in range(0, batch.num_rows, BATCH_ROWS):
        few = batch.slice(begin, BATCH_ROWS)
        # A dictionary counts as a whole for the size of each row, however few of its texts they
        # use.
        columns = [
            column.dictionary_decode() if _is_dictionary(column) else column
            for column in few.columns
        ]
        yield (
            pa.RecordBatch.from_arrays(columns, names=few.schema.names),
            (begin + few.num_rows) / batch.num_rows,
        )


def _is_dictionary(column: Any) -> bool:
    return bool(pa.types.is_dictionary(column.type))


def _refuse_repeated(schema: Any, name: str) -> None:
    columns = schema.names
    if len(set(columns)) < len(columns):
        twice = next(column for column in columns if columns.count(column) > 1)
        raise DataError(f"{name}: has two columns named {twice!r}; rename one")


def _without_filling(
    value: dict[str, Any], cleaners: Mapping[str, Cleaner | None]
) -> tuple[dict[str, Any] | None, BadRow | None]:
    """Return the row without nulls from Arrow, or why it is bad: its JSON may not parse."""
    try:
        return {key: _cleaned(item, cleaners[key]) for key, item in value.items()}, None
    except ValueError as error:
        return None, BadRow(Reason.BAD_JSON, str(error))


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
        return None, BadRow(
            Reason.LINE_TOO_LONG, f"more than {read_json.MAX_LINE_BYTES} bytes in one row"
        )
    try:
        return row.to_pylist(maps_as_pydicts="strict")[0], None
    except UnicodeDecodeError as error:
        return None, BadRow(
            Reason.BAD_UTF8,
            f"text that is not UTF-8: {error.reason} at byte {error.start + 1} of it",
        )
    except (
        ValueError,
        KeyError,
        OverflowError,
    ) as error:  # a map with a key twice, a date before Christ
        return None, BadRow(Reason.BAD_VALUE, str(error).partition("\n")[0])


def schema_names(path: Path) -> set[str]:
    """Return the names of the columns of the file `path`, and of the fields of their structs.

    Raises DataError.
    """
    return set(_names(pa.struct(list(_schema(path)))))


def media_columns(path: Path) -> dict[str, str]:
    """Return the columns, and keys in them, that hold pictures, sound or the like by `datasets`.

    The features in its metadata tell. The value is the name of the feature: `Image`. Raises
    DataError.
    """
    try:
        features = json.loads((_schema(path).metadata or {}).get(b"huggingface", b"{}"))["info"][
            "features"
        ]
    except (ValueError, TypeError, LookupError, RecursionError):
        return {}
    return dict(_media(features, ""))


def _media(features: Any, key: str) -> Iterator[tuple[str, str]]:
    if isinstance(features, list):
        for each in features:
            yield from _media(each, key)
    elif isinstance(features, dict):
        if (kind := features.get("_type")) in _MEDIA:
            yield key, str(kind)
        for name, inner in features.items():
            yield from _media(inner, key if name == "feature" else name)


def _schema(path: Path) -> Any:
    """Return the schema of the file `path`, of which no row is read.

    Raises DataError if it does not read.
    """
    try:
        if _is_parquet(path):
            return pq.read_schema(path)
        with pa.memory_map(str(path)) as source:
            if _is_arrow_file(source):
                return pa.ipc.open_file(source).schema
            return pa.ipc.open_stream(source).schema
    except (pa.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{path}: the schema does not read: {reason}; get the file again"
        ) from error


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
    """Return a function that removes nulls from structs in a `kind` value, and parses its JSON.

    Return None if it has neither.
    """
    if isinstance(kind, pa.JsonType):  # `datasets` stores objects of different keys in it
        return parse
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
