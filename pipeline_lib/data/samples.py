"""The arrays that the tokenize stage hands on: all samples end to end, and where each begins.

tokens.npy int32[total], supervised.npy bool[total], offsets.npy int64[samples + 1], conversations.npy
int32[samples] (the conversation that each sample came from), content.npy uint64[conversations] (a hash, equal for
conversations of equal samples), prompts.npy uint64[conversations] (a hash of the first user message, with the
row's own system message, or of the text: what is equal there belongs to one side of a split), source_offsets.npy
int64[sources + 1] (the first sample of each entry of data.train). Written as a stream, read memory-mapped.
"""

from pathlib import Path

import numpy as np

from pipeline_lib.data.document import Document

ARRAYS = {
    "tokens": np.int32,
    "supervised": np.bool_,
    "offsets": np.int64,
    "conversations": np.int32,
    "content": np.uint64,
    "prompts": np.uint64,
    "source_offsets": np.int64,
}


class Samples:
    """The samples in a folder, by number."""

    def __init__(self, folder: Path) -> None:
        """Map the arrays of `folder`."""
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self.supervised = np.load(folder / "supervised.npy", mmap_mode="r")
        self.offsets = np.load(folder / "offsets.npy")
        self.conversations = np.load(folder / "conversations.npy")
        self.content = np.load(folder / "content.npy")
        self.prompts = np.load(folder / "prompts.npy")
        self.source_offsets = np.load(folder / "source_offsets.npy")

    def __len__(self) -> int:
        return len(self.conversations)

    def __getitem__(self, number: int) -> Document:
        start, end = self.offsets[number : number + 2]
        return Document(self.tokens[start:end], self.supervised[start:end])
