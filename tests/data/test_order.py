import math
from collections.abc import Callable
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline_lib.data.order import (
    PADDING,
    epoch_blocks,
    epoch_of,
    epoch_steps,
    rank_blocks,
    step_blocks,
    total_steps,
)
from pipeline_lib.records.data import BlockGroup

sizes = st.integers(1, 300)
small = st.integers(1, 9)
weights = st.one_of(st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0]), st.floats(0.01, 4.0))
some_groups = st.lists(st.builds(BlockGroup, weights, st.integers(1, 60)), min_size=1, max_size=4)
GOLDEN = ([0, 7, 8, 2], [9, 4, 1, 7], [5, 1])
GOLDEN_MIXTURE = [[0, 8, 8, 4, 7], [6, 7, 6, 1], [6, 3, 8, 7, 8], [2, 7, 6, 5]]


def epoch(seed: int, number: int, groups: list[BlockGroup], batch: int) -> list[NDArray[np.int64]]:
    """The steps of that epoch."""
    first, end = total_steps(groups, batch, number), total_steps(groups, batch, number + 1)
    return [step_blocks(seed, step, groups, batch) for step in range(first, end)]


def uses(seed: int, epochs: int, groups: list[BlockGroup]) -> NDArray[np.int64]:
    """How often each block occurs in each epoch: int64[epochs, blocks]."""
    blocks = sum(group.blocks for group in groups)
    counts = np.zeros((epochs, blocks), dtype=np.int64)
    for number in range(epochs):
        for ids in epoch(seed, number, groups, 50):
            np.add.at(counts[number], ids, 1)
    return counts


def parts(groups: list[BlockGroup]) -> list[slice]:
    """The block ids of each group."""
    bounds = np.cumsum([0, *(group.blocks for group in groups)]).tolist()
    return [slice(first, end) for first, end in pairwise(bounds)]


@given(seed=st.integers(0, 2**63), number=st.integers(0, 5), blocks=sizes, batch=sizes)
def test_every_epoch_uses_every_block_once(seed: int, number: int, blocks: int, batch: int) -> None:
    taken = epoch(seed, number, [BlockGroup(1.0, blocks)], batch)
    assert sorted(np.concatenate(taken).tolist()) == list(range(blocks))
    assert all(len(ids) == min(batch, blocks) for ids in taken[:-1])


def assert_used_as_weighted(counts: NDArray[np.int64], weight: Decimal) -> None:
    """That int64[epochs, blocks] `counts` keep a group's promise, by decimal arithmetic.

    The arithmetic is on its weight.
    """
    epochs, blocks = counts.shape
    in_all = counts.cumsum(axis=0)
    for number in range(epochs):
        passes = (number + 1) * weight  # that each block should have had by now
        assert in_all[number].sum() == math.floor(passes * blocks)
        assert {math.floor(passes), math.ceil(passes)} >= set(in_all[number].tolist())
        assert {math.floor(weight), math.ceil(weight)} >= set(counts[number].tolist())
    assert set(np.diff(counts.sum(axis=1))) <= {-1, 0, 1}


@given(seed=st.integers(0, 2**63), epochs=st.integers(1, 12), groups=some_groups)
def test_each_group_of_a_mixture_is_used_as_its_weight_says(
    seed: int, epochs: int, groups: list[BlockGroup]
) -> None:
    counts = uses(seed, epochs, groups)
    for group, part in zip(groups, parts(groups), strict=True):
        assert_used_as_weighted(counts[:, part], Decimal(repr(group.weight)))


@pytest.mark.parametrize(
    ("weight", "blocks", "expected"),
    [
        (0.1, 1, [0] * 9 + [1] + [0] * 9 + [1]),
        (0.5, 3, [1, 2, 1, 2]),
        (2.5, 1, [2, 3, 2, 3]),
        (
            0.3,
            1,
            [0, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0],
        ),  # in floating point, 10 * 0.3 and 3.0 may differ
    ],
)
def test_small_groups_wait_for_their_turn(weight: float, blocks: int, expected: list[int]) -> None:
    groups = [BlockGroup(weight, blocks)]
    assert uses(0, len(expected), groups).sum(axis=1).tolist() == expected
    assert [epoch_blocks(groups, number) for number in range(len(expected))] == expected


@given(groups=some_groups, batch=sizes, epochs=st.integers(0, 30))
def test_steps_are_numbered_through_all_epochs(
    groups: list[BlockGroup], batch: int, epochs: int
) -> None:
    lengths = [-(-epoch_blocks(groups, number) // batch) for number in range(epochs)]
    assert [epoch_steps(groups, batch, number) for number in range(epochs)] == lengths
    assert total_steps(groups, batch, epochs) == sum(lengths)
    numbered = [number for number, length in enumerate(lengths) for _ in range(length)]
    assert [epoch_of(step, groups, batch) for step in range(sum(lengths))] == numbered


@given(groups=some_groups, batch=sizes, whole=st.integers(0, 5), tenths=st.integers(0, 9))
def test_a_part_of_an_epoch_is_a_part_of_its_steps_rounded_up(
    groups: list[BlockGroup], batch: int, whole: int, tenths: int
) -> None:
    more = -(-tenths * epoch_steps(groups, batch, whole) // 10)
    assert (
        total_steps(groups, batch, float(f"{whole}.{tenths}"))
        == total_steps(groups, batch, whole) + more
    )


def test_an_epoch_without_a_block_has_no_step() -> None:
    # one is used at the end of epochs 3, 7, ..., the other of 4, 9, ...
    groups = [BlockGroup(0.25, 1), BlockGroup(0.1, 2)]
    assert [total_steps(groups, 8, epochs) for epochs in range(9)] == [0, 0, 0, 0, 1, 2, 2, 2, 3]
    assert [epoch_of(step, groups, 8) for step in range(3)] == [3, 4, 7]
    assert step_blocks(0, 0, groups, 8).tolist() == [0]


@pytest.mark.parametrize(("weight", "each"), [(1.0, 2), (3.0, 5), (0.5, 1)])
def test_steps_far_away_are_found_at_once(weight: float, each: int) -> None:
    groups, epochs = [BlockGroup(weight, 10)], 10**12
    assert total_steps(groups, 6, epochs) == each * epochs
    assert epoch_of(each * epochs - 1, groups, 6) == epochs - 1
    assert len(step_blocks(0, each * epochs - 1, groups, 6)) in {4, 5, 6}


@given(seed=st.integers(0, 99), step=st.integers(0, 40), groups=some_groups, batch=sizes)
def test_a_step_is_the_same_whatever_was_asked_before(
    seed: int, step: int, groups: list[BlockGroup], batch: int
) -> None:
    first = step_blocks(seed, step, groups, batch).tolist()
    step_blocks(seed + 1, step + 3, [*groups, BlockGroup(1.0, 3)], batch)
    assert step_blocks(seed, step, tuple(groups), batch).tolist() == first


@given(
    seed=st.integers(0, 99),
    step=st.integers(0, 40),
    groups=some_groups,
    batch=sizes,
    world=small,
    micro=small,
)
def test_the_ranks_share_a_step_exactly(
    seed: int, step: int, groups: list[BlockGroup], batch: int, world: int, micro: int
) -> None:
    ids = step_blocks(seed, step, groups, batch)
    costs = (ids * 7919 + seed) % 1000
    shares = [rank_blocks(ids, costs, rank, world, micro) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1  # or a collective waits for ever
    micro_batches = [micro_batch for share in shares for micro_batch in share]
    assert all(len(micro_batch) == micro for micro_batch in micro_batches)
    used = np.concatenate(micro_batches)
    assert sorted(used[used != PADDING].tolist()) == sorted(ids.tolist())
    if len(ids) % (world * micro) == 0:
        assert PADDING not in used
    real = [sum(int((micro_batch != PADDING).sum()) for micro_batch in share) for share in shares]
    assert max(real) - min(real) <= 1
    assert len(shares[0]) == -(-len(ids) // (world * micro))  # and never more than needed


def test_blocks_of_one_cost_are_dealt_in_order() -> None:
    shares = [rank_blocks(np.arange(5), np.full(5, 9), rank, world=2, micro=2) for rank in range(2)]
    assert [[part.tolist() for part in share] for share in shares] == [
        [[0, 2], [4, -1]],
        [[1, 3], [-1, -1]],
    ]


def test_blocks_of_like_cost_share_a_micro_step() -> None:
    ids, costs = np.array([10, 11, 12, 13, 14, 15]), np.array([5, 90, 6, 91, 50, 52])
    shares = [
        [int(part[0]) for part in rank_blocks(ids, costs, rank, world=2, micro=1)]
        for rank in range(2)
    ]
    # 91 | 90, then 50 | 52 and 6 | 5: dearest to who had least
    assert shares == [[13, 14, 12], [11, 15, 10]]


def test_each_micro_step_is_balanced_by_itself() -> None:
    """The second begins with ranks' parts of the whole step, and goes on with its own."""
    costs = np.array([100, 10, 9, 8, 7, 6, 5, 4])
    shares = [
        [part.tolist() for part in rank_blocks(np.arange(8), costs, rank, world=2, micro=2)]
        for rank in range(2)
    ]
    assert shares == [[[0, 3], [5, 6]], [[1, 2], [4, 7]]]


def waiting(
    costs: NDArray[np.int64], world: int, micro: int, deal: Callable[..., list[NDArray[np.int64]]]
) -> float:
    """The part of a step that ranks wait for the slowest, if they meet after each micro-step."""
    padded = np.append(costs, 0)  # PADDING is -1
    ids = np.arange(len(costs))
    spent = np.array(
        [
            [padded[part].sum() for part in deal(ids, costs, rank, world, micro)]
            for rank in range(world)
        ]
    )
    return 1 - float(spent.mean(axis=0).sum() / spent.max(axis=0).sum())


def dealt_in_order(
    ids: NDArray[np.int64], costs: NDArray[np.int64], rank: int, world: int, micro: int
) -> list[NDArray[np.int64]]:
    mine = np.full(-(-len(ids) // (world * micro)) * micro, PADDING)
    mine[: len(ids[rank::world])] = ids[rank::world]
    return list(mine.reshape(-1, micro))


def skewed_costs(seed: int, blocks: int) -> NDArray[np.int64]:
    """Some blocks are one long document, others many short ones."""
    lengths = 2 ** np.random.default_rng(seed).integers(5, 14, blocks)
    return 8192 * lengths


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_dealing_by_cost_waits_less_than_dealing_in_order(
    world: int, micro: int, accumulation: int
) -> None:
    cases = [skewed_costs(seed, world * micro * accumulation) for seed in range(30)]
    by_cost = np.mean([waiting(costs, world, micro, rank_blocks) for costs in cases])
    in_order = np.mean([waiting(costs, world, micro, dealt_in_order) for costs in cases])
    if micro == accumulation == 1:  # one block for each rank: nothing to choose
        assert by_cost == pytest.approx(in_order)
    else:
        assert by_cost < (0.9 if accumulation == 1 else 0.6) * in_order


@given(costs=st.lists(st.integers(1, 10**12), min_size=1, max_size=60), world=st.integers(1, 8))
def test_single_blocks_never_wait_longer_than_when_dealt_in_order(
    costs: list[int], world: int
) -> None:
    array = np.array(costs, dtype=np.int64)
    assert waiting(array, world, 1, rank_blocks) <= waiting(array, world, 1, dealt_in_order) + 1e-12


def test_the_order_is_the_same_for_ever() -> None:
    # Golden values: a resumed run must see the order that it began with, whatever was updated
    # meanwhile.
    ten = [BlockGroup(1.0, 10)]
    assert step_blocks(0, 0, ten, 4).tolist() == GOLDEN[0]
    assert step_blocks(0, 3, ten, 4).tolist() == GOLDEN[1]
    assert step_blocks(1, 2, ten, 4).tolist() == GOLDEN[2]
    mixture = [BlockGroup(0.5, 6), BlockGroup(2.0, 3)]
    assert [step_blocks(0, step, mixture, 5).tolist() for step in range(4)] == GOLDEN_MIXTURE


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(step_blocks(seed, number, [BlockGroup(1.0, 50)], 50))
        for seed in range(3)
        for number in range(3)
    }
    assert len(orders) == 9


def test_a_step_cannot_be_written_over() -> None:
    assert not step_blocks(0, 0, [BlockGroup(1.0, 10)], 4).flags.writeable
