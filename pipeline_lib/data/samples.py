"""The arrays that the tokenize stage hands on: all samples end to end, and where each begins.

tokens.npy int32[total], supervised.npy bool[total], offsets.npy int64[samples + 1], conversations.npy
int32[samples] (the conversation that each sample came from). Written as a stream, read memory-mapped.
"""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np

from pipeline_lib.data.blocks import Document
from pipeline_lib.data.npy import NpyWriter


class SampleWriter:
    """Appends samples to the four arrays in a folder."""

    def __init__(self, folder: Path) -> None:
        """Start with no samples."""
        self._files = ExitStack()
        self._tokens = self._files.enter_context(NpyWriter(folder / "tokens.npy", np.int32))
        self._supervised = self._files.enter_context(NpyWriter(folder / "supervised.npy", np.bool_))
        self._offsets = self._files.enter_context(NpyWriter(folder / "offsets.npy", np.int64))
        self._conversations = self._files.enter_context(NpyWriter(folder / "conversations.npy", np.int32))
        self._offsets.append(np.zeros(1, dtype=np.int64))

    def append(self, sample: Document, conversation: int) -> None:
        """Add `sample`, which came from conversation number `conversation`."""
        self._tokens.append(sample.tokens)
        self._supervised.append(sample.supervised)
        self._offsets.append(np.array([self._tokens.length]))
        self._conversations.append(np.array([conversation]))

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

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, number: int) -> Document:
        start, end = self.offsets[number : number + 2]
        return Document(self.tokens[start:end], self.supervised[start:end])
