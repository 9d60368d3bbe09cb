"""Batches, steps and bytes. A strategy is planned by what each rank holds of the model state."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline_lib.config.schema import Train
from pipeline_lib.plan.geometry import Geometry

FP32_BYTES = 4
BF16_BYTES = 2
MOMENTS_BYTES = 2 * FP32_BYTES


@dataclass(frozen=True)
class BatchPlan:
    """How the blocks of an epoch become optimizer steps."""

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


def plan_batches(train: Train, ranks: int, training: Mapping[str, Any], validation_blocks: int) -> BatchPlan:
    """The batch arithmetic over `ranks` ranks of blocks whose index.json is `training`."""
    block_tokens, blocks, epoch_blocks = training["block_tokens"], training["blocks"], training["epoch_blocks"]
    batch_blocks = train.global_batch_tokens // block_tokens
    steps_per_epoch = math.ceil(epoch_blocks / batch_blocks)
    all_steps = steps_per_epoch * train.epochs
    return BatchPlan(
        block_tokens=block_tokens,
        blocks=blocks,
        epoch_blocks=epoch_blocks,
        validation_blocks=validation_blocks,
        global_batch_blocks=batch_blocks,
        micro_batch_blocks=train.micro_batch_blocks,
        accumulation=batch_blocks // (ranks * train.micro_batch_blocks),
        steps_per_epoch=steps_per_epoch,
        epochs=train.epochs,
        steps=min(train.until_step or all_steps, all_steps),
        last_step_blocks=epoch_blocks - (steps_per_epoch - 1) * batch_blocks,
        tokens_per_step=batch_blocks * block_tokens,
        padding_fraction=round(1 - training["tokens"] / (blocks * block_tokens), 6),
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
