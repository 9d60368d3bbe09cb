"""The order of training: the blocks of each step and rank as a pure function of (seed, step).

A run resumes from one integer, and the global batches do not depend on the number of ranks. After e
epochs, each block of a group of weight w has been used floor(e * w) or ceil(e * w) times. So epochs
may differ by a block per group, and therefore by a step; an epoch may be empty if all weights are
small.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.config.train import Train
from pipeline_lib.data.documents import key_of, permutation
from pipeline_lib.records.data import BlockGroup

PADDING = -1


def epoch_blocks(groups: Sequence[BlockGroup], epoch: int = 0) -> int:
    """Return the number of blocks of `epoch`, each use counted.

    The first epoch has the fewest blocks; any other has at most one more for each group.
    """
    return sum(group.used(epoch + 1) - group.used(epoch) for group in groups)


def epoch_steps(groups: Sequence[BlockGroup], batch_blocks: int, epoch: int = 0) -> int:
    """Return the number of steps of `epoch`; the last step may be short."""
    return -(-epoch_blocks(groups, epoch) // batch_blocks)


def total_steps(groups: Sequence[BlockGroup], batch_blocks: int, epochs: float) -> int:
    """Return the total steps of the first `epochs` epochs; a fraction is rounded up to steps."""
    whole, fraction = divmod(Fraction(str(epochs)), 1)
    period = _period(groups)
    rounds, rest = divmod(whole, period)
    before = _steps_before(tuple(groups), batch_blocks, min(whole, period))
    return (
        rounds * before[-1]
        + before[rest]
        + math.ceil(fraction * epoch_steps(groups, batch_blocks, whole))
    )


def run_steps(train: Train, groups: Sequence[BlockGroup], batch_blocks: int) -> int:
    """Return the number of steps of a run's schedule: `max_steps`, or those of its epochs."""
    return train.max_steps or total_steps(groups, batch_blocks, train.epochs)


def run_epochs(train: Train, groups: Sequence[BlockGroup], batch_blocks: int) -> float:
    """Return the epochs of a run's schedule; with `max_steps`, rounded to hundredths."""
    if train.max_steps is None:
        return train.epochs
    return round(
        train.max_steps * batch_blocks / float(sum(group.per_epoch for group in groups)), 2
    )


def epoch_of(step: int, groups: Sequence[BlockGroup], batch_blocks: int) -> int:
    """Return the epoch of global step `step`, both counted from 0."""
    return _locate(step, tuple(groups), batch_blocks)[0]


def step_blocks(
    seed: int, step: int, groups: Sequence[BlockGroup], batch_blocks: int
) -> NDArray[np.int64]:
    """Return the block ids of global step `step`, counted over all epochs: int64[<= batch_blocks].

    `step` is counted from 0. Each epoch is a new permutation of the blocks that it uses, cut into
    batches.
    """
    epoch, step_in_epoch = _locate(step, tuple(groups), batch_blocks)
    first = step_in_epoch * batch_blocks
    return _epoch_order(seed, epoch, tuple(groups))[first : first + batch_blocks]


def rank_blocks(
    ids: NDArray[np.int64], costs: NDArray[np.int64], rank: int, world: int, micro: int
) -> list[NDArray[np.int64]]:
    """Return `rank`'s micro-batches for a step of blocks `ids` among `world`: int64[micro] each.

    All ranks get the same number of micro-batches, because collectives have to match. Missing
    blocks are `PADDING`, and the shares of ranks differ by at most one block. Over all ranks, each
    id occurs once.

    `costs` (int64[ids], in any unit) balance the ranks. Ranks wait for each other in every
    micro-step, so blocks of similar cost share one: blocks are dealt by descending cost, one to
    each rank, and the costliest of each deal goes to the rank with the lowest cost so far in the
    micro-step.
    """
    rows = -(-len(costs) // (world * micro)) * micro
    # positions in `ids` of each rank's blocks, -1 for none
    dealt = np.full((rows, world), -1, dtype=np.int64)
    dearest_first = np.argsort(-costs, kind="stable")
    in_micro_step = np.zeros(world, dtype=np.int64)
    in_step = np.zeros(world, dtype=np.int64)
    for row in range(-(-len(costs) // world)):
        if row % micro == 0:
            in_micro_step[:] = 0
        chosen = dearest_first[row * world : (row + 1) * world]
        ranks = np.lexsort((in_step, in_micro_step))[: len(chosen)]
        dealt[row, ranks] = chosen
        in_micro_step[ranks] += costs[chosen]
        in_step[ranks] += costs[chosen]
    padded = np.append(ids, PADDING)  # -1 is the last position
    return list(padded[dealt[:, rank]].reshape(-1, micro))


def _locate(step: int, groups: tuple[BlockGroup, ...], batch_blocks: int) -> tuple[int, int]:
    """Return the epoch of a global step, and the number of the step in that epoch."""
    period = _period(groups)
    epochs = 1
    before = _steps_before(groups, batch_blocks, epochs)
    while before[-1] <= step and epochs < period:
        epochs = min(2 * epochs, period)
        before = _steps_before(groups, batch_blocks, epochs)
    rounds, step = divmod(step, before[-1])  # `rounds` is 0 unless `epochs` is the period
    epoch = bisect_right(before, step) - 1
    return rounds * epochs + epoch, step - before[epoch]


def _period(groups: Sequence[BlockGroup]) -> int:
    """Return after how many epochs their lengths repeat: 1 if all weights are integers."""
    return math.lcm(*(group.per_epoch.denominator for group in groups))


@lru_cache(maxsize=128)
def _steps_before(groups: tuple[BlockGroup, ...], batch_blocks: int, epochs: int) -> list[int]:
    """Return the steps before each of the first `epochs` epochs, then their total: [epochs + 1]."""
    used = (sum(group.used(epoch) for group in groups) for epoch in range(epochs + 1))
    steps = (-(-(end - first) // batch_blocks) for first, end in pairwise(used))
    return list(accumulate(steps, initial=0))


@lru_cache(maxsize=1)
def _epoch_order(seed: int, epoch: int, groups: tuple[BlockGroup, ...]) -> NDArray[np.int64]:
    taken, start = [], 0
    for number, group in enumerate(groups):
        # A group's blocks are used in a fixed cyclic order; each epoch continues where the one
        # before it ended.
        # three parts, so that it is not the key of an epoch
        cycle = permutation(key_of(seed, number, 0), group.blocks)
        first = group.used(epoch)
        end = group.used(epoch + 1)
        taken.append(start + cycle[(first % group.blocks + np.arange(end - first)) % group.blocks])
        start += group.blocks
    used = np.sort(np.concatenate(taken))
    order = used[permutation(key_of(seed, epoch), len(used))]
    order.setflags(write=False)
    return order
