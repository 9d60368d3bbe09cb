import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline_lib.data.order import PADDING, rank_blocks, step_blocks, steps_per_epoch

sizes = st.integers(1, 300)
small = st.integers(1, 9)
GOLDEN = ([0, 7, 8, 2], [9, 4, 1, 7], [5, 1])


@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 5), blocks=sizes, batch=sizes)
def test_every_epoch_uses_every_block_once(seed: int, epoch: int, blocks: int, batch: int) -> None:
    steps = steps_per_epoch(blocks, batch)
    taken = [step_blocks(seed, epoch * steps + step, blocks, batch) for step in range(steps)]
    assert sorted(np.concatenate(taken).tolist()) == list(range(blocks))
    assert all(len(ids) == min(batch, blocks) for ids in taken[:-1])


@given(seed=st.integers(0, 99), step=st.integers(0, 40), blocks=sizes, batch=sizes, world=small, micro=small)
def test_the_ranks_share_a_step_exactly(seed: int, step: int, blocks: int, batch: int, world: int, micro: int) -> None:
    ids = step_blocks(seed, step, blocks, batch)
    shares = [rank_blocks(ids, rank, world, micro) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1  # or a collective waits for ever
    micro_batches = [micro_batch for share in shares for micro_batch in share]
    assert all(len(micro_batch) == micro for micro_batch in micro_batches)
    used = np.concatenate(micro_batches)
    assert sorted(used[used != PADDING].tolist()) == sorted(ids.tolist())
    if len(ids) % (world * micro) == 0:
        assert PADDING not in used
    real = [sum(int((micro_batch != PADDING).sum()) for micro_batch in share) for share in shares]
    assert max(real) - min(real) <= 1


def test_no_rank_gets_a_micro_batch_more_than_needed() -> None:
    shares = [rank_blocks(np.arange(5), rank, world=2, micro=2) for rank in range(2)]
    assert [[part.tolist() for part in share] for share in shares] == [[[0, 2], [4, -1]], [[1, 3], [-1, -1]]]


def test_the_order_is_the_same_for_ever() -> None:
    # Golden values: a resumed run must see the order that it began with, whatever was updated meanwhile.
    assert step_blocks(0, 0, 10, 4).tolist() == GOLDEN[0]
    assert step_blocks(0, 3, 10, 4).tolist() == GOLDEN[1]
    assert step_blocks(1, 2, 10, 4).tolist() == GOLDEN[2]


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(step_blocks(seed, epoch, 50, 50).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_a_step_cannot_be_written_over() -> None:
    assert not step_blocks(0, 0, 10, 4).flags.writeable
