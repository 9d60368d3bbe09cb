"""Predict a rank's device memory, part by part, for every strategy; and its node's host memory."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from pipeline_lib.arch.geometry import FP32_BYTES, NF4_BYTES, Geometry
from pipeline_lib.arch.layers import eager_under_deepspeed, is_sharded, keeps_on_host, recompute_of
from pipeline_lib.config.strategies import STRATEGIES
from pipeline_lib.config.train import Train
from pipeline_lib.plan.activations import compute_bytes
from pipeline_lib.plan.host import (
    AROUND_BYTES,
    CPU_MARGIN,
    LIBRARIES_BYTES,
    RANK_BYTES,
    RESERVE_BYTES,
    SNAKEMAKE_BYTES,
    STAGE_BYTES,
)
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.moments import AT_LOSS, ZERO_BUCKET, Model, Moment, StepMoments, sharded_over
from pipeline_lib.plan.trained import checkpoint_bytes, portions
from pipeline_lib.plan.ways import Column, Mask, Ways
from pipeline_lib.records.plan import Memory

# The memory of a rank: state, and the largest of the moments (plan/moments.py).
#
# State is exact arithmetic: each trained parameter has its weight, gradient and moments, with AdamW
# all in fp32 (16 bytes), a frozen one its weight in the arithmetic's precision, sharded as the
# strategy says. Gathered, cast and exchanged bytes follow the code of FSDP2, DDP and DeepSpeed. The moments
# of a step are summed separately and the largest is the prediction. A node's host memory is counted
# too, less exactly (`host_need`).

# The parts that add up to the total, by the fields of Memory.
PARTS = (
    "weights",
    "gradients",
    "optimizer",
    "gathered",
    "exchanged",
    "activations",
    "loss",
    "reserve",
)
_CUT_UP = 0.02  # of what is allocated, by fragmentation
# Relative errors of predictions (`_error_of`).
_ERROR, _EXPERTS_ERROR, _FEW_ERROR, _DERIVED_ERROR = 0.05, 0.09, 0.1, 0.15
MARGIN = 0.06  # fraction of the device's memory that must stay free for a run to fit
# A save copies to host memory what a rank writes: all of it, or with `save_async: false` about this
# much at a time.
COPIED_AT_ONCE_BYTES = 1 << 30
_SNAPSHOT = 1.2  # copies are written from a buffer

# The host memory of ranks on CPUs, as `benchmarks.host_memory` measured it (benchmarks/RESULTS.md).
# It holds with the allocator's limits that launch/environment.py sets: otherwise up to a third more
# is lost between blocks of the heap.
#
# An interpreter with torch and transformers and buffers of oneDNN and gloo; what DeepSpeed and peft
# take more by being imported, without what they would import in vain (core/processes.py).
_CPU_RANK_BYTES, _DEEPSPEED_BYTES, _ADAPTERS_BYTES = 240_000_000, 85_000_000, 70_000_000
# Of what a forward pass uses at its end, what is there already while copies are being written:
# fitted to two runs.
_WHILE_WRITING = 0.5


def predict(
    geometry: Geometry, train: Train, ranks: Ranks, block_tokens: int, accumulation: int
) -> Memory:
    """Return the memory of a rank that trains as `train` says, on `block_tokens` tokens a block.

    `accumulation` is the number of micro-batches in a step; from the second on, gradients exist in
    the forward pass.
    """
    ways = Ways.one(train, geometry)
    passes = np.array([float(accumulation)])
    return MemoryOfWays(geometry, ways, ranks, block_tokens, passes).memory(0)


@dataclass(frozen=True, eq=False)
class MemoryOfWays:
    """The memory of a rank by each of `ways`, as columns in bytes; see `predict`."""

    geometry: Geometry
    ways: Ways
    ranks: Ranks
    block_tokens: int
    accumulation: Column

    def memory(self, row: int) -> Memory:
        """Return the memory of one way, by part at its peak."""
        moment = max(self._moments, key=lambda moment: float(moment.sum[row]))
        state = self._state
        kept = float(state.weights[row] + state.optimizer[row] + state.buffer[row])
        gradients = float(moment.gradients[row])
        return Memory(
            weights_bytes=round(state.weights[row]),
            gradients_bytes=round(gradients),
            optimizer_bytes=round(state.optimizer[row] + state.buffer[row]),
            gathered_bytes=round(moment.gathered[row]),
            exchanged_bytes=round(moment.exchanged[row]),
            activations_bytes=round(moment.activations[row]),
            loss_bytes=round(moment.loss[row]),
            reserve_bytes=round(self.total[row]) - round(self.allocated[row]),
            host_bytes=round(self.host[row]),
            checkpoint_bytes=self._checkpoint,
            copied_bytes=round(self.copied[row]),
            cpu_rank_bytes=round(self.cpu_rank[row]),
            moment=moment.name,
            error=float(self.error[row]),
            state_bytes=round(kept + gradients),
            allocated_bytes=round(self.allocated[row]),
            total_bytes=round(self.total[row]),
        )

    @property
    def _train(self) -> Train:
        return self.ways.kinds[0]

    @cached_property
    def _model(self) -> Model:
        return Model.of(self.geometry, self._train)

    @cached_property
    def _state(self) -> "_State":
        """The bytes of a rank's state, and of what is offloaded."""

        def of_kind(train: Train) -> Sequence[float]:
            return _state(self.geometry, train, self._model, self.ranks)

        return _State(*self.ways.each(of_kind, "strategy", "shard_ranks", "offload"))

    @cached_property
    def _step(self) -> StepMoments:
        gradients = self._state.gradients
        return StepMoments(
            self.geometry,
            self.ways,
            self._model,
            self.ranks,
            self.block_tokens,
            self.accumulation,
            gradients,
        )

    @cached_property
    def _moments(self) -> list[Moment]:
        return self._step.moments()

    @property
    def tokens(self) -> Column:
        """The tokens of a micro-batch, padding included."""
        return self._step.tokens

    @property
    def kept_on_host(self) -> Column:
        """What the layers of a rank keep in host memory."""
        return self._step.kept_on_host

    @cached_property
    def _of_step(self) -> Column:
        most: Column = np.maximum.reduce([moment.sum for moment in self._moments])
        return self._state.weights + self._state.optimizer + most

    @cached_property
    def allocated(self) -> Column:
        """The peak that torch's allocator will report."""
        return self._of_step + self._state.buffer

    @cached_property
    def total(self) -> Column:
        """What the device needs."""
        return self.allocated + RESERVE_BYTES + _CUT_UP * self.allocated

    @cached_property
    def host(self) -> Column:
        """What a rank offloads to the memory of a host with GPUs."""
        return self._state.host_for_gpu + self._step.kept_on_host

    @cached_property
    def _checkpoint(self) -> int:
        return checkpoint_bytes(self.geometry, self._train)

    @cached_property
    def _copied(self) -> Column:
        def of_kind(train: Train) -> float:
            return _copied(self.geometry, train, self.ranks, self._checkpoint)

        return self.ways.each(of_kind, "save_async")

    @cached_property
    def copied(self) -> Column:
        """What a rank copies to host memory at a time at a save."""
        return np.ceil(_SNAPSHOT * self._copied)

    @cached_property
    def cpu_rank(self) -> Column:
        """All that the process of a rank holds at its peak if its device is CPUs.

        The peak is in a step, at its end where the training waits for a save, or, with copies that
        are written in the background, in the forward pass that follows.
        """
        state = self._state

        def own(train: Train) -> int:
            of_adapters = _ADAPTERS_BYTES if train.method == "lora" else 0
            return _CPU_RANK_BYTES + of_adapters + (_DEEPSPEED_BYTES * train.uses_deepspeed)

        is_native = self.ways.which(is_sharded, "strategy")
        is_async = self.ways.which(lambda train: train.save_async is True, "save_async")
        is_zero = self.ways.which(lambda train: train.strategy in ("zero1", "zero2"), "strategy")
        at_loss = [moment for moment in self._moments if moment.name == AT_LOSS]
        in_forward = np.maximum.reduce([moment.sum - moment.gradients for moment in at_loss])
        between_steps = state.weights + state.optimizer + np.where(is_native, 0, state.gradients)
        saving = between_steps + np.where(is_async, _WHILE_WRITING * in_forward, 0) + self._copied
        # Gloo copies what it scatters (measured: the size of the whole tensor). FSDP scatters that
        # of the embedding last.
        scatters = self._train.method == "full" and self.ranks.total > 1
        scattered = FP32_BYTES * self._model.first if scatters else 0
        in_step = self._of_step + np.where(is_native, scattered, 0)
        in_step = np.where(is_zero, self._zero_on_cpus(), in_step)
        held = self.ways.each(own, "strategy") + np.maximum(in_step, saving)
        return state.host + self._step.kept_on_host + np.ceil(held)

    def _zero_on_cpus(self) -> Column:
        """Return the bytes of a step of ZeRO-1 or 2 on CPUs: in the backward pass, or the update.

        Memory of the buckets of gradients is taken as they fill: no more than there are gradients.
        They are there until the next backward pass; two of them, and a third that is being reduced.
        With offloading, the weights are held once more, and gloo copies them where they are
        gathered after the update. This sum of parts was fitted to three runs (55M with and without
        offloading, 206M with it), and is within 5 % of them; what they hold was not traced.
        """
        model = self._model
        state = self._state
        number = compute_bytes(self._train)
        weights = number * model.trained
        bucket = FP32_BYTES * ZERO_BUCKET
        unfilled = (number + FP32_BYTES) * max(0, ZERO_BUCKET - model.trained)
        if self._train.method == "lora":
            unfilled = 0
        in_update = state.weights + state.gradients + state.optimizer
        in_update = in_update + min(weights, 2 * bucket) + min(weights, bucket)
        is_offloaded = self.ways.which(lambda train: train.offload != "none", "offload")
        gathered = FP32_BYTES * model.trained // self.ranks.total
        in_update = in_update + np.where(is_offloaded, 2 * weights, gathered)
        return np.maximum(self._of_step - unfilled, in_update)

    @cached_property
    def error(self) -> Column:
        """The prediction's relative error: the largest against measured peaks, else assumed.

        Measured (benchmarks/RESULTS.md; tests/plan/test_peak.py repeats most): without experts
        under every strategy but hsdp from -2 to +4 %, since ddp lays its buckets once, and with
        adapters on a base in 4 bits up to +3 %; experts under fsdp, all weights or adapters, eight
        runs on one and two GPUs, from -1.1 to +1.1 %. Not measured on GPUs, though
        tests/plan/test_sharded_peak.py holds them against torch's tracker: hsdp, and experts with
        activation checkpointing. Offloading was measured on one GPU with all weights, by fsdp
        (0.0 %) and zero2 (-1 %), in one setting each. Full checkpointing was measured with the
        attention's results of all layers and of none, so that of some counts as measured. Assumed:
        experts under other strategies; ranks that share blocks; layers that feed forward in chunks
        (four runs by ddp: +2 to +5 %); and all other offloading.
        """
        has_experts = bool(self.geometry.expert_layers)

        def of_kind(train: Train) -> float:
            offloads = train.offload != "none"
            is_measured = train.method == "full" and train.strategy in ("fsdp", "zero2")
            if train.ranks_per_block > 1 or keeps_on_host(train) or (offloads and not is_measured):
                return _DERIVED_ERROR
            if has_experts and train.strategy == "fsdp" and not offloads:
                return _ERROR if recompute_of(train) == "none" else _EXPERTS_ERROR
            if has_experts:
                return _DERIVED_ERROR
            return _FEW_ERROR if offloads or train.strategy == "hsdp" else _ERROR

        keys = ("context_ranks", "offload_activations", "recompute", "offload", "strategy")
        return np.where(self._step.is_chunked, _DERIVED_ERROR, self.ways.each(of_kind, *keys))

    def fits_on_gpu(self, gpu_bytes: int | None) -> Mask:
        """Return which ways fit a GPU of `gpu_bytes`, with error and MARGIN; all if it is None."""
        if gpu_bytes is None:
            return np.ones(len(self.ways), np.bool_)
        return self.total <= gpu_bytes * np.minimum(1 - MARGIN, 1 / (1 + self.error))

    def host_of_node(self, is_gpu: bool) -> Column:
        """Return the host memory that a node needs, `HostNeed.total_bytes` of each way."""
        each = self.ranks.per_node
        if is_gpu:
            return AROUND_BYTES + each * (RANK_BYTES["cuda"] + self.host + self.copied)
        held = each * self.cpu_rank + STAGE_BYTES + SNAKEMAKE_BYTES
        return held + np.ceil(CPU_MARGIN * held) + LIBRARIES_BYTES


def _copied(geometry: Geometry, train: Train, ranks: Ranks, checkpoint: int) -> float:
    """Return the bytes of host memory that a rank's copies take at a save.

    `save_async: auto` counts as false. Under every strategy the ranks share the writing of a
    checkpoint about evenly (train/strategy.py). What is copied at a time may exceed its limit by
    one tensor on one rank.
    """
    share = checkpoint / ranks.total
    if train.save_async is not True:
        largest_bytes = FP32_BYTES * geometry.largest_tensor
        share = min(share, COPIED_AT_ONCE_BYTES + largest_bytes / ranks.per_node)
    return share


def predict_all(
    geometry: Geometry, train: Train, ranks: Ranks, block_tokens: int, accumulation: int
) -> dict[str, Memory]:
    """Return `predict` for each strategy these ranks can use; offloading only in the chosen."""
    found: dict[str, Memory] = {}
    for strategy in STRATEGIES:
        if strategy == train.strategy:
            found[strategy] = predict(geometry, train, ranks, block_tokens, accumulation)
        elif strategy != "hsdp" or 1 < (train.shard_ranks or ranks.per_node) < ranks.total:
            other = eager_under_deepspeed(
                train.model_copy(update={"strategy": strategy, "offload": "none"})
            )
            found[strategy] = predict(geometry, other, ranks, block_tokens, accumulation)
    return found


class _State(NamedTuple):
    """Bytes of a rank's state on its device and of what is offloaded: columns.

    `host_for_gpu` is what the offloaded state takes where a GPU copies from it, in page-locked
    memory; `buffer` is what DeepSpeed then allocates on the GPU for gradients on their way.
    """

    weights: Column
    gradients: Column
    optimizer: Column
    host: Column
    host_for_gpu: Column
    buffer: Column


def _state(
    geometry: Geometry, train: Train, model: Model, ranks: Ranks
) -> tuple[float, float, float, float, float, float]:
    """Return the fields of _State for one way."""
    number = compute_bytes(train)
    share = sharded_over(train, ranks)
    frozen = model.parameters - model.trained if train.method == "full" else model.parameters
    frozen_bytes = number * (frozen - model.quantized) + NF4_BYTES * model.quantized
    moments = sum(portion.moment_bytes for portion in portions(geometry, train))
    gradients = float(model.trained * FP32_BYTES)
    if train.uses_deepspeed:  # weights in the arithmetic's precision, and master copies in fp32
        weights = float((model.trained + frozen) * number)
        moments = moments + model.trained * FP32_BYTES
        weights /= share if train.strategy == "zero3" else 1
        gradients /= 1 if train.strategy == "zero1" else share
    else:
        weights = (model.trained * FP32_BYTES + frozen_bytes) / share
        gradients = gradients / share
    optimizer = moments / share
    if train.offload == "none":
        return weights, gradients, optimizer, 0, 0, 0
    if train.strategy == "zero3":
        # with `optimizer+params` nothing sizable does
        stays = weights if train.offload == "optimizer" else 0.0
        of_host = weights + gradients + optimizer - stays
        return stays, 0, 0, of_host, of_host, 0
    if is_sharded(train):
        # Gradients of earlier micro-batches: on the host by fsdp (train/fsdp.py), on the device by
        # hsdp. They are counted for a step of one micro-batch too, which has none.
        on_host, on_device = (gradients, 0.0) if train.strategy == "fsdp" else (0.0, gradients)
        copied = weights + gradients + on_host
        for_gpu = copied * _rounded_up(geometry, share) + optimizer
        return 0, on_device, 0, copied + optimizer, for_gpu, 0
    # DeepSpeed adds up gradients on the device unless they are computed in fp32, has a buffer for
    # the largest of them on either side, and rounds the weights on the host before it copies them
    # back. In fp32 it also keeps a page-locked copy of each gradient, which is not counted.
    part = FP32_BYTES * model.trained / share
    largest = geometry.largest_tensor if train.method == "full" else 0
    on_device = gradients if number < FP32_BYTES else 0
    copies = (
        2 * _power_of_two(part)
        + _power_of_two(number * model.trained / share)
        + _power_of_two(number * largest)
    )
    # without the masters, which are among the copies
    for_gpu = moments / share - part + copies
    return weights, on_device, 0, part + optimizer, for_gpu, number * largest


@lru_cache(maxsize=64)
def _rounded_up(geometry: Geometry, share: int) -> float:
    """Return the size of torch's page-locked copies of each tensor's part, relative to the parts.

    torch 2.11 and 2.13 take the next power of two for each. It is the same for 2 and for 4 bytes a
    number.
    """
    parts = [FP32_BYTES * math.prod(shape) / share for shape in geometry.shapes().values()]
    return sum(map(_power_of_two, parts)) / sum(parts)


def _power_of_two(size_bytes: float) -> int:
    return 1 << (math.ceil(size_bytes) - 1).bit_length() if size_bytes >= 1 else 0
