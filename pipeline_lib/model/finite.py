"""Finds weights that are not finite, without torch: their exponent has all bits set."""

import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from pipeline_lib.base.errors import DataError
from pipeline_lib.model.weights import read_index, weight_files

# By the kind of element: unsigned integers of its width, and the bits of its exponent.
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}
_CHUNK_BYTES = 1 << 20
_FILES_AT_ONCE = 8


class _Values(NamedTuple):
    """Where a tensor's values lie in its file, in bytes from the beginning."""

    name: str
    kind: str
    begin: int
    bytes: int


def refuse_not_finite(folder: Path) -> None:
    """Raise DataError naming the first tensor of each file with a value that is NaN or infinite.

    Reads all weights of `folder`, whose headers are sound, in some tens of MB of memory.
    """
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        found = list(pool.map(_first_not_finite, weight_files(folder, read_index(folder))))
    if named := [text for text in found if text is not None]:
        raise DataError(f"{'; '.join(named)}: holds values that are not finite, which no training mends; get the "
                        "model again, or take another")  # fmt: skip


def _first_not_finite(path: Path) -> str | None:
    with path.open("rb") as file:
        for values in _values_in(path):
            kind, exponent = _EXPONENTS[values.kind]
            width = np.dtype(kind).itemsize
            file.seek(values.begin)
            for done in range(0, values.bytes, _CHUNK_BYTES):
                chunk = np.fromfile(file, kind, min(_CHUNK_BYTES, values.bytes - done) // width)
                if (chunk & chunk.dtype.type(exponent)).max() == exponent:
                    return f"{path}: {values.name}"
    return None


def _values_in(path: Path) -> Iterator[_Values]:
    """In the order of the file."""
    with path.open("rb") as file:
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        yield _Values(name, entry["dtype"], 8 + header_bytes + begin, end - begin)
