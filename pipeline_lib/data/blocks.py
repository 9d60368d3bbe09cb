"""Packed training blocks on disk: safetensors files that are memory-mapped, beside an index.json.

A shard of n blocks of T tokens holds `tokens` int32[n, T], `supervised` uint8[n, T], `starts` int32[m] and
`block_offsets` int64[n + 1]. `starts[block_offsets[b]:block_offsets[b + 1]]` are the first tokens of the
documents of block b and, last, where its padding begins (T if it has none).
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.base.fsio import read_json, write_json

INDEX_NAME = "index.json"
PADDING_DOCUMENT = -1


@dataclass(frozen=True)
class Block:
    """Documents side by side in one row of T tokens."""

    tokens: NDArray[np.int32]  # [T]
    supervised: NDArray[np.bool_]  # [T]; true: this token is to be predicted from those before it in its document
    documents: NDArray[np.int32]  # [T]; number of the document within the block, -1 for padding


@dataclass(frozen=True)
class Document:
    """One sample: tokens int32[n] and whether each is to be predicted, bool[n]."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]


@dataclass(frozen=True)
class BlockIndex:
    """What a folder of blocks holds. `tokens` counts no padding; `shards` are the blocks of each file."""

    blocks: int
    block_tokens: int
    tokens: int
    supervised_tokens: int
    documents: int
    shards: list[int]

    @property
    def packing_efficiency(self) -> float:
        """The fraction of all positions that are not padding."""
        return self.tokens / (self.blocks * self.block_tokens)


def documents_of(block: Block) -> Iterator[Document]:
    """The documents of `block`, in order, without the padding."""
    filled = int((block.documents != PADDING_DOCUMENT).sum())
    cuts = np.flatnonzero(np.diff(block.documents[:filled])) + 1
    bounds = [0, *cuts.tolist(), filled] if filled else []
    for start, end in zip(bounds, bounds[1:], strict=False):
        yield Document(block.tokens[start:end], block.supervised[start:end])


def write_blocks(
    folder: Path, bins: Sequence[Sequence[Document]], block_tokens: int, shards: int, pad_token: int
) -> BlockIndex:
    """Write each bin of documents as a block, spread evenly over at most `shards` files, and the index.

    `bins` is read lazily, one shard at a time, so that a sequence which makes its items on demand costs the
    memory of one shard. Padding has `pad_token`.
    """
    folder.mkdir(parents=True)
    files = max(1, min(shards, len(bins)))
    bounds = [len(bins) * number // files for number in range(files + 1)]
    tokens = supervised = documents = 0
    for number, (first, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        arrays = _fill([bins[position] for position in range(first, end)], block_tokens, pad_token)
        save_file(arrays, _shard_path(folder, number))
        last_starts = arrays["starts"][arrays["block_offsets"][1:] - 1]
        tokens += int(last_starts.sum())
        supervised += int(arrays["supervised"].sum())
        documents += len(arrays["starts"]) - (end - first)
    sizes = [end - first for first, end in zip(bounds, bounds[1:], strict=False)]
    index = BlockIndex(len(bins), block_tokens, tokens, supervised, documents, sizes)
    write_json(folder / INDEX_NAME, asdict(index))
    return index


def _fill(bins: Sequence[Sequence[Document]], block_tokens: int, pad_token: int) -> dict[str, NDArray[Any]]:
    tokens = np.full((len(bins), block_tokens), pad_token, dtype=np.int32)
    supervised = np.zeros((len(bins), block_tokens), dtype=np.uint8)
    starts: list[int] = []
    block_offsets = [0]
    for row, documents in enumerate(bins):
        position = 0
        for document in documents:
            end = position + len(document.tokens)
            tokens[row, position:end] = document.tokens
            supervised[row, position:end] = document.supervised
            starts.append(position)
            position = end
        starts.append(position)
        block_offsets.append(len(starts))
    return {
        "tokens": tokens,
        "supervised": supervised,
        "starts": np.array(starts, dtype=np.int32),
        "block_offsets": np.array(block_offsets, dtype=np.int64),
    }


class BlockReader:
    """Random access to the blocks of a folder. Opening reads the index alone; a block is read when asked for."""

    def __init__(self, folder: Path) -> None:
        """Open the folder that `write_blocks` filled. Raises IntegrityError if it has no index that reads."""
        self.folder = folder
        try:
            self.index = BlockIndex(**read_json(folder / INDEX_NAME))
        except (OSError, ValueError, TypeError) as error:
            raise IntegrityError(f"{folder / INDEX_NAME}: cannot read ({error}); run the shard stage again") from error
        self.block_tokens = self.index.block_tokens
        self._ends = np.cumsum(self.index.shards)
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return self.index.blocks

    def __getitem__(self, block: int) -> Block:
        if not 0 <= block < len(self):
            raise IndexError(f"{self.folder}: block {block} of {len(self)}")
        number = int(np.searchsorted(self._ends, block, side="right"))
        row = block - int(self._ends[number]) + self.index.shards[number]
        shard = self._shard(number)
        first, end = shard.get_slice("block_offsets")[row : row + 2].tolist()
        starts = shard.get_slice("starts")[first:end]
        documents = np.full(self.block_tokens, PADDING_DOCUMENT, dtype=np.int32)
        documents[: starts[-1]] = np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))
        supervised = shard.get_slice("supervised")[row].astype(np.bool_)
        return Block(shard.get_slice("tokens")[row], supervised, documents)

    def _shard(self, number: int) -> Any:
        if number not in self._open:
            self._open[number] = safe_open(_shard_path(self.folder, number), framework="numpy")
        return self._open[number]


def _shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}.safetensors"
