"""How records are written to files and read back: strictly, by the class that describes them.

A record is a frozen dataclass. A field with a default is in the file only if its value differs from
the default, unless the class says that it `writes_defaults`; every other field is always there,
with null for None.
"""

import dataclasses
import math
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, TypeVar, cast

from pydantic import ConfigDict, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core import core_schema

from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.files import read_json, read_jsonl

AnyRecord = TypeVar("AnyRecord", bound="Record")


class Record:
    """The base of all records: a key that is missing or not known is an error."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    writes_defaults: ClassVar[bool] = False

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Return how the dataclass is read; what is always written has to be in the file."""
        schema: Any = handler(source)
        if cls.writes_defaults:
            for field in schema["schema"]["fields"]:
                if field["schema"]["type"] == "default":
                    field["schema"] = field["schema"]["schema"]
        return cast("core_schema.CoreSchema", schema)


def to_json(value: Any) -> Any:
    """Return the JSON value of a record, or of lists and dicts of records; NaN is null."""
    if isinstance(value, Record):
        return _object_of(value)
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    return value


def _object_of(record: Record) -> dict[str, Any]:
    found = {}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        value = getattr(record, field.name)
        if record.writes_defaults or not _is_default(field, value):
            found[field.name] = to_json(value)
    return found


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is not dataclasses.MISSING and bool(value == field.default)


def parse(kind: type[AnyRecord], value: Any, path: Path) -> AnyRecord:
    """Return the record of the JSON `value`, which lies in the file at `path`.

    Raise IntegrityError naming the file and the key if it is not such a record.
    """
    try:
        record: AnyRecord = _adapter(kind).validate_python(value)  # type: ignore[arg-type]
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(str(part) for part in detail["loc"])
        raise IntegrityError(
            f"{path}: {key}: {detail['msg']}; another version of the code sealed it: "
            f"{_remedy(path)}"
        ) from error
    return record


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def read_record(kind: type[AnyRecord], path: Path) -> AnyRecord:
    """Return the record in the JSON file at `path`.

    Raise OSError, or IntegrityError naming the file and the key if it is damaged or of another
    schema.
    """
    return parse(kind, read_sealed_json(path), path)


def read_records(kind: type[AnyRecord], path: Path) -> list[AnyRecord]:
    """Return the records in the file at `path`: a JSON list, or a line each in a `.jsonl` file.

    Raise OSError, or IntegrityError naming the file and the key if it is damaged or of another
    schema.
    """
    return [parse(kind, value, path) for value in read_sealed_json(path)]


def read_sealed_json(path: Path) -> Any:
    """Return the JSON value, or the values of a `.jsonl` file, at `path`.

    Raise OSError, or IntegrityError naming the file if it is not JSON.
    """
    try:
        return read_jsonl(path) if path.suffix == ".jsonl" else read_json(path)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(f"{path} is damaged: {error}; {_remedy(path)}") from error


def _remedy(path: Path) -> str:
    return f"delete {path.parent} and run snakemake again"
