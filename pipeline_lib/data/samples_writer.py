"""Writes the arrays that `documents.Samples` reads, batch by batch, in bounded memory."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.data.documents import ARRAYS
from pipeline_lib.data.encoded import Encoded


class NpyWriter:
    """A writer that appends to a .npy file, a valid array once the `with` block has ended."""

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        """Create `path` with an empty array of `dtype`."""
        self.length = 0
        self._dtype = np.dtype(dtype)
        self._file = path.open("wb")
        self._write_header()
        self._data_start = self._file.tell()

    def append(self, values: NDArray[Any]) -> None:
        """Append `values`, a one-dimensional array of the same type."""
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).tobytes())
        self.length += len(values)

    def __enter__(self) -> "NpyWriter":
        return self

    def __exit__(self, *_: object) -> None:
        with self._file:
            self._file.seek(0)
            self._write_header()
            # numpy pads the header so that the length can grow in place.
            if self._file.tell() != self._data_start:
                raise ValueError(f"the header of {self._file.name} outgrew its room")

    def _write_header(self) -> None:
        description = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": description, "fortran_order": False, "shape": (self.length,)}
        np.lib.format.write_array_header_1_0(self._file, header)


class SampleWriter(ExitStack):
    """A writer that appends batches of samples to the arrays in a folder, source by source."""

    def __init__(self, folder: Path) -> None:
        """Create empty arrays in `folder`."""
        super().__init__()
        self._arrays = {
            name: self.enter_context(NpyWriter(folder / f"{name}.npy", dtype))
            for name, dtype in ARRAYS.items()
        }
        self._sources = 0
        self._arrays["offsets"].append(np.zeros(1, dtype=np.int64))

    def append(self, encoded: Encoded) -> None:
        """Append the samples of `encoded`. Sources have to arrive in order."""
        self._begin(encoded.source + 1)
        arrays = self._arrays
        ends = arrays["tokens"].length + np.cumsum(encoded.lengths)
        arrays["offsets"].append(ends)
        arrays["tokens"].append(encoded.tokens)
        arrays["supervised"].append(encoded.supervised)
        arrays["conversations"].append(arrays["content"].length + encoded.conversations)
        arrays["content"].append(encoded.content)
        arrays["prompts"].append(encoded.prompts)

    def finish(self, sources: int) -> None:
        """Complete `source_offsets.npy` for `sources` sources after the last sample."""
        self._begin(sources + 1)

    def _begin(self, sources: int) -> None:
        """Record where the sources before number `sources` begin, also those without samples."""
        while self._sources < sources:
            self._arrays["source_offsets"].append(np.array([self._arrays["conversations"].length]))
            self._sources += 1
