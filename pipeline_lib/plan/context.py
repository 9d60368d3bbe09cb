"""How many ranks may share each block, which `train.context_ranks: auto` leaves to the plan."""

from collections.abc import Collection

from pipeline_lib.config.checks import may_be_shared
from pipeline_lib.config.train import Train
from pipeline_lib.model.geometry import Geometry
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.steps import is_shared_well
from pipeline_lib.plan.workload import free_keys


def rank_counts(
    geometry: Geometry, train: Train, held: Collection[str], ranks: Ranks, block_tokens: int, batch_blocks: int
) -> list[int]:
    """Return the numbers of ranks that may share each block, the smallest first.

    They share heads and tokens equally, within a node or over whole nodes. If a batch has fewer blocks than there are
    ranks, the numbers are those with which ranks are not idle; if there is none, that is 1 alone, as `not_shared` says.
    """
    return _counts(geometry, train, held, ranks, block_tokens, batch_blocks) or [1]


def not_shared(
    geometry: Geometry, train: Train, held: Collection[str], ranks: Ranks, block_tokens: int, batch_blocks: int
) -> str | None:
    """Return why these ranks cannot share a batch of `global_batch_tokens` with fewer blocks than ranks; None if so."""
    if train.global_batch_samples is not None or _counts(geometry, train, held, ranks, block_tokens, batch_blocks):
        return None
    text = f"its {batch_blocks} blocks of {block_tokens} tokens are fewer than the {ranks.total} ranks"
    found = "and no number of ranks that could share each block (train.context_ranks) leaves none of them idle"
    return f"train.global_batch_tokens: {text}, {found}; try {ranks.total * train.micro_batch_blocks * block_tokens}"


def _counts(
    geometry: Geometry, train: Train, held: Collection[str], ranks: Ranks, block_tokens: int, batch_blocks: int
) -> list[int]:
    free = free_keys(train, held)
    if "context_ranks" not in free:
        return [train.ranks_per_block]
    found = [
        count for count in allowed_counts(geometry, train, ranks.per_node, block_tokens) if ranks.total % count == 0
    ]
    if batch_blocks >= ranks.total:
        return found
    micro = 1 if "micro_batch_blocks" in free else train.micro_batch_blocks
    return [count for count in found if is_shared_well(train, ranks.total // count * micro, batch_blocks)]


def allowed_counts(geometry: Geometry, train: Train, per_node: int, block_tokens: int) -> list[int]:
    """Return the numbers of ranks that may share each block on enough nodes of `per_node` ranks, the smallest first."""
    return [
        count
        for count in geometry.sharing_ranks
        if may_be_shared(train, count, block_tokens, count) and 0 in (per_node % count, count % per_node)
    ]
