"""Writes packed training blocks, a shard at a time, as `blocks` describes and reads them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from pipeline_lib.base.fsio import write_json
from pipeline_lib.data.document import Document
from pipeline_lib.data.shard.blocks import COSTS_NAME, INDEX_NAME, BlockIndex, shard_path
from pipeline_lib.data.shard.order import Group, epoch_blocks

SHARD_BYTES = 1 << 28  # a shard is made in memory, so it is no larger than this whatever the data
BYTES_PER_POSITION = 5  # a token and its supervision


def write_blocks(
    folder: Path,
    bins: Sequence[Sequence[Document]],
    block_tokens: int,
    shards: int,
    pad_token: int,
    groups: Sequence[Group] = (),
) -> BlockIndex:
    """Write each bin of documents as a block, spread evenly over `shards` files, and the index.

    There are fewer files if there are fewer blocks, and more if one would be larger than `SHARD_BYTES`. `bins` is
    read lazily, one shard at a time, so that a sequence which makes its items on demand costs the memory of one
    shard. Padding has `pad_token`. Without `groups`, all blocks are one group of weight 1.
    """
    folder.mkdir(parents=True)
    groups = list(groups) or [Group(1.0, len(bins))]
    needed = -(-len(bins) * block_tokens * BYTES_PER_POSITION // SHARD_BYTES)
    files = max(1, min(max(shards, needed), len(bins)))
    bounds = [len(bins) * number // files for number in range(files + 1)]
    written = [
        _write_shard(shard_path(folder, number), bins, range(first, end), block_tokens, pad_token)
        for number, (first, end) in enumerate(pairwise(bounds))
    ]
    np.save(folder / COSTS_NAME, np.concatenate([shard.costs for shard in written]))
    index = BlockIndex(
        blocks=len(bins),
        block_tokens=block_tokens,
        tokens=sum(shard.tokens for shard in written),
        supervised_tokens=sum(shard.supervised_tokens for shard in written),
        documents=sum(shard.documents for shard in written),
        largest_token=max(shard.largest_token for shard in written),
        epoch_blocks=epoch_blocks(groups),
        groups=groups,
        shards=[end - first for first, end in pairwise(bounds)],
    )
    write_json(folder / INDEX_NAME, asdict(index))
    return index


@dataclass(frozen=True)
class _Written:
    """What a shard adds to the index, and the costs of its blocks."""

    tokens: int
    supervised_tokens: int
    documents: int
    largest_token: int
    costs: NDArray[np.int64]


def _write_shard(
    path: Path, bins: Sequence[Sequence[Document]], numbers: range, block_tokens: int, pad_token: int
) -> _Written:
    arrays = _fill([bins[number] for number in numbers], block_tokens, pad_token)
    save_file(arrays, path)
    lengths = _document_lengths(arrays["starts"], arrays["block_offsets"])
    return _Written(
        tokens=int(lengths.sum()),
        supervised_tokens=int(arrays["supervised"].sum()),
        documents=len(lengths) - len(numbers),
        largest_token=int(arrays["tokens"].max()),
        costs=np.add.reduceat(lengths**2, arrays["block_offsets"][:-1]),
    )


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


def _document_lengths(starts: NDArray[np.int32], block_offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of the document at each of the `starts`; 0 where padding begins."""
    begins = starts.astype(np.int64)
    lengths = np.append(begins[1:], 0) - begins
    lengths[block_offsets[1:] - 1] = 0
    return lengths
