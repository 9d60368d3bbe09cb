"""How much memory a rank needs on its device, part by part, for every strategy.

State is exact arithmetic: each trained parameter has its weight, gradient and two Adam moments in fp32 (16 bytes),
a frozen one its weight in the arithmetic's precision, spread as the strategy says. Activations are derived tensor by
tensor (plan/activations.py). What is gathered, cast and exchanged follows how FSDP2, DDP and DeepSpeed do it. Peaks
differ with the moment, so the moments of a step are added up apart and the largest is the prediction. Non-goals: memory
of the host's own, compiled layers (less).
"""

import math
from dataclasses import dataclass, fields
from typing import Any

from pipeline_lib.config.schema import Train
from pipeline_lib.plan.activations import FP32_BYTES, compute_bytes
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.moments import Model, is_sharded, moments_of_step
from pipeline_lib.plan.units import GIB

# What adds up to the total, by the fields of Memory.
PARTS = ("weights", "gradients", "optimizer", "gathered", "exchanged", "activations", "loss", "reserve")
STRATEGIES = ("ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3")
# Blocks of 256 numbers in 8 bits, with one fp32 scale each.
_BYTES_OF_8_BITS = 1 + FP32_BYTES / 256
# What torch's allocator does not count: the CUDA context with its kernels, NCCL's buffers, and what is cut up.
RESERVE_BYTES = 2 * GIB
_CUT_UP = 0.02
# How far predictions were from the peaks measured on GPUs (benchmarks/RESULTS.md), and may be where nothing was: of
# hsdp, which does what fsdp does and exchanges more, and with experts or offloading.
_ERROR, _HSDP_ERROR, _DERIVED_ERROR = 0.05, 0.1, 0.15
MARGIN = 0.06  # of the device's memory, that a run which is said to fit leaves free


@dataclass(frozen=True)
class Ranks:
    """How many ranks there are, and how many of them share a machine."""

    total: int
    per_node: int


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the worst moment of a step, on its device; `host_bytes` is what offloading moves away.

    `gathered_bytes` are weights of other ranks, or casts of one's own, while they are used; `exchanged_bytes` are
    gradients that are not reduced yet, with their buffers. `loss_bytes` are logits and what becomes of them.
    """

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    exchanged_bytes: int
    activations_bytes: int
    loss_bytes: int
    reserve_bytes: int
    host_bytes: int
    moment: str
    error: float  # how far off it may be, as a fraction

    @property
    def state_bytes(self) -> int:
        """What is held between steps: weights, gradients (where they stay) and the optimizer's."""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def allocated_bytes(self) -> int:
        """What torch's allocator will report as its peak."""
        working = self.gathered_bytes + self.exchanged_bytes + self.activations_bytes + self.loss_bytes
        return self.state_bytes + working

    @property
    def total_bytes(self) -> int:
        """What the device has to have."""
        return self.allocated_bytes + self.reserve_bytes

    def as_json(self) -> dict[str, Any]:
        """The parts and their sums, for plan.json."""
        sums = {name: getattr(self, name) for name in ("state_bytes", "allocated_bytes", "total_bytes")}
        return {field.name: getattr(self, field.name) for field in fields(self)} | sums


def predict(geometry: Geometry, train: Train, ranks: Ranks, block_tokens: int, accumulation: int = 2) -> Memory:
    """The memory of one rank that trains as `train` says, on blocks of `block_tokens` tokens.

    `accumulation` counts micro-batches of a step; from the second on there are gradients while activations are made.
    """
    model = Model.of(geometry, train)
    state = _state(model, train, ranks)
    tokens = train.micro_batch_blocks * block_tokens
    moments = moments_of_step(geometry, train, model, tokens, ranks.total)
    gradients_early = state.gradients if accumulation > 1 or not is_sharded(train) else 0
    is_derived = bool(geometry.expert_layers) or train.offload != "none"
    error = _DERIVED_ERROR if is_derived else _HSDP_ERROR if train.strategy == "hsdp" else _ERROR
    found = []
    for number, moment in enumerate(moments):
        gradients = state.gradients if number >= 2 else gradients_early
        allocated = state.weights + gradients + state.optimizer + moment.sum
        found.append(
            Memory(
                weights_bytes=state.weights,
                gradients_bytes=gradients,
                optimizer_bytes=state.optimizer,
                gathered_bytes=moment.gathered,
                exchanged_bytes=moment.exchanged,
                activations_bytes=moment.activations,
                loss_bytes=moment.loss,
                reserve_bytes=RESERVE_BYTES + round(_CUT_UP * allocated),
                host_bytes=state.host,
                moment=moment.name,
                error=error,
            )
        )
    return max(found, key=lambda memory: memory.allocated_bytes)


def predict_all(
    geometry: Geometry, train: Train, ranks: Ranks, block_tokens: int, accumulation: int = 2
) -> dict[str, Memory]:
    """`predict` for every strategy that these ranks can use; those that are not chosen without offloading."""
    found: dict[str, Memory] = {}
    for strategy in STRATEGIES:
        if strategy == train.strategy:
            found[strategy] = predict(geometry, train, ranks, block_tokens, accumulation)
        elif strategy != "hsdp" or 1 < (train.shard_ranks or ranks.per_node) < ranks.total:
            other = train.model_copy(update={"strategy": strategy, "offload": "none"})
            found[strategy] = predict(geometry, other, ranks, block_tokens, accumulation)
    return found


@dataclass(frozen=True)
class _State:
    weights: int
    gradients: int
    optimizer: int
    host: int


def sharded_over(train: Train, ranks: Ranks) -> int:
    """Ranks that share one copy of what the strategy spreads."""
    return {"ddp": 1, "hsdp": train.shard_ranks or ranks.per_node}.get(train.strategy, ranks.total)


def _state(model: Model, train: Train, ranks: Ranks) -> _State:
    """What a rank keeps between steps, and what of it lies in host memory."""
    number, share = compute_bytes(train), sharded_over(train, ranks)
    frozen = model.parameters - model.trained if train.method == "full" else model.parameters
    moments = model.trained * (2 * _BYTES_OF_8_BITS if train.optimizer == "adamw_8bit" else 2 * FP32_BYTES)
    gradients = float(model.trained * FP32_BYTES)
    if train.strategy.startswith("zero"):  # weights in the arithmetic's precision, and master copies in fp32
        weights, moments = float((model.trained + frozen) * number), moments + model.trained * FP32_BYTES
        weights /= share if train.strategy == "zero3" else 1
        gradients /= 1 if train.strategy == "zero1" else share
        optimizer = moments / share
    else:
        weights = (model.trained * FP32_BYTES + frozen * number) / share
        gradients, optimizer = gradients / share, moments / share
    return _placed(train, math.ceil(weights), math.ceil(gradients), math.ceil(optimizer))


def _placed(train: Train, weights: int, gradients: int, optimizer: int) -> _State:
    if train.offload == "none":
        return _State(weights, gradients, optimizer, 0)
    if train.offload == "optimizer+params":  # nothing of size stays
        return _State(0, 0, 0, weights + gradients + optimizer)
    return _State(weights, 0, 0, gradients + optimizer)
