"""How many ranks may share each block, which `train.context_ranks: auto` leaves to the plan."""

from collections.abc import Collection

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.checks import allows_count, has_few_blocks
from pipeline_lib.config.train import Train
from pipeline_lib.core import units
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.steps import is_shared_well
from pipeline_lib.plan.workload import free_keys


def sharing_counts(
    geometry: Geometry,
    train: Train,
    fixed: Collection[str],
    ranks: Ranks,
    block_tokens: int,
    batch_blocks: int,
) -> list[int]:
    """Return the numbers of ranks that may share each block, the smallest first.

    If one is given, return it alone. They share heads and tokens equally, within a node or over
    whole nodes. If a batch has fewer blocks than the ranks process at a time without sharing them,
    the numbers are those with which no rank is idle. If there is none, the list is empty; with
    `global_batch_samples`, for which the blocks are an average, it is 1 then.
    """
    free = free_keys(train, fixed)
    if "context_ranks" not in free:
        return [train.ranks_per_block]
    if "micro_batch_blocks" in free:
        train = train.model_copy(update={"micro_batch_blocks": 1})
    found = [
        count
        for count in allowed_counts(geometry, train, ranks.per_node, block_tokens)
        if ranks.total % count == 0
    ]
    if not has_few_blocks(train, ranks.total, batch_blocks):
        return found
    micro = train.micro_batch_blocks
    busy = [
        count
        for count in found
        if is_shared_well(train, ranks.total // count * micro, batch_blocks)
    ]
    return busy if busy or train.global_batch_samples is None else [1]


def not_shared(train: Train, ranks: int, block_tokens: int, batch_blocks: int) -> str:
    """Return the problem of a batch for which `sharing_counts` is empty, in words."""
    micro = train.micro_batch_blocks
    at_once = f"the {ranks} ranks" if micro == 1 else f"{ranks} ranks x {micro} blocks"
    text = (
        f"it has {units.count(batch_blocks, 'blocks')} of {block_tokens} tokens, fewer than "
        f"{at_once}"
    )
    found = (
        "and no number of ranks that could share each block (train.context_ranks) leaves none "
        "of them idle"
    )
    return f"train.global_batch_tokens: {text}, {found}; try {ranks * micro * block_tokens}"


def allowed_counts(geometry: Geometry, train: Train, per_node: int, block_tokens: int) -> list[int]:
    """Return the numbers of ranks that may share each block on nodes of `per_node`.

    The smallest comes first.
    """
    return [
        count
        for count in geometry.sharing_ranks
        if allows_count(train, block_tokens, count) and 0 in (per_node % count, count % per_node)
    ]
