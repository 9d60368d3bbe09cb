"""Which blocks each step and each rank trains on: a pure function of (seed, step), for any number of ranks.

So a run resumes from one integer, and the global batches are the same however many ranks share them. After e epochs,
each block of a group of weight w has been used floor or ceil of e * w times. So an epoch has now and then a block
more than another, which may be a step more; one of small weights alone may have none.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.data.documents import key_of, permutation

PADDING = -1


@dataclass(frozen=True)
class Group:
    """Consecutive blocks that an epoch uses `weight` times each. The groups of an order follow one another."""

    weight: float
    blocks: int

    @cached_property
    def per_epoch(self) -> Fraction:
        """Blocks of an average epoch: those of the group times the weight as it is written, 0.1 being a tenth."""
        return Fraction(str(self.weight)) * self.blocks

    def used(self, epochs: int) -> int:
        """Blocks that the first `epochs` epochs use in all, each use counted."""
        return math.floor(epochs * self.per_epoch)


def epoch_blocks(groups: Sequence[Group], epoch: int = 0) -> int:
    """Blocks of that epoch, each use counted. The first has the fewest, any other at most one more for each group."""
    return sum(group.used(epoch + 1) - group.used(epoch) for group in groups)


def epoch_steps(groups: Sequence[Group], batch_blocks: int, epoch: int = 0) -> int:
    """Steps of that epoch, of which the last may be short."""
    return -(-epoch_blocks(groups, epoch) // batch_blocks)


def total_steps(groups: Sequence[Group], batch_blocks: int, epochs: int) -> int:
    """Steps of the first `epochs` epochs."""
    period = _period(groups)
    rounds, rest = divmod(epochs, period)
    before = _steps_before(tuple(groups), batch_blocks, min(epochs, period))
    return rounds * before[-1] + before[rest]


def epoch_of(step: int, groups: Sequence[Group], batch_blocks: int) -> int:
    """The epoch of global step `step`, both counted from 0."""
    return _locate(step, tuple(groups), batch_blocks)[0]


def step_blocks(seed: int, step: int, groups: Sequence[Group], batch_blocks: int) -> NDArray[np.int64]:
    """The block ids of global step `step`, counted from 0 over all epochs: int64[<= batch_blocks].

    Every epoch is a new permutation of the blocks that it uses, cut into batches.
    """
    epoch, step_in_epoch = _locate(step, tuple(groups), batch_blocks)
    first = step_in_epoch * batch_blocks
    return _epoch_order(seed, epoch, tuple(groups))[first : first + batch_blocks]


def rank_blocks(
    ids: NDArray[np.int64], costs: NDArray[np.int64], rank: int, world: int, micro: int
) -> list[NDArray[np.int64]]:
    """The micro-batches of `rank` among the `world` ranks that share the step `ids`: int64[micro] each.

    Every rank gets the same number of them, because collectives have to match; what is missing is `PADDING`,
    and a rank's share differs from another's by at most one block. Over the ranks, each id occurs once.

    `costs` (int64[ids], in any unit) balance the ranks. They wait for each other in every micro-step, so blocks of
    like cost share one: the dearest go first, one to each rank, the dearest of them to the rank that has had least.
    """
    padded = np.append(ids, PADDING)
    return list(padded[_deal(costs, world, micro)[:, rank]].reshape(-1, micro))


def _deal(costs: NDArray[np.int64], world: int, micro: int) -> NDArray[np.int64]:
    """Positions in `costs` of each rank's blocks, -1 for none: int64[rows, world], rows a multiple of `micro`."""
    rows = -(-len(costs) // (world * micro)) * micro
    dealt = np.full((rows, world), -1, dtype=np.int64)
    dearest_first = np.argsort(-costs, kind="stable")
    in_micro_step, in_step = np.zeros(world, dtype=np.int64), np.zeros(world, dtype=np.int64)
    for row in range(-(-len(costs) // world)):
        if row % micro == 0:
            in_micro_step[:] = 0
        chosen = dearest_first[row * world : (row + 1) * world]
        ranks = np.lexsort((in_step, in_micro_step))[: len(chosen)]
        dealt[row, ranks] = chosen
        in_micro_step[ranks] += costs[chosen]
        in_step[ranks] += costs[chosen]
    return dealt


def _locate(step: int, groups: tuple[Group, ...], batch_blocks: int) -> tuple[int, int]:
    """The epoch of a global step, and the step's number in it."""
    period, epochs = _period(groups), 1
    before = _steps_before(groups, batch_blocks, epochs)
    while before[-1] <= step and epochs < period:
        epochs = min(2 * epochs, period)
        before = _steps_before(groups, batch_blocks, epochs)
    rounds, step = divmod(step, before[-1])  # no more than 0 rounds, unless `epochs` is the period
    epoch = bisect_right(before, step) - 1
    return rounds * epochs + epoch, step - before[epoch]


def _period(groups: Sequence[Group]) -> int:
    """Epochs after which their lengths repeat: 1 if all weights are whole."""
    return math.lcm(*(group.per_epoch.denominator for group in groups))


@lru_cache(maxsize=128)
def _steps_before(groups: tuple[Group, ...], batch_blocks: int, epochs: int) -> list[int]:
    """Steps before each of the first `epochs` epochs, and last those of all of them: [epochs + 1]."""
    used = (sum(group.used(epoch) for group in groups) for epoch in range(epochs + 1))
    steps = (-(-(end - first) // batch_blocks) for first, end in pairwise(used))
    return list(accumulate(steps, initial=0))


@lru_cache(maxsize=1)
def _epoch_order(seed: int, epoch: int, groups: tuple[Group, ...]) -> NDArray[np.int64]:
    taken, first = [], 0
    for number, group in enumerate(groups):
        taken.append(first + _turns(seed, epoch, number, group))
        first += group.blocks
    used = np.sort(np.concatenate(taken))
    order = used[permutation(key_of(seed, epoch), len(used))]
    order.setflags(write=False)
    return order


def _turns(seed: int, epoch: int, number: int, group: Group) -> NDArray[np.int64]:
    """What `epoch` uses of a group: its blocks go round in one fixed order, and each epoch goes on where one ended."""
    fixed = permutation(key_of(seed, number, 0), group.blocks)  # three parts: not the key of an epoch
    first, end = group.used(epoch), group.used(epoch + 1)
    return fixed[(first % group.blocks + np.arange(end - first)) % group.blocks]
