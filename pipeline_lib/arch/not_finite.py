"""The search for weights that are not finite, without torch: all bits of their exponent are set."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pipeline_lib.arch.weight_files import read_index, read_layout, weight_files
from pipeline_lib.core.errors import DataError

# By element type: the unsigned integer type of the same width, and the mask of the exponent's bits.
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}
_CHUNK_BYTES = 1 << 20
_FILES_AT_ONCE = 8


def refuse_not_finite(folder: Path) -> None:
    """Raise DataError naming the first tensor of each file with a value that is NaN or infinite.

    Reads all weights of `folder`, using some tens of MB of memory. The headers must have been
    checked before.
    """
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        places = list(pool.map(_first_not_finite, weight_files(folder, read_index(folder))))
    if problems := [place for place in places if place is not None]:
        raise DataError(f"{'; '.join(problems)}: holds values that are not finite, which no "
        "training mends; get the "
                        "model again, or take another")  # fmt: skip


def _first_not_finite(path: Path) -> str | None:
    """Return the file and name of the first tensor with such a value; None if there is none."""
    with path.open("rb") as file:
        entries, data_begin = read_layout(file)
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = entry["data_offsets"]
            kind, exponent = _EXPONENTS[entry["dtype"]]
            file.seek(data_begin + begin)
            for chunk_begin in range(begin, end, _CHUNK_BYTES):
                chunk = np.fromfile(
                    file, kind, min(_CHUNK_BYTES, end - chunk_begin) // np.dtype(kind).itemsize
                )
                if (chunk & chunk.dtype.type(exponent)).max() == exponent:
                    return f"{path}: {name}"
    return None
