"""How much memory a rank needs on its device, part by part, for every strategy."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from pipeline_lib.config.schema import Train
from pipeline_lib.core.units import GIB, gigabytes
from pipeline_lib.model.geometry import Geometry
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.workload import (
    eager_under_deepspeed,
    has_fused_adapters,
    is_compiled,
    is_sharded,
    recompute_of,
    stays_gathered,
)

# Bytes of activations that a decoder layer keeps for its gradients, tensor by tensor.
#
# Derived from transformers' Qwen2, Qwen3 and Qwen3-MoE layers with one attention kernel for all documents; a test holds
# them against what autograd really saves. With h hidden, q query and k key channels, i channels of the MLP, and bf16
# weights: 16 h + 10 q + 10 k + 8 i bytes a token as they run eagerly; that is 26.3 times the hidden state for Qwen3-8B.
# Compiled, with what AOTAutograd's partitioner keeps rather than makes again, 8 h + 6 q + 6 k + 6 i, or 16.8 times.
# Of DoRA this is what the eager ones keep.

FP32_BYTES = 4
HALF_BYTES = 2
_CHOICE_BYTES = 40  # of one expert of a token: which, how much, and its places in the order by experts
_SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def compute_bytes(train: Train) -> int:
    """Bytes of a number in the arithmetic's precision."""
    return FP32_BYTES if train.precision == "fp32" else HALF_BYTES


@dataclass(frozen=True)
class Arithmetic:
    """How layers compute. `by_autocast`: weights are fp32 and rounded for each product, as under ddp.

    Then the norms of trained weights make fp32, and every product rounds its input by itself.
    """

    number_bytes: int
    by_autocast: bool

    @staticmethod
    def of(train: Train) -> "Arithmetic":
        """That of the strategy and precision of `train`."""
        return Arithmetic(compute_bytes(train), train.strategy == "ddp" and train.precision != "fp32")

    def stream_bytes(self, train: Train) -> int:
        """Bytes of a number of the hidden state between layers: fp32 where the embedding is."""
        return FP32_BYTES if self.by_autocast and train.method == "full" else self.number_bytes


def kept_per_token(geometry: Geometry, train: Train, has_experts: bool, recompute: str) -> float:
    """Bytes for each token, padding included, that a layer keeps from the forward to the backward pass."""
    arithmetic = Arithmetic.of(train)
    if recompute == "none":
        return (_kept_compiled if is_compiled(train) else _kept_whole)(geometry, train, arithmetic, has_experts)
    stream = arithmetic.stream_bytes(train) * geometry.hidden
    return stream if recompute == "full" else stream + _products(geometry, train, arithmetic, has_experts)


def _kept_whole(geometry: Geometry, train: Train, arithmetic: Arithmetic, has_experts: bool) -> float:
    q, k, number = geometry.heads * geometry.head_dim, geometry.kv_heads * geometry.head_dim, arithmetic.number_bytes
    is_full = train.method == "full"
    normed = q + k if geometry.normed_heads else 0
    norms = FP32_BYTES * (2 * geometry.hidden + normed)  # their inputs
    if is_full:  # what a norm multiplies by its weight
        norms += 2 * geometry.hidden * (FP32_BYTES if arithmetic.by_autocast else number) + normed * number
    attention = number * (2 * q + 2 * k) + FP32_BYTES * geometry.heads
    inputs = _inputs_of_linears(geometry, train, arithmetic, has_experts)
    mlp = 0 if has_experts else 3 * number * geometry.intermediate
    rest = _statistics(geometry) + (_experts(geometry, train, number, 4) if has_experts else 0)
    return norms + attention + inputs + mlp + rest + _narrow(geometry, train, arithmetic)


def _kept_compiled(geometry: Geometry, train: Train, arithmetic: Arithmetic, has_experts: bool) -> float:
    """Inputs and results of products and of attention, and the layer's input; of sums and norms only statistics.

    What o_proj makes is kept instead of the sum with the layer's input; down_proj's result nothing needs again, but of
    experts, whose results are weighted.
    """
    q, k, number = geometry.heads * geometry.head_dim, geometry.kv_heads * geometry.head_dim, arithmetic.number_bytes
    before_norms = q + k if geometry.normed_heads else 0
    attention = number * (2 * q + 2 * k) + FP32_BYTES * geometry.heads
    made: float = number * (geometry.hidden + before_norms)
    made += _experts(geometry, train, number, 3) if has_experts else 2 * number * geometry.intermediate
    inputs = _inputs_of_linears(geometry, train, replace(arithmetic, by_autocast=False), has_experts)
    kept = arithmetic.stream_bytes(train) * geometry.hidden + attention + made + inputs + _statistics(geometry)
    return kept + _narrow(geometry, train, arithmetic)


def _statistics(geometry: Geometry) -> float:
    """One number for each row that a norm is taken of."""
    return FP32_BYTES * (2 + (geometry.heads + geometry.kv_heads if geometry.normed_heads else 0))


def _narrow(geometry: Geometry, train: Train, arithmetic: Arithmetic) -> float:
    """Between the two factors of each adapter."""
    if train.method == "full":
        return 0.0
    return float(arithmetic.number_bytes * train.lora.rank * len(geometry.adapted_linears(train.lora)))


def _inputs_of_linears(geometry: Geometry, train: Train, arithmetic: Arithmetic, has_experts: bool) -> float:
    """Inputs of the linear modules that train weights or have adapters; attention keeps its output by itself."""
    widths = {name: inputs for name, (inputs, _) in geometry.linears.items()}
    if has_experts:
        widths = {name: width for name, width in widths.items() if name not in ("gate_proj", "up_proj", "down_proj")}
    if train.method == "full":
        widths.pop("o_proj")
    elif train.lora.targets != "all-linear":
        widths = {name: width for name, width in widths.items() if name in train.lora.targets}
    if train.method == "lora" and train.lora.dropout > 0:  # each draws by itself: what is left, and a byte for which
        return float((arithmetic.number_bytes + 1) * sum(widths.values()))
    if not arithmetic.by_autocast or has_fused_adapters(train):
        widths.pop("o_proj", None)
        for group in _SHARED_INPUTS:
            for name in [name for name in group if name in widths][1:]:
                widths.pop(name)
    return float(arithmetic.number_bytes * sum(widths.values()))


def _experts(geometry: Geometry, train: Train, number: int, widths: int) -> float:
    """Of the experts of a token: its copies, as many `widths` of their inside, and results; the router's, and scores.

    Inputs of products with frozen weights are not kept.
    """
    inputs = 1 if train.method == "full" else 0
    of_each = (1 + inputs) * geometry.hidden + (widths - 1 + inputs) * geometry.expert_intermediate
    of_experts = geometry.experts_per_token * (number * of_each + _CHOICE_BYTES)
    return of_experts + inputs * number * geometry.hidden + FP32_BYTES * geometry.experts


def _products(geometry: Geometry, train: Train, arithmetic: Arithmetic, has_experts: bool) -> float:
    """Results of products and of attention: what `selective` keeps beside the input of the layer.

    Compiled, all but what down_proj makes.
    """
    outputs = {name: output for name, (_, output) in geometry.linears.items()}
    if has_experts:
        outputs = {name: output for name, output in outputs.items() if name.endswith(("q_proj", "k_proj", "v_proj"))}
        outputs["o_proj"] = geometry.hidden
        of_each = 2 * geometry.expert_intermediate + geometry.hidden
        outputs["experts"] = geometry.experts_per_token * of_each + geometry.experts
    elif is_compiled(train):
        outputs.pop("down_proj")
    attention = geometry.heads * geometry.head_dim
    total = sum(outputs.values()) + attention
    if has_fused_adapters(train):
        total += train.lora.rank * len(geometry.adapted_linears(train.lora))
    elif train.method == "lora":
        targets = outputs if train.lora.targets == "all-linear" else train.lora.targets
        total += sum(outputs[name] for name in targets if name in outputs and name != "experts")
    return arithmetic.number_bytes * total + FP32_BYTES * geometry.heads


# The moments of a step at which memory peaks, and what is in use at each beside the state that a rank keeps.

# The loss makes that many logits at a time (model/loss.py).
LOGITS_AT_ONCE = 2**28
# Elements that DeepSpeed reduces at a time, as train/deepspeed.py tells it; a larger matrix goes alone.
ZERO_BUCKET = 2**26
ZERO3_LIVE = 10**9  # parameters that ZeRO-3 keeps gathered: its stage3_max_live_parameters


@dataclass(frozen=True)
class Model:
    """Numbers of parameters. `matrix` is that of the embedding, and of the head; `root` what is in no layer.

    `unit` is what FSDP gathers at a time; `first` what it gathers first and reduces last, with the embedding.
    """

    parameters: int
    trained: int
    matrix: int
    root: int
    unit: int
    first: int

    @staticmethod
    def of(geometry: Geometry, train: Train) -> "Model":
        """That of `geometry`, as `train` trains it."""
        matrix = geometry.vocab * geometry.hidden
        root = matrix * (1 if geometry.tied else 2) + geometry.hidden
        layer = math.ceil((geometry.parameters - root) / geometry.layers)
        unit = min(train.unit_layers, geometry.layers) * layer
        first = matrix + geometry.hidden
        return Model(geometry.parameters, geometry.trained_parameters(train), matrix, root, unit, first)


@dataclass(frozen=True)
class Moment:
    """Bytes in use at one moment; `exchanged` are gradients that are not reduced yet, with their buffers."""

    name: str
    gathered: int
    exchanged: int
    activations: int
    loss: int

    @property
    def sum(self) -> int:
        """All of it."""
        return self.gathered + self.exchanged + self.activations + self.loss


def moments_of_step(
    geometry: Geometry, train: Train, model: Model, tokens: int, ranks: Ranks, accumulation: int
) -> list[Moment]:
    """In order; the last two come when gradients are complete. `tokens` are those of a micro-batch, with padding."""
    return [
        _end_of_forward(geometry, train, model, tokens, ranks.has_triton),
        _backward(geometry, train, model, tokens),
        _end_of_backward(train, model, accumulation),
        _update(train, model, ranks.total),
    ]


def _casts(geometry: Geometry, train: Train, model: Model) -> int:
    """Weights in the arithmetic's precision beside those of the state, from the forward to the backward pass.

    Autocast keeps a cast of each matrix; FSDP keeps embedding and head gathered, and layers if it is told to; ZeRO-3
    what it may use again.
    """
    number = compute_bytes(train)
    if train.strategy == "zero1" and train.precision == "bf16":  # DeepSpeed keeps the last micro-batch's gradients
        return number * model.trained
    if train.strategy == "ddp" and Arithmetic.of(train).by_autocast:
        untied_embedding = 0 if geometry.tied else model.matrix
        return number * min(model.trained, model.parameters - untied_embedding)  # what is frozen needs no cast
    if is_sharded(train):
        return number * (model.parameters if stays_gathered(train) else model.root)
    return number * min(model.parameters, ZERO3_LIVE) if train.strategy == "zero3" else 0


def _end_of_forward(geometry: Geometry, train: Train, model: Model, tokens: int, has_triton: bool) -> Moment:
    """All activations are there, and the loss holds logits, and the whole gradient of the head in fp32."""
    number = compute_bytes(train)
    loss = _loss(train, model, max(1, min(tokens, LOGITS_AT_ONCE // geometry.vocab)) * geometry.vocab, has_triton)
    # The last norm's input, its product and result, the places that count, and the gradient of those.
    wide = number == FP32_BYTES or Arithmetic.of(train).by_autocast
    hidden = tokens * geometry.hidden * (5 * FP32_BYTES if wide else FP32_BYTES + 4 * number)
    activations = _kept(geometry, train, tokens) + hidden
    return Moment("at the loss", _casts(geometry, train, model), 0, activations, loss)


def _loss(train: Train, model: Model, logits: int, has_triton: bool) -> int:
    """The logits, what becomes of them, and the gradient of the head in fp32.

    Where Triton makes kernels, logits become gradients in place. Elsewhere there is fp32 log p of them, and half
    precision becomes fp32 again on its way to gradients.
    """
    number, of_head = compute_bytes(train), FP32_BYTES * _head(train, model)
    if has_triton:
        return number * logits + of_head
    of_a_logit = 2 * FP32_BYTES + (number if number < FP32_BYTES else 0)
    return max(of_a_logit * logits, number * (logits + _head(train, model))) + of_head


def _head(train: Train, model: Model) -> int:
    """Weights of the head, if they are trained."""
    return model.matrix if train.method == "full" else 0


def _backward(geometry: Geometry, train: Train, model: Model, tokens: int) -> Moment:
    """The last layer's backward pass: all activations, the head's gradient, and those of a unit on their way."""
    number = compute_bytes(train)
    width = max(geometry.intermediate, geometry.experts_per_token * geometry.expert_intermediate)
    passing = tokens * (3 * number * width + 3 * FP32_BYTES * geometry.hidden)
    gathered = _casts(geometry, train, model)
    # The unit in use, the next one, and the buffer that it comes in.
    if is_sharded(train) and not stays_gathered(train):
        gathered += 3 * number * model.unit
    exchanged = 0
    if train.method == "full" and train.strategy != "ddp":  # there they are in the buckets already
        at_once = model.unit if is_sharded(train) else ZERO_BUCKET
        # A head of its own is let go of, and reduced in fp32 meanwhile.
        has_own_head = is_sharded(train) and not geometry.tied
        exchanged = (FP32_BYTES if has_own_head else number) * model.matrix + (number + FP32_BYTES) * at_once
        gathered -= number * model.matrix if has_own_head and not stays_gathered(train) else 0
    activations = _kept(geometry, train, tokens) + _computed_again(geometry, train, tokens) + passing
    return Moment("in the backward pass", gathered, exchanged, activations, 0)


def _end_of_backward(train: Train, model: Model, accumulation: int) -> Moment:
    """No activations any more; the embedding is reduced in fp32, under FSDP with the head if that is the same."""
    number, name = compute_bytes(train), "at the end of the backward pass"
    if is_sharded(train):
        for_the_next = stays_gathered(train) and accumulation > 1
        if train.method == "lora":
            return Moment(name, number * (model.parameters if for_the_next else model.root), 0, 0, 0)
        gathered = number * (model.parameters if for_the_next else model.first)
        return Moment(name, gathered, (number + FP32_BYTES) * model.first, 0, 0)
    if train.method == "lora":
        return Moment(name, 0, 0, 0, 0)
    if train.strategy == "ddp":
        return Moment(name, 0, FP32_BYTES * model.matrix, 0, 0)
    return Moment(name, 0, (number + FP32_BYTES) * max(ZERO_BUCKET, model.matrix), 0, 0)


def _update(train: Train, model: Model, ranks: int) -> Moment:
    """ZeRO-1 and 2 lay the gradients of a rank's part side by side once more; the others update in place."""
    is_copied = train.strategy in ("zero1", "zero2") and train.offload == "none"
    return Moment("in the update", 0, FP32_BYTES * model.trained // ranks if is_copied else 0, 0, 0)


def _kept(geometry: Geometry, train: Train, tokens: int) -> int:
    """What all layers keep from the forward to the backward pass."""
    with_experts = len(geometry.expert_layers)
    recompute = recompute_of(train)
    plain = kept_per_token(geometry, train, False, recompute) if with_experts < geometry.layers else 0.0
    routed = kept_per_token(geometry, train, True, recompute) if with_experts else 0.0
    return round(tokens * (plain * (geometry.layers - with_experts) + routed * with_experts))


def _computed_again(geometry: Geometry, train: Train, tokens: int) -> int:
    """One layer whole, where layers are computed again."""
    if recompute_of(train) == "none":
        return 0
    return round(tokens * kept_per_token(geometry, train, bool(geometry.expert_layers), "none"))


# What a checkpoint takes on disk.

MOMENTS_BYTES = 2 * FP32_BYTES


def checkpoint_bytes(geometry: Geometry, train: Train) -> int:
    """Size of a checkpoint: fp32 weights and moments of what is trained."""
    return geometry.trained_parameters(train) * (FP32_BYTES + MOMENTS_BYTES)


# How much memory a rank needs on its device, part by part, for every strategy.
#
# State is exact arithmetic: each trained parameter has its weight, gradient and two Adam moments in fp32 (16 bytes), a
# frozen one its weight in the arithmetic's precision, spread as the strategy says. Activations are derived tensor by
# tensor (plan/memory.py). What is gathered, cast and exchanged follows how FSDP2, DDP and DeepSpeed do it. Peaks
# differ with the moment, so the moments of a step are added up apart and the largest is the prediction. A node's host
# is counted too, less exactly (`host_need`).

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

    Under every strategy the ranks share the writing of a checkpoint about evenly (train/strategy.py), and each
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
