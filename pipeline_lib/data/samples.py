"""The arrays that the tokenize stage hands on: all samples end to end, and where each begins.

tokens.npy int32[total], supervised.npy bool[total], offsets.npy int64[samples + 1], conversations.npy
int32[samples] (the conversation that each sample came from), content.npy uint64[conversations] (equal for equal
content), source_offsets.npy int64[sources + 1] (the first sample of each entry of data.train). Written as a
stream, read memory-mapped.
"""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np

from pipeline_lib.data.blocks import Document
from pipeline_lib.data.encoded import Encoded
from pipeline_lib.data.npy import NpyWriter

ARRAYS = {
    "tokens": np.int32,
    "supervised": np.bool_,
    "offsets": np.int64,
    "conversations": np.int32,
    "content": np.uint64,
    "source_offsets": np.int64,
}


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


class Samples:
    """The samples in a folder, by number."""

    def __init__(self, folder: Path) -> None:
        """Map the arrays of `folder`."""
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self.supervised = np.load(folder / "supervised.npy", mmap_mode="r")
        self.offsets = np.load(folder / "offsets.npy")
        self.conversations = np.load(folder / "conversations.npy")
        self.content = np.load(folder / "content.npy")
        self.source_offsets = np.load(folder / "source_offsets.npy")

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, number: int) -> Document:
        start, end = self.offsets[number : number + 2]
        return Document(self.tokens[start:end], self.supervised[start:end])
