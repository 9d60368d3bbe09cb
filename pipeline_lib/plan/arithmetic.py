"""Batches, steps and bytes. A strategy is planned by what each rank holds of the model state."""

import math
from dataclasses import asdict, dataclass

from pipeline_lib.base.errors import DataError
from pipeline_lib.config.schema import Train
from pipeline_lib.data.shard.blocks import BlockIndex
from pipeline_lib.data.shard.order import Group, epoch_steps, total_steps
from pipeline_lib.plan.geometry import Geometry

FP32_BYTES = 4
BF16_BYTES = 2
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


@dataclass(frozen=True)
class StateMemory:
    """Bytes of model state that one rank holds between steps; activations come on top."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    total_bytes: int


def state_memory(geometry: Geometry, train: Train, strategy: str, ranks: int) -> StateMemory:
    """Model state per rank.

    Trained weights, their gradients and both Adam moments are fp32: 4 + 4 + 8 bytes per trained parameter.
    Frozen weights are in the precision of the arithmetic. fsdp divides all of it by the number of ranks;
    layers gathered for use come on top.
    """
    share = ranks if strategy == "fsdp" else 1
    trained = trainable_parameters(geometry, train)
    frozen = geometry.parameters if train.method == "lora" else 0
    frozen_bytes = frozen * (BF16_BYTES if train.precision == "bf16" else FP32_BYTES)
    weights = math.ceil((trained * FP32_BYTES + frozen_bytes) / share)
    gradients = math.ceil(trained * FP32_BYTES / share)
    moments = math.ceil(trained * MOMENTS_BYTES / share)
    return StateMemory(weights, gradients, moments, weights + gradients + moments)


def trainable_parameters(geometry: Geometry, train: Train) -> int:
    """Parameters that get gradients."""
    return geometry.adapter_parameters(train.lora) if train.method == "lora" else geometry.parameters


def checkpoint_bytes(geometry: Geometry, train: Train) -> int:
    """Size of a checkpoint: fp32 weights and moments of what is trained."""
    return trainable_parameters(geometry, train) * (FP32_BYTES + MOMENTS_BYTES)


def memory_by_strategy(geometry: Geometry, train: Train, ranks: int) -> dict[str, dict[str, int]]:
    """`state_memory` of every strategy."""
    return {name: asdict(state_memory(geometry, train, name, ranks)) for name in ("ddp", "fsdp")}
