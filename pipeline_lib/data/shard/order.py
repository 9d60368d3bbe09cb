"""Which blocks each step and each rank trains on: a pure function of (seed, step), for any number of ranks.

So a run resumes from one integer, and the global batches are the same however many ranks share them. Epochs have a
constant length: a group of blocks of weight w is used w times per epoch, in turns where w is no whole number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.data.random64 import key_of, permutation

PADDING = -1


@dataclass(frozen=True)
class Group:
    """Consecutive blocks that an epoch uses `weight` times each. The groups of an order follow one another."""

    weight: float
    blocks: int

    @property
    def epoch_blocks(self) -> int:
        """Blocks taken from the group in every epoch: a block more often than another by one at the most."""
        return max(1, round(self.weight * self.blocks))


def epoch_blocks(groups: Sequence[Group]) -> int:
    """Blocks of one epoch, those used again counted again."""
    return sum(group.epoch_blocks for group in groups)


def steps_per_epoch(groups: Sequence[Group], batch_blocks: int) -> int:
    """Steps of one epoch; the last may be short."""
    return -(-epoch_blocks(groups) // batch_blocks)


def step_blocks(seed: int, step: int, groups: Sequence[Group], batch_blocks: int) -> NDArray[np.int64]:
    """The block ids of global step `step`, counted from 0 over all epochs: int64[<= batch_blocks].

    Every epoch is a new permutation of the blocks that it uses, cut into batches.
    """
    epoch, step_in_epoch = divmod(step, steps_per_epoch(groups, batch_blocks))
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
    """What `epoch` uses of a group: the next `epoch_blocks` of its blocks, which go round in one fixed order."""
    fixed = permutation(key_of(seed, number, 0), group.blocks)  # three parts: not the key of an epoch
    first = epoch * group.epoch_blocks % group.blocks
    return fixed[(first + np.arange(group.epoch_blocks)) % group.blocks]
