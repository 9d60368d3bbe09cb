"""What ranks of a step train on: equal global batches in any world, mixtures by weight."""

from collections import Counter
from pathlib import Path

import pytest

from pipeline_lib.config.train import Train
from pipeline_lib.data.blocks import BlockReader
from pipeline_lib.data.shard import write_blocks
from pipeline_lib.model.batch import BatchShare
from pipeline_lib.records.data import BlockGroup
from pipeline_lib.train.loop import Batches
from tests.train.conftest import BLOCK_TOKENS, make_documents

Rows = Counter[bytes]


@pytest.fixture
def reader(tmp_path: Path) -> BlockReader:
    """Ten blocks that an epoch uses half of, and six that it uses twice."""
    groups = [BlockGroup(0.5, 10), BlockGroup(2.0, 6)]
    write_blocks(tmp_path / "train", make_documents(16, 3), BLOCK_TOKENS, 3, groups)
    return BlockReader(tmp_path / "train")


def batches_of(reader: BlockReader, ranks: int, micro: int) -> list[Batches]:
    return [Batches(reader, 7, 8, micro, BatchShare(rank, ranks)) for rank in range(ranks)]


def rows_of(batches: list[Batches], step: int) -> Rows:
    """The blocks that all ranks train on in a step, those of nothing left out."""
    micro_batches = [batch for mine in batches for batch in mine.of_step(step) if batch.real_tokens]
    rows = [
        (batch.tokens[row], batch.documents[row])
        for batch in micro_batches
        for row in range(len(batch.tokens))
    ]
    return Counter(tokens.numpy().tobytes() for tokens, documents in rows if (documents >= 0).any())


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (2, 1), (2, 4), (3, 2), (8, 1)])
def test_every_world_trains_on_the_same_global_batches(
    reader: BlockReader, ranks: int, micro: int
) -> None:
    one, many = batches_of(reader, 1, 1), batches_of(reader, ranks, micro)
    for step in range(7):
        assert rows_of(many, step) == rows_of(one, step)
        assert len({len(mine.of_step(step)) for mine in many}) == 1


def test_the_blocks_are_used_as_they_are_weighted(reader: BlockReader) -> None:
    one = batches_of(reader, 1, 1)
    assert one[0].total_steps(Train(epochs=2)) == 6  # 5 + 12 blocks an epoch, 8 a step
    assert [one[0].epoch_of(step) for step in range(6)] == [0, 0, 0, 1, 1, 1]
    used = sum((rows_of(one, step) for step in range(6)), Rows())
    assert [used[reader[block].tokens.astype("int64").tobytes()] for block in range(16)] == [
        1
    ] * 10 + [4] * 6


def test_a_seldom_used_block_is_trained_on_in_its_turn(tmp_path: Path) -> None:
    write_blocks(tmp_path / "train", make_documents(1, 3), BLOCK_TOKENS, 1, [BlockGroup(0.25, 1)])
    (one,) = batches_of(BlockReader(tmp_path / "train"), 1, 1)
    assert [one.total_steps(Train(epochs=epochs)) for epochs in range(1, 9)] == [
        0,
        0,
        0,
        1,
        1,
        1,
        1,
        2,
    ]
    assert [one.epoch_of(step) for step in range(2)] == [3, 7]
    assert rows_of([one], 0) == rows_of([one], 1) != Rows()
