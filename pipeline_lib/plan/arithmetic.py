"""Batches and steps, and what the blocks are like.

Loads no numpy before there are blocks: a plan can be asked for without any.
"""

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pipeline_lib.base.errors import DataError
from pipeline_lib.config.schema import Train
from pipeline_lib.plan.workload import Workload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pipeline_lib.data.shard.blocks import BlockIndex
    from pipeline_lib.data.shard.order import Group


@dataclass(frozen=True)
class BatchPlan:
    """How the blocks become optimizer steps.

    `epoch_blocks` and `steps_per_epoch` are those of the first epoch, and `last_step_blocks` the blocks of its last
    step; where weights are no whole numbers, later epochs may have a few more. `steps` are those of the whole run.
    What goes by the blocks is None while there are none.
    """

    block_tokens: int
    global_batch_blocks: int
    micro_batch_blocks: int
    accumulation: int
    epochs: int
    tokens_per_step: int
    blocks: int | None = None
    epoch_blocks: int | None = None
    validation_blocks: int | None = None
    steps_per_epoch: int | None = None
    steps: int | None = None
    last_step_blocks: int | None = None
    padding_fraction: float | None = None


def batch_without_data(train: Train, ranks: int, block_tokens: int) -> BatchPlan:
    """What is known of the batches before there are blocks."""
    batch_blocks = train.global_batch_tokens // block_tokens
    return BatchPlan(
        block_tokens=block_tokens,
        global_batch_blocks=batch_blocks,
        micro_batch_blocks=train.micro_batch_blocks,
        accumulation=batch_blocks // (ranks * train.micro_batch_blocks),
        epochs=train.epochs,
        tokens_per_step=batch_blocks * block_tokens,
    )


def plan_batches(train: Train, ranks: int, training: "BlockIndex", validation_blocks: int) -> BatchPlan:
    """The batch arithmetic over `ranks` ranks. Raises DataError if no step comes of the training blocks."""
    from pipeline_lib.data.shard.order import epoch_steps, total_steps

    batch = batch_without_data(train, ranks, training.block_tokens)
    batch_blocks = batch.global_batch_blocks
    all_steps = total_steps(training.groups, batch_blocks, train.epochs)
    if not all_steps:
        raise _nothing_to_train_on(training.groups, train.epochs)
    return replace(
        batch,
        blocks=training.blocks,
        epoch_blocks=training.epoch_blocks,
        validation_blocks=validation_blocks,
        steps_per_epoch=epoch_steps(training.groups, batch_blocks),
        steps=min(train.until_step or all_steps, all_steps),
        last_step_blocks=_last_step_blocks(training.epoch_blocks, batch_blocks),
        padding_fraction=round(1 - training.packing_efficiency, 6),
    )


def workload_from(index: "BlockIndex", costs: "NDArray[np.int64]", validation_blocks: int = 0) -> Workload:
    """The blocks of `index`; `costs` are the sums of the squared lengths of their documents, int64[blocks]."""
    positions = index.blocks * index.block_tokens
    return Workload(
        block_tokens=index.block_tokens,
        real_fraction=index.packing_efficiency,
        supervised_fraction=index.supervised_tokens / positions,
        document_tokens=float(costs.sum()) / max(1, index.tokens),
        blocks=index.blocks,
        epoch_blocks=index.epoch_blocks,
        validation_blocks=validation_blocks,
    )


def _last_step_blocks(epoch_blocks: int, batch_blocks: int) -> int:
    """Of the steps that take `epoch_blocks`; 0 if there are none."""
    return (epoch_blocks - 1) % batch_blocks + 1 if epoch_blocks else 0


def _nothing_to_train_on(groups: "list[Group]", epochs: int) -> DataError:
    held = ", ".join(f"{group.blocks} of weight {group.weight:g}" for group in groups)
    needed = min(math.ceil(1 / group.per_epoch) for group in groups)
    return DataError(
        f"no step to train: of the training blocks ({held}), {epochs} epochs use none, because blocks times weight "
        f"times epochs is less than 1; set train.epochs to {needed} or more, or raise the weights in data.train"
    )
