"""Which blocks each step and each rank trains on: a pure function of (seed, step), for any number of ranks.

So a run resumes from one integer, and the global batches are the same however many ranks share them.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.data.random64 import key_of, permutation

PADDING = -1


def steps_per_epoch(blocks: int, batch_blocks: int) -> int:
    """Steps that use each of `blocks` once; the last may be short."""
    return -(-blocks // batch_blocks)


def step_blocks(seed: int, step: int, blocks: int, batch_blocks: int) -> NDArray[np.int64]:
    """The block ids of global step `step`, counted from 0 over all epochs: int64[<= batch_blocks].

    Every epoch is a new permutation of all blocks, cut into batches.
    """
    epoch, step_in_epoch = divmod(step, steps_per_epoch(blocks, batch_blocks))
    first = step_in_epoch * batch_blocks
    return _epoch_order(seed, epoch, blocks)[first : first + batch_blocks]


def rank_blocks(ids: NDArray[np.int64], rank: int, world: int, micro: int) -> list[NDArray[np.int64]]:
    """The micro-batches of `rank` among the `world` ranks that share the step `ids`: int64[micro] each.

    Every rank gets the same number of them, because collectives have to match; what is missing is `PADDING`,
    and a rank's share differs from another's by at most one block. Over the ranks, each id occurs once.
    """
    per_rank = -(-len(ids) // (world * micro)) * micro
    mine = np.full(per_rank, PADDING, dtype=np.int64)
    share = ids[rank::world]
    mine[: len(share)] = share
    return list(mine.reshape(-1, micro))


@lru_cache(maxsize=1)
def _epoch_order(seed: int, epoch: int, blocks: int) -> NDArray[np.int64]:
    order = permutation(key_of(seed, epoch), blocks)
    order.setflags(write=False)
    return order
