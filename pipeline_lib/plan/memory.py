"""How much memory a rank needs on its device, part by part, for every strategy.

State is exact arithmetic: each trained parameter has its weight, gradient and two Adam moments in fp32 (16 bytes),
a frozen one its weight in the arithmetic's precision, spread as the strategy says. Activations are derived tensor by
tensor (plan/activations.py). What is gathered, cast and exchanged follows how FSDP2, DDP and DeepSpeed do it. Peaks
differ with the moment, so the moments of a step are added up apart and the largest is the prediction. A node's host is
counted too, less exactly (`host_need`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pipeline_lib.config.schema import Train
from pipeline_lib.plan.activations import FP32_BYTES, HALF_BYTES, compute_bytes
from pipeline_lib.plan.checkpoints import checkpoint_bytes
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.moments import Model, moments_of_step
from pipeline_lib.plan.placement import eager_under_deepspeed, is_sharded
from pipeline_lib.plan.units import GIB, gigabytes

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
# Host memory beside what is counted here: for each rank an interpreter with torch, on GPUs with CUDA's and NCCL's
# pinned buffers too; and the processes around the ranks (Snakemake, the stage, srun).
RANK_BYTES = {"cpu": 1_200_000_000, "cuda": 6_000_000_000}
AROUND_BYTES = 2_500_000_000
_SNAPSHOT = 1.2  # a checkpoint is copied to host memory before it is written, and written from a buffer
_EVALUATING_BYTES = 4 * GIB  # logits of a piece, activations of a layer, keys and values of an answer
_CPU_ROOM = 1.5  # torch's allocator of host memory keeps no books, and is not tight


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at the worst moment of a step, on its device; `host_bytes` is what offloading moves away.

    `checkpoint_bytes` are those of a whole checkpoint, of which each rank copies its part to host memory at a save.
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
    checkpoint_bytes: int
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


@dataclass(frozen=True)
class HostNeed:
    """Bytes that the host of a node has to have, by what they are for.

    `state_bytes` are what its ranks offload, and without GPUs all that they hold; `copied_bytes` a copy of what they
    write of a checkpoint; `own_bytes` what `ranks` interpreters take, and the processes around them.
    """

    state_bytes: int
    copied_bytes: int
    own_bytes: int
    ranks: int
    is_gpu: bool

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.state_bytes + self.copied_bytes + self.own_bytes

    def __str__(self) -> str:
        """The parts, in words."""
        held = "is offloaded" if self.is_gpu else "the ranks hold"
        parts = [f"{gigabytes(self.state_bytes)} for what {held}"] if self.state_bytes else []
        parts.append(f"{gigabytes(self.copied_bytes)} for its part of a checkpoint, copied before it is written")
        parts.append(f"{gigabytes(self.own_bytes)} for {self.ranks} interpreters and what is around them")
        return ", ".join(parts)


def host_need(host_bytes: int, allocated_bytes: int, checkpoint_bytes: int, ranks: Ranks, is_gpu: bool) -> HostNeed:
    """What a node's host has to have for its ranks, of which each has so many `host_bytes` and `allocated_bytes`.

    Under every strategy the ranks share the writing of a checkpoint about evenly (train/parallel/shares.py), and each
    copies its share, whether or not the training goes on meanwhile: beside all that it holds.
    """
    held = host_bytes if is_gpu else host_bytes + _CPU_ROOM * allocated_bytes
    own = RANK_BYTES["cuda" if is_gpu else "cpu"]
    return HostNeed(
        state_bytes=math.ceil(ranks.per_node * held),
        copied_bytes=math.ceil(_SNAPSHOT * checkpoint_bytes * ranks.per_node / ranks.total),
        own_bytes=AROUND_BYTES + ranks.per_node * own,
        ranks=ranks.per_node,
        is_gpu=is_gpu,
    )


def host_need_of_plan(plan: Mapping[str, Any]) -> HostNeed:
    """The same for what plan.json has chosen."""
    cluster, memory = plan["cluster"], plan["memory"][plan["chosen"]["strategy"]]
    offloaded, allocated, copied = (memory[f"{name}_bytes"] for name in ("host", "allocated", "checkpoint"))
    ranks = Ranks(cluster["ranks"], cluster["ranks"] // cluster["nodes"])
    return host_need(offloaded, allocated, copied, ranks, is_gpu=cluster["device"] == "cuda")


def can_evaluate(parameters: int, gpu_bytes: int, number_bytes: int = HALF_BYTES) -> bool:
    """Whether one GPU holds a whole model, in bf16 or so, and can work on it: evaluation is not spread over several."""
    return number_bytes * parameters + _EVALUATING_BYTES <= gpu_bytes


def predict(geometry: Geometry, train: Train, ranks: Ranks, block_tokens: int, accumulation: int = 2) -> Memory:
    """The memory of one rank that trains as `train` says, on blocks of `block_tokens` tokens.

    `accumulation` counts micro-batches of a step; from the second on there are gradients while activations are made.
    """
    model = Model.of(geometry, train)
    state = _state(model, train, ranks)
    tokens = train.micro_batch_blocks * block_tokens
    moments = moments_of_step(geometry, train, model, tokens, ranks, accumulation)
    gradients_early = state.gradients if accumulation > 1 or not is_sharded(train) else 0
    is_derived = bool(geometry.expert_layers) or train.offload != "none"
    error = _DERIVED_ERROR if is_derived else _HSDP_ERROR if train.strategy == "hsdp" else _ERROR
    saved_bytes = checkpoint_bytes(geometry, train)
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
                checkpoint_bytes=saved_bytes,
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
            other = eager_under_deepspeed(train.model_copy(update={"strategy": strategy, "offload": "none"}))
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
    if train.uses_deepspeed:  # weights in the arithmetic's precision, and master copies in fp32
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
