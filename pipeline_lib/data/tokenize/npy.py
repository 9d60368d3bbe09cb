"""Writes a one-dimensional .npy file piece by piece, so that an array of any length costs no memory."""

from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray


class NpyWriter:
    """Appends to `path`; the file is a valid array once the `with` block ends."""

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        """Start an empty array of `dtype`."""
        self.length = 0
        self._dtype = np.dtype(dtype)
        self._file = path.open("wb")
        self._write_header()
        self._data_start = self._file.tell()

    def append(self, values: NDArray[Any]) -> None:
        """Add `values`, a one-dimensional array of the same type."""
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).tobytes())
        self.length += len(values)

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()
            # numpy leaves room in the header for the length to grow, which is what makes this possible.
            if self._file.tell() != self._data_start:
                raise ValueError(f"the header of {self._file.name} outgrew its room")

    def _write_header(self) -> None:
        description = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": description, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)
