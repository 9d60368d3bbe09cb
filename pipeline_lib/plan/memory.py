"""Predict a rank's device memory, part by part, for every strategy; and its node's host memory."""

import math
from dataclasses import dataclass
from functools import lru_cache

from pipeline_lib.arch.geometry import FP32_BYTES, NF4_BYTES, Geometry
from pipeline_lib.arch.layers import (
    eager_under_deepspeed,
    feeds_in_chunks,
    is_sharded,
    keeps_on_host,
    micro_batch_tokens,
    recompute_of,
)
from pipeline_lib.config.strategies import STRATEGIES
from pipeline_lib.config.train import Train
from pipeline_lib.core.units import GIB, count, gigabytes
from pipeline_lib.plan.activations import compute_bytes
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.moments import (
    AT_LOSS,
    ZERO_BUCKET,
    Model,
    kept_on_host,
    moments_of_step,
    sharded_over,
)
from pipeline_lib.plan.trained import checkpoint_bytes, portions
from pipeline_lib.records.plan import Memory, PlanDocument

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
# Memory that torch's allocator does not count: the CUDA context with its kernels, NCCL's buffers,
# and fragmentation.
RESERVE_BYTES = 2 * GIB
_CUT_UP = 0.02
# Relative errors of predictions (`_error_of`).
_ERROR, _EXPERTS_ERROR, _FEW_ERROR, _DERIVED_ERROR = 0.05, 0.09, 0.1, 0.15
MARGIN = 0.06  # fraction of the device's memory that must stay free for a run to fit
# Host memory beside what is counted here: for each rank an interpreter with torch, on GPUs also
# CUDA's and NCCL's pinned buffers; and the processes around the ranks (Snakemake, the stage, srun).
# On CPUs these are for merge and evaluation: a training's are below.
RANK_BYTES = {"cpu": 1_200_000_000, "cuda": 6_000_000_000}
AROUND_BYTES = 2_500_000_000
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
_STAGE_BYTES = 175_000_000  # the stage's own process, which imports no torch: 172 MB
# Of a job: Snakemake's job step, the Snakemake that this starts (125 MB each, by a dry run), and
# shells and srun.
SNAKEMAKE_BYTES = 260_000_000
# What is asked for beyond the peak: for errors of this prediction, up to 7 % where it was measured
# (ddp, fsdp and zero2 on one node, fp32) and unknown elsewhere; and for the code of libraries, 130
# MB of a process, which is file cache that has to be read again where it has no room.
_CPU_MARGIN, _LIBRARIES_BYTES = 0.3, 200_000_000


@dataclass(frozen=True)
class HostNeed:
    """Bytes that the host of a node needs, by purpose.

    With GPUs, `state_bytes` are what its ranks offload, `copied_bytes` what they copy of a
    checkpoint at a time, and `own_bytes` are for `ranks` interpreters and the processes around
    them. On CPUs, `state_bytes` are all that the ranks hold, `own_bytes` are for the processes
    around them, and `margin_bytes` are asked for beyond the peak. With GPUs there is no margin,
    since the other parts are generous.
    """

    state_bytes: int
    copied_bytes: int
    own_bytes: int
    margin_bytes: int
    ranks: int
    is_gpu: bool

    @property
    def peak_bytes(self) -> int:
        """The most that the processes of a node are expected to hold, in bytes."""
        return self.state_bytes + self.copied_bytes + self.own_bytes

    @property
    def total_bytes(self) -> int:
        """What is needed, with the margin, in bytes."""
        return self.peak_bytes + self.margin_bytes

    def __str__(self) -> str:
        """Return the parts, in words."""
        if not self.is_gpu:
            hold = "holds" if self.ranks == 1 else "hold"
            return (
                f"{gigabytes(self.state_bytes)} for what {count(self.ranks, 'ranks')} {hold}, "
                f"copies of a checkpoint included, {gigabytes(self.own_bytes)} for what is around "
                f"them, {gigabytes(self.margin_bytes)} to spare"
            )
        parts = [f"{gigabytes(self.state_bytes)} for what is offloaded"] if self.state_bytes else []
        parts.append(
            f"{gigabytes(self.copied_bytes)} for what is copied of a checkpoint before it is "
            "written"
        )
        parts.append(
            f"{gigabytes(self.own_bytes)} for {count(self.ranks, 'interpreters')} and what is "
            "around them"
        )
        return ", ".join(parts)


def host_need(
    host_bytes: int, copied_bytes: int, cpu_rank_bytes: int, ranks: Ranks, is_gpu: bool
) -> HostNeed:
    """Return what a node's host needs for its ranks, each with the given bytes of Memory."""
    if is_gpu:
        own_bytes = AROUND_BYTES + ranks.per_node * RANK_BYTES["cuda"]
        state_bytes = ranks.per_node * host_bytes
        copied_bytes = ranks.per_node * copied_bytes
        return HostNeed(state_bytes, copied_bytes, own_bytes, 0, ranks.per_node, is_gpu)
    state_bytes = ranks.per_node * cpu_rank_bytes
    own_bytes = _STAGE_BYTES + SNAKEMAKE_BYTES
    margin_bytes = math.ceil(_CPU_MARGIN * (state_bytes + own_bytes)) + _LIBRARIES_BYTES
    return HostNeed(state_bytes, 0, own_bytes, margin_bytes, ranks.per_node, is_gpu)


def host_need_of_plan(plan: PlanDocument) -> HostNeed:
    """Return the host memory that a node needs for the way to train that plan.json has chosen."""
    cluster = plan.cluster
    memory = plan.chosen_memory
    ranks = Ranks(cluster.ranks, cluster.ranks // cluster.nodes)
    sizes = memory.host_bytes, memory.copied_bytes, memory.cpu_rank_bytes
    return host_need(*sizes, ranks, is_gpu=cluster.is_gpu)


def predict(
    geometry: Geometry, train: Train, ranks: Ranks, block_tokens: int, accumulation: int
) -> Memory:
    """Return the memory of a rank that trains as `train` says, on `block_tokens` tokens a block.

    `accumulation` is the number of micro-batches in a step; from the second on, gradients exist in
    the forward pass.
    """
    model = Model.of(geometry, train)
    state = _state(geometry, train, model, ranks)
    tokens = micro_batch_tokens(train, block_tokens)
    moments = moments_of_step(geometry, train, model, ranks, tokens, accumulation, state.gradients)
    moment = max(moments, key=lambda moment: moment.sum)
    of_step = state.weights + state.optimizer + moment.sum
    allocated = of_step + state.buffer
    activations_on_host = kept_on_host(geometry, train, tokens)
    size = checkpoint_bytes(geometry, train)
    copied = _copied(geometry, train, ranks, size)
    in_forward = max(moment.sum - moment.gradients for moment in moments if moment.name == AT_LOSS)
    on_cpus = _held_on_cpus(model, train, ranks, state, (of_step, in_forward), copied)
    reserve = RESERVE_BYTES + round(_CUT_UP * allocated)
    return Memory(
        weights_bytes=state.weights,
        gradients_bytes=moment.gradients,
        optimizer_bytes=state.optimizer + state.buffer,
        gathered_bytes=moment.gathered,
        exchanged_bytes=moment.exchanged,
        activations_bytes=moment.activations,
        loss_bytes=moment.loss,
        reserve_bytes=reserve,
        host_bytes=state.host_for_gpu + activations_on_host,
        checkpoint_bytes=size,
        copied_bytes=math.ceil(_SNAPSHOT * copied),
        cpu_rank_bytes=state.host + activations_on_host + on_cpus,
        moment=moment.name,
        error=_error_of(geometry, train, tokens),
        state_bytes=state.weights + moment.gradients + state.optimizer + state.buffer,
        allocated_bytes=allocated,
        total_bytes=allocated + reserve,
    )


def _error_of(geometry: Geometry, train: Train, tokens: int) -> float:
    """Return the prediction's relative error: the largest against measured peaks, else assumed.

    Measured (benchmarks/RESULTS.md; tests/plan/test_peak.py repeats most): without experts under
    every strategy but hsdp from -2 to +4 %, since ddp lays its buckets once, and with adapters on a
    base in 4 bits up to +3 %; experts under fsdp, all weights or adapters, eight runs on one and
    two GPUs, from -1.1 to +1.1 %. Not measured on GPUs, though tests/plan/test_sharded_peak.py
    holds them against torch's tracker: hsdp, and experts with activation checkpointing. Offloading
    was measured on one GPU with all weights, by fsdp (0.0 %) and zero2 (-1 %), in one setting each.
    Full checkpointing was measured with the attention's results of all layers and of none, so that
    of some counts as measured. Assumed: experts under other strategies; ranks that share blocks;
    layers that feed forward in chunks (four runs by ddp: +2 to +5 %); and all other offloading.
    """
    has_experts = bool(geometry.expert_layers)
    is_derived = train.ranks_per_block > 1 or feeds_in_chunks(train, has_experts, tokens)
    offloads = train.offload != "none"
    is_derived |= offloads and not (train.method == "full" and train.strategy in ("fsdp", "zero2"))
    if is_derived or keeps_on_host(train):
        return _DERIVED_ERROR
    if has_experts and train.strategy == "fsdp" and not offloads:
        return _ERROR if recompute_of(train) == "none" else _EXPERTS_ERROR
    if has_experts:
        return _DERIVED_ERROR
    return _FEW_ERROR if offloads or train.strategy == "hsdp" else _ERROR


def _held_on_cpus(
    model: Model, train: Train, ranks: Ranks, state: "_State", step: tuple[int, int], copied: float
) -> int:
    """Return the bytes that a rank on CPUs holds at its peak, without what is said to be offloaded.

    The peak is in a step, at its end where the training waits for a save, or, with copies that are
    written in the background, in the forward pass that follows. `step` has the peak of a step, and
    what its forward pass uses beside the state.
    """
    allocated, in_forward = step
    own = _CPU_RANK_BYTES + (_DEEPSPEED_BYTES if train.uses_deepspeed else 0)
    own += _ADAPTERS_BYTES if train.method == "lora" else 0
    between_steps = state.weights + state.optimizer + (0 if is_sharded(train) else state.gradients)
    saving = (
        between_steps + (_WHILE_WRITING * in_forward if train.save_async is True else 0) + copied
    )
    if train.strategy in ("zero1", "zero2"):
        return math.ceil(own + max(_zero_on_cpus(model, train, ranks, state, allocated), saving))
    # Gloo copies what it scatters (measured: the size of the whole tensor). FSDP scatters that of
    # the embedding last.
    is_scattered = is_sharded(train) and train.method == "full" and ranks.total > 1
    return math.ceil(
        own + max(allocated + (FP32_BYTES * model.first if is_scattered else 0), saving)
    )


def _zero_on_cpus(model: Model, train: Train, ranks: Ranks, state: "_State", allocated: int) -> int:
    """Return the bytes of a step of ZeRO-1 or 2 on CPUs: in the backward pass, or in the update.

    Memory of the buckets of gradients is taken as they fill: no more than there are gradients. They
    are there until the next backward pass; two of them, and a third that is being reduced. With
    offloading, the weights are held once more, and gloo copies them where they are gathered after
    the update. This sum of parts was fitted to three runs (55M with and without offloading, 206M
    with it), and is within 5 % of them; what they hold was not traced.
    """
    weights = compute_bytes(train) * model.trained
    bucket = FP32_BYTES * ZERO_BUCKET
    unfilled = (compute_bytes(train) + FP32_BYTES) * max(0, ZERO_BUCKET - model.trained)
    in_update = (
        state.weights
        + state.gradients
        + state.optimizer
        + min(weights, 2 * bucket)
        + min(weights, bucket)
    )
    in_update += (
        2 * weights if train.offload != "none" else FP32_BYTES * model.trained // ranks.total
    )
    return max(allocated - (unfilled if train.method == "full" else 0), in_update)


def host_need_with_copies(
    geometry: Geometry, train: Train, ranks: Ranks, block_tokens: int
) -> HostNeed:
    """Return what a node with GPUs needs of its host where only activations are offloaded.

    `predict` says it too. It takes a fraction of the time of `predict`, since the device's memory
    does not matter.
    """
    copied = _copied(geometry, train, ranks, checkpoint_bytes(geometry, train))
    host_bytes = kept_on_host(geometry, train, micro_batch_tokens(train, block_tokens))
    return host_need(host_bytes, math.ceil(_SNAPSHOT * copied), 0, ranks, is_gpu=True)


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


@dataclass(frozen=True)
class _State:
    """Bytes of a rank's state on its device and of what is offloaded.

    `host_for_gpu` is what the offloaded state takes where a GPU copies from it, in page-locked
    memory; `buffer` is what DeepSpeed then allocates on the GPU for gradients on their way.
    """

    weights: int
    gradients: int
    optimizer: int
    host: int = 0
    host_for_gpu: int = 0
    buffer: int = 0


def _state(geometry: Geometry, train: Train, model: Model, ranks: Ranks) -> _State:
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
        optimizer = moments / share
    else:
        weights = (model.trained * FP32_BYTES + frozen_bytes) / share
        gradients = gradients / share
        optimizer = moments / share
    sizes = math.ceil(weights), math.ceil(gradients), math.ceil(optimizer)
    if train.offload == "none":
        return _State(*sizes)
    if train.strategy == "zero3":
        # with `optimizer+params` nothing sizable does
        stays = sizes[0] if train.offload == "optimizer" else 0
        of_host = sum(sizes) - stays
        return _State(stays, 0, 0, of_host, of_host)
    if is_sharded(train):
        # Gradients of earlier micro-batches: on the host by fsdp (train/fsdp.py), on the device by
        # hsdp. They are counted for a step of one micro-batch too, which has none: so a smaller
        # micro-batch never needs more memory, as `leanest` in plan/choose.py takes for granted.
        on_host, on_device = (sizes[1], 0) if train.strategy == "fsdp" else (0, sizes[1])
        copied = sizes[0] + sizes[1] + on_host
        return _State(
            0,
            on_device,
            0,
            copied + sizes[2],
            math.ceil(copied * _rounded_up(geometry, share)) + sizes[2],
        )
    # DeepSpeed adds up gradients on the device unless they are computed in fp32, has a buffer for
    # the largest of them on either side, and rounds the weights on the host before it copies them
    # back. In fp32 it also keeps a page-locked copy of each gradient, which is not counted.
    part = FP32_BYTES * model.trained / share
    largest = geometry.largest_tensor if train.method == "full" else 0
    on_device = sizes[1] if number < FP32_BYTES else 0
    copies = (
        2 * _power_of_two(part)
        + _power_of_two(number * model.trained / share)
        + _power_of_two(number * largest)
    )
    # without the masters, which are among the copies
    for_gpu = math.ceil(moments / share - part) + copies
    return _State(sizes[0], on_device, 0, math.ceil(part) + sizes[2], for_gpu, number * largest)


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
