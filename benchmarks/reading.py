"""Reading packed blocks on one core: opening 1, 100 and 10,000 shards, and a shuffled epoch."""

import statistics
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import seconds, show, spread
from pipeline_lib.data.blocks import BlockReader
from pipeline_lib.data.documents import Document
from pipeline_lib.data.order import step_blocks
from pipeline_lib.data.shard import write_blocks

BLOCK_TOKENS = 8192
DOCUMENTS_PER_BLOCK = 16
# by the number of shards; a shard holds at most 256 MiB
BLOCKS = {1: 4_000, 100: 10_000, 10_000: 10_000}


class _Blocks(Sequence[Sequence[Document]]):
    """Blocks of equal documents, made when asked for."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: Any) -> Any:
        length = BLOCK_TOKENS // DOCUMENTS_PER_BLOCK
        document = Document(np.full(length, number, np.int32), np.ones(length, np.bool_))
        return [document] * DOCUMENTS_PER_BLOCK


def run() -> None:
    """Print a line for each number of shards."""
    rows = []
    for shards, blocks in BLOCKS.items():
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "blocks"
            write_blocks(folder, _Blocks(blocks), BLOCK_TOKENS, shards)
            opened = [1000 * taken for taken in seconds(partial(BlockReader, folder))]
            epochs = seconds(partial(_read_epoch, BlockReader(folder)))
            rate = blocks / statistics.median(epochs)
            files = len(BlockReader(folder).index.shards)
            rows.append([f"{files:,}", spread(opened, "ms"), f"{blocks:,}", f"{rate:,.0f}"])
    title = (
        f"read: blocks of {BLOCK_TOKENS} tokens from the page cache, in the order of training, one "
        "core"
    )
    show(title, ["shards", "open", "blocks", "blocks/s"], rows)


def _read_epoch(reader: BlockReader) -> None:
    for block in step_blocks(0, 0, reader.index.groups, len(reader)).tolist():
        reader[block]
