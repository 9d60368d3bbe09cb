"""Writes the arrays of `data.samples` as a stream, batch by batch, so that their length costs no memory."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np

from pipeline_lib.data.samples import ARRAYS
from pipeline_lib.data.tokenize.encoded import Encoded
from pipeline_lib.data.tokenize.npy import NpyWriter


class SampleWriter:
    """Appends batches of samples to the arrays in a folder, source by source."""

    def __init__(self, folder: Path) -> None:
        """Start with no samples."""
        self._files = ExitStack()
        self._arrays = {
            name: self._files.enter_context(NpyWriter(folder / f"{name}.npy", dtype)) for name, dtype in ARRAYS.items()
        }
        self._sources = 0
        self._arrays["offsets"].append(np.zeros(1, dtype=np.int64))

    def append(self, encoded: Encoded) -> None:
        """Add the samples of `encoded`; sources come in order."""
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
        """There are `sources` sources, and no more samples."""
        self._begin(sources + 1)

    def _begin(self, sources: int) -> None:
        """Note where the sources up to number `sources` - 1 begin, those without a sample too."""
        while self._sources < sources:
            self._arrays["source_offsets"].append(np.array([self._arrays["conversations"].length]))
            self._sources += 1

    def __enter__(self) -> "SampleWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()
