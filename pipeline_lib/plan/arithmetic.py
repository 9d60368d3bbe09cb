"""Batches and steps, and what a checkpoint takes on disk."""

import math
from dataclasses import dataclass

from pipeline_lib.base.errors import DataError
from pipeline_lib.config.schema import Train
from pipeline_lib.data.shard.blocks import BlockIndex
from pipeline_lib.data.shard.order import Group, epoch_steps, total_steps
from pipeline_lib.plan.geometry import Geometry

FP32_BYTES = 4
MOMENTS_BYTES = 2 * FP32_BYTES


@dataclass(frozen=True)
class BatchPlan:
    """How the blocks become optimizer steps.

    `epoch_blocks` and `steps_per_epoch` are those of the first epoch, and `last_step_blocks` the blocks of its last
    step; where weights are no whole numbers, later epochs may have a few more. `steps` are those of the whole run.
    """

    block_tokens: int
    blocks: int
    epoch_blocks: int
    validation_blocks: int
    global_batch_blocks: int
    micro_batch_blocks: int
    accumulation: int
    steps_per_epoch: int
    epochs: int
    steps: int
    last_step_blocks: int
    tokens_per_step: int
    padding_fraction: float


def plan_batches(train: Train, ranks: int, training: BlockIndex, validation_blocks: int) -> BatchPlan:
    """The batch arithmetic over `ranks` ranks. Raises DataError if no step comes of the training blocks."""
    batch_blocks = train.global_batch_tokens // training.block_tokens
    all_steps = total_steps(training.groups, batch_blocks, train.epochs)
    if not all_steps:
        raise _nothing_to_train_on(training.groups, train.epochs)
    return BatchPlan(
        block_tokens=training.block_tokens,
        blocks=training.blocks,
        epoch_blocks=training.epoch_blocks,
        validation_blocks=validation_blocks,
        global_batch_blocks=batch_blocks,
        micro_batch_blocks=train.micro_batch_blocks,
        accumulation=batch_blocks // (ranks * train.micro_batch_blocks),
        steps_per_epoch=epoch_steps(training.groups, batch_blocks),
        epochs=train.epochs,
        steps=min(train.until_step or all_steps, all_steps),
        last_step_blocks=_last_step_blocks(training.epoch_blocks, batch_blocks),
        tokens_per_step=batch_blocks * training.block_tokens,
        padding_fraction=round(1 - training.packing_efficiency, 6),
    )


def _last_step_blocks(epoch_blocks: int, batch_blocks: int) -> int:
    """Of the steps that take `epoch_blocks`; 0 if there are none."""
    return (epoch_blocks - 1) % batch_blocks + 1 if epoch_blocks else 0


def _nothing_to_train_on(groups: list[Group], epochs: int) -> DataError:
    held = ", ".join(f"{group.blocks} of weight {group.weight:g}" for group in groups)
    needed = min(math.ceil(1 / group.per_epoch) for group in groups)
    return DataError(
        f"no step to train: of the training blocks ({held}), {epochs} epochs use none, because blocks times weight "
        f"times epochs is less than 1; set train.epochs to {needed} or more, or raise the weights in data.train"
    )


def checkpoint_bytes(geometry: Geometry, train: Train) -> int:
    """Size of a checkpoint: fp32 weights and moments of what is trained."""
    return geometry.trained_parameters(train) * (FP32_BYTES + MOMENTS_BYTES)
