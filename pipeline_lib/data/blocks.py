"""Read packed training blocks: memory-mapped safetensors shards with an index.json and a costs.npy.

A shard of n blocks of T tokens holds `tokens` int32[n, T], `supervised` uint8[n, T], `starts`
int32[m] and `block_offsets` int64[n + 1]. `starts[block_offsets[b]:block_offsets[b + 1]]` are the
positions where the documents of block b begin, followed by the position where its padding begins (T
if it has none). costs.npy, int64[blocks], is the attention cost of each block: the sum of the
squared lengths of its documents.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.files import unreadable_named
from pipeline_lib.data.documents import Document
from pipeline_lib.data.order import epoch_blocks
from pipeline_lib.records.data import INDEX_NAME, BlockIndex
from pipeline_lib.records.record import read_record

COSTS_NAME = "costs.npy"
PADDING_DOCUMENT = -1


@dataclass(frozen=True)
class Block:
    """Documents packed into one row of T tokens."""

    tokens: NDArray[np.int32]  # [T]
    # [T]; true: this token is to be predicted from those before it in its document
    supervised: NDArray[np.bool_]
    documents: NDArray[np.int32]  # [T]; number of the document within the block, -1 for padding


def read_index(folder: Path) -> BlockIndex:
    """Return the index of `folder`.

    Raises IntegrityError if it is missing, unreadable or inconsistent.
    """
    path = folder / INDEX_NAME
    try:
        with unreadable_named(path):
            index = read_record(BlockIndex, path)
    except OSError as error:
        raise _damaged(path, f"cannot read ({error})") from error
    blocks = {sum(index.shards), sum(group.blocks for group in index.groups)}
    if blocks != {index.blocks} or epoch_blocks(index.groups) != index.epoch_blocks:
        raise _damaged(path, f"shards and groups do not make up its {index.blocks} blocks")
    return index


def shard_path(folder: Path, number: int) -> Path:
    """Return the path of shard `number`, counted from 0."""
    return folder / f"shard-{number:05d}.safetensors"


def documents_of(block: Block) -> Iterator[Document]:
    """Yield the documents of `block` in order, without padding."""
    filled = int((block.documents != PADDING_DOCUMENT).sum())
    cuts = np.flatnonzero(np.diff(block.documents[:filled])) + 1
    bounds = [0, *cuts.tolist(), filled] if filled else []
    for start, end in pairwise(bounds):
        yield Document(block.tokens[start:end], block.supervised[start:end])


class BlockReader:
    """Random access to the blocks of a folder.

    Opening reads index and costs; a shard is mapped when first needed.
    """

    def __init__(self, folder: Path) -> None:
        """Open the folder that `write_blocks` filled.

        Raises IntegrityError if index and costs do not match.
        """
        self.folder = folder
        self.index = read_index(folder)
        self.block_tokens = self.index.block_tokens
        path = folder / COSTS_NAME
        try:
            with unreadable_named(path):
                # [blocks], attention cost of each, mapped
                self.costs: NDArray[np.int64] = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise _damaged(path, f"cannot read ({error})") from error
        if self.costs.shape != (len(self),) or self.costs.dtype != np.int64:
            kind = f"{self.costs.dtype}{list(self.costs.shape)}"
            raise _damaged(path, f"holds {kind}, expected int64[{len(self)}]")
        self._ends = np.cumsum(self.index.shards)
        self._shards: dict[int, _Shard] = {}

    def __len__(self) -> int:
        return self.index.blocks

    def samples_per_block(self) -> float:
        """Return the mean samples of an epoch's blocks, each block counted as its group weighs.

        Raises IntegrityError if a shard contradicts the index.
        """
        groups = self.index.groups
        if len(groups) == 1:
            return self.index.documents / len(self)
        weights = np.repeat([group.weight for group in groups], [group.blocks for group in groups])
        counts = np.concatenate(
            [self._shard(number).documents() for number in range(len(self.index.shards))]
        )
        return float(np.average(counts, weights=weights))

    def __getitem__(self, block: int) -> Block:
        """Return a block.

        Raises IndexError if out of range, IntegrityError if its shard contradicts the index.
        """
        if not 0 <= block < len(self):
            raise IndexError(f"{self.folder}: block {block} of {len(self)}")
        number = int(self._ends.searchsorted(block, side="right"))
        return self._shard(number).read(block - int(self._ends[number]) + self.index.shards[number])

    def _shard(self, number: int) -> "_Shard":
        if number not in self._shards:
            path = shard_path(self.folder, number)
            self._shards[number] = _Shard(path, self.index.shards[number], self.block_tokens)
        return self._shards[number]


class _Shard:
    """A memory-mapped shard.

    It keeps no file descriptor open, so any number of shards may be mapped.
    """

    def __init__(self, path: Path, blocks: int, block_tokens: int) -> None:
        """Map `path` and check shapes, types and document starts. The hash was checked before."""
        self._block_tokens = block_tokens
        try:
            with unreadable_named(path):
                path.open("rb").close()  # safetensors names no cause
                file: Any = safe_open(path, framework="numpy")
                self._tokens = file.get_slice("tokens")
                self._supervised = file.get_slice("supervised")
                self._starts = file.get_tensor("starts")
                self._offsets = file.get_tensor("block_offsets")
        except (OSError, SafetensorError) as error:
            raise _damaged(path, f"cannot read ({error})") from error
        for name, part, kind in (
            ("tokens", self._tokens, "I32"),
            ("supervised", self._supervised, "U8"),
        ):
            found = (part.get_dtype(), part.get_shape())
            if found != (kind, [blocks, block_tokens]):
                raise _damaged(
                    path,
                    f"{name} are {found[0]}{found[1]}, expected {kind}{[blocks, block_tokens]}",
                )
        if not _is_sound(self._starts, self._offsets, blocks, block_tokens):
            raise _damaged(path, "the starts of its documents do not ascend within its blocks")

    def documents(self) -> NDArray[np.int64]:
        """Return the number of documents in each block: int64[blocks]."""
        return np.asarray(np.diff(self._offsets) - 1)

    def read(self, row: int) -> Block:
        """Return the block in `row`."""
        starts = self._starts[self._offsets[row] : self._offsets[row + 1]]
        documents = np.full(self._block_tokens, PADDING_DOCUMENT, dtype=np.int32)
        documents[: starts[-1]] = np.arange(len(starts) - 1, dtype=np.int32).repeat(np.diff(starts))
        return Block(self._tokens[row], self._supervised[row].view(np.bool_), documents)


def _is_sound(
    starts: NDArray[np.int32], offsets: NDArray[np.int64], blocks: int, block_tokens: int
) -> bool:
    """Return whether each block's starts begin at 0, ascend strictly and end within it."""
    if (
        starts.dtype != np.int32
        or starts.ndim != 1
        or offsets.dtype != np.int64
        or offsets.shape != (blocks + 1,)
    ):
        return False
    if offsets[0] != 0 or offsets[-1] != len(starts) or np.diff(offsets).min() < 2:
        return False
    ascends = np.diff(starts) > 0
    ascends[offsets[1:-1] - 1] = True  # from the end of one block to the start of the next
    firsts = starts[offsets[:-1]]
    lasts = starts[offsets[1:] - 1]
    return bool(ascends.all() and not firsts.any() and (lasts <= block_tokens).all())


def _damaged(path: Path, what: str) -> IntegrityError:
    return IntegrityError(f"{path}: {what}; delete {path.parent.parent} and run snakemake again")
