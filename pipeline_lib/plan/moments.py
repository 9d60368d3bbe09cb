"""The moments of a step when memory can peak, and what each uses beside a rank's kept state."""

import math
from dataclasses import dataclass
from functools import cached_property

from pipeline_lib.arch.geometry import FP32_BYTES, HALF_BYTES, NF4_BLOCK, NF4_BYTES, Geometry
from pipeline_lib.arch.layers import (
    LAYERS_ON_DEVICE,
    LOGITS_AT_ONCE,
    feeds_in_chunks,
    is_compiled,
    is_sharded,
    keeps_on_host,
    kept_attention,
    recompute_of,
    stays_gathered,
    tokens_at_once,
)
from pipeline_lib.config.train import Train
from pipeline_lib.plan.activations import (
    FED,
    Arithmetic,
    before_chunks,
    compute_bytes,
    exchanged_by_a_layer,
    fed_per_token,
    kept_per_token,
    mixed_per_token,
)
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.trained import portions

# Sizes that train/deepspeed.py uses.
#
# Elements that DeepSpeed reduces at a time; a larger matrix is reduced alone. 256 MiB in fp32:
# DeepSpeed's default of 5e8 would take 2 GB, and twice that to overlap.
ZERO_BUCKET = 2**26

AT_LOSS = "at the loss"  # a moment's name
ZERO3_LIVE = 10**9  # parameters that ZeRO-3 keeps gathered: its stage3_max_live_parameters


@dataclass(frozen=True)
class Model:
    """Numbers of parameters.

    `matrix` counts the embedding, and equally the head; `root` all outside the layers. `unit` is
    what FSDP gathers at a time; `first` is what it gathers first and reduces last, with the
    embedding.
    """

    parameters: int
    trained: int
    matrix: int
    root: int
    unit: int
    first: int
    quantized: int  # of the parameters of the layers, those in 4 bits
    largest: int  # parameters of the largest linear that is quantized
    # parameters of all experts of a layer: one module of two tensors, the first of them twice the
    # second
    experts: int

    @staticmethod
    def of(geometry: Geometry, train: Train) -> "Model":
        """Return the counts for `geometry`, as `train` trains it."""
        matrix = geometry.vocab * geometry.hidden
        root = matrix * (1 if geometry.tied else 2) + geometry.hidden
        layer = math.ceil((geometry.parameters - root) / geometry.layers)
        unit = min(train.unit_layers, geometry.layers) * layer
        first = matrix + geometry.hidden
        quantized = geometry.quantized_parameters(train)
        largest = max(math.prod(widths) for widths in geometry.linears.values()) if quantized else 0
        trained = geometry.trained_parameters(train)
        experts = 3 * geometry.experts * geometry.hidden * geometry.expert_intermediate
        return Model(
            geometry.parameters, trained, matrix, root, unit, first, quantized, largest, experts
        )

    def layer_bytes(self, train: Train) -> float:
        """Return the mean bytes of a parameter of layers in use: in compute precision or 4 bits."""
        share = self.quantized / (self.parameters - self.root)
        return share * NF4_BYTES + (1 - share) * compute_bytes(train)

    def base_bytes(self, train: Train) -> float:
        """Return the bytes of all parameters, without adapters, as they compute."""
        return compute_bytes(train) * self.root + self.layer_bytes(train) * (
            self.parameters - self.root
        )

    def dequantized_bytes(self, train: Train) -> int:
        """Return the bytes of the largest dequantized weight, with fp32 scales, while in use."""
        return round(self.largest * (compute_bytes(train) + FP32_BYTES / NF4_BLOCK))


@dataclass(frozen=True)
class Moment:
    """Bytes in use at one moment. `gradients` are those that a rank keeps.

    `exchanged` are those that are not reduced yet, with their buffers.
    """

    name: str
    gradients: int
    gathered: int
    exchanged: int
    activations: int
    loss: int

    @property
    def sum(self) -> int:
        """The sum of all parts, in bytes."""
        return self.gradients + self.gathered + self.exchanged + self.activations + self.loss


def moments_of_step(
    geometry: Geometry,
    train: Train,
    model: Model,
    ranks: Ranks,
    tokens: int,
    accumulation: int,
    gradients: int,
) -> list[Moment]:
    """Return the moments in order.

    `tokens` are a micro-batch's, padded; `gradients` are the bytes of all of a rank.
    """
    # ZeRO-1 and 2 copy the gradients of a rank's shard once more for the update.
    is_copied = train.strategy in ("zero1", "zero2") and train.offload == "none"
    of_update = FP32_BYTES * model.trained // ranks.total if is_copied else 0
    of_update += _orthogonalising(geometry, train, ranks)
    if is_sharded(train):
        share = sharded_over(train, ranks)
        sharded = _Sharded(
            geometry, train, model, tokens, ranks.has_triton, accumulation, gradients, share
        )
        moments = sharded.moments()
    else:
        moments = [
            _end_of_forward(geometry, train, model, tokens, ranks.has_triton, gradients),
            _backward(geometry, train, model, tokens, gradients),
            _end_of_backward(train, model, gradients),
        ]
    return [*moments, Moment("in the update", gradients, 0, of_update, 0, 0)]


def _orthogonalising(geometry: Geometry, train: Train, ranks: Ranks) -> int:
    """Return the bytes of making updates orthogonal, one matrix at a time (train/muon.py).

    Beside an iteration there are updates of as many matrices as ranks with ddp, and of the one
    before. Otherwise a rank has its parts of as many, which make up one, the one that it makes
    orthogonal, and its parts of those before.
    """
    beside = ranks.total + 1 if train.strategy == "ddp" else 3
    return sum(
        portion.iteration_bytes + beside * portion.matrix_bytes
        for portion in portions(geometry, train)
    )


def _casts(geometry: Geometry, train: Train, model: Model) -> int:
    """Return the bytes of weights in compute precision beside the state, from forward to backward.

    Autocast keeps a cast of each matrix. ZeRO-3 keeps parameters that it may use again, up to its
    limit.
    """
    number = compute_bytes(train)
    # DeepSpeed keeps the last micro-batch's gradients
    if train.strategy == "zero1" and train.precision == "bf16":
        return number * model.trained
    if train.strategy == "ddp" and Arithmetic.of(train).by_autocast:
        untied_embedding = 0 if geometry.tied else model.matrix
        # frozen weights need no cast
        return number * min(model.trained, model.parameters - untied_embedding)
    return number * min(model.parameters, ZERO3_LIVE) if train.strategy == "zero3" else 0


def _end_of_forward(
    geometry: Geometry, train: Train, model: Model, tokens: int, has_triton: bool, gradients: int
) -> Moment:
    """Return the memory at the loss: activations, current logits, and the head's fp32 gradient."""
    activations = _kept_on_device(geometry, train, tokens) + _last_hidden(geometry, train, tokens)
    loss = _loss(geometry, train, model, tokens, has_triton)
    return Moment(AT_LOSS, gradients, _casts(geometry, train, model), 0, activations, loss)


def _last_hidden(geometry: Geometry, train: Train, tokens: int) -> int:
    """Return the bytes of the last norm, the supervised positions, and their gradient.

    Of the norm these are input, product and result.
    """
    number = compute_bytes(train)
    wide = number == FP32_BYTES or Arithmetic.of(train).by_autocast
    return tokens * geometry.hidden * (5 * FP32_BYTES if wide else FP32_BYTES + 4 * number)


def _loss(geometry: Geometry, train: Train, model: Model, tokens: int, has_triton: bool) -> int:
    """Return the bytes of logits, of what is computed from them, and of the head's fp32 gradient.

    With Triton, logits become gradients in place. Without it there is an fp32 copy of log p, and
    half precision is widened to fp32 on its way to gradients.
    """
    logits = max(1, min(tokens, LOGITS_AT_ONCE // geometry.vocab)) * geometry.vocab
    number = compute_bytes(train)
    trained_head = model.matrix if train.method == "full" else 0
    of_head = FP32_BYTES * trained_head
    if has_triton:
        return number * logits + of_head
    of_a_logit = 2 * FP32_BYTES + (number if number < FP32_BYTES else 0)
    product = number * trained_head if number < FP32_BYTES else 0
    return max(of_a_logit * logits, number * logits + product) + of_head


def _backward(
    geometry: Geometry, train: Train, model: Model, tokens: int, gradients: int
) -> Moment:
    """Return the memory in the last layer's backward: activations, head's gradient, and a bucket.

    ZeRO-3 gathers the tensors of a module whole and at once, however large they are, into a buffer
    from which it copies each (DeepSpeed's AllGatherCoalescedHandle); its limits are only for what
    it gathers ahead. ZeRO reduces a gradient that is larger than its bucket alone. Both are so of
    experts.
    """
    number = compute_bytes(train)
    gathered = _casts(geometry, train, model)
    if train.strategy == "zero3":
        gathered = max(gathered, number * 2 * model.experts)
    gathered += model.dequantized_bytes(train)
    exchanged = 0
    if train.method == "full" and train.strategy != "ddp":  # ddp has them in its buckets already
        at_once = max(ZERO_BUCKET, 2 * model.experts // 3)
        exchanged = number * model.matrix + (number + FP32_BYTES) * at_once
    in_layer = max(half.activations for half in _in_a_layer(geometry, train, model, tokens))
    activations = _kept_on_device(geometry, train, tokens) + in_layer
    return Moment("in the backward pass", gradients, gathered, exchanged, activations, 0)


@dataclass(frozen=True)
class _Half:
    """Bytes of half a layer's backward, beside what all keep; `weights` have gradients by then."""

    activations: int
    weights: int


def _in_a_layer(geometry: Geometry, train: Train, model: Model, tokens: int) -> list[_Half]:
    """Return both halves of a layer's backward pass, the second first: passed and recomputed.

    Each is of the kind of layer that needs most. What a layer keeps of its second half is free in
    the first.
    """
    unit = model.unit // min(train.unit_layers, geometry.layers)
    if feeds_in_chunks(train, bool(geometry.expert_layers), tokens):
        return [_Half(round(_in_a_layer_in_chunks(geometry, train, tokens)), unit)]
    number = compute_bytes(train)
    stream = Arithmetic.of(train).stream_bytes(train) * geometry.hidden
    width = max(geometry.intermediate, geometry.experts_per_token * geometry.expert_intermediate)
    # The results of the activation function and the product with it have gradients, and what comes
    # into the layer.
    in_second = 2 * number * width + stream + _sent(geometry, train)
    again, again_in_first = [], []
    for kind in geometry.kinds:
        first = mixed_per_token(geometry, train, kind)
        second = fed_per_token(geometry, train, kind.has_experts)
        there = first + second
        if recompute_of(train) != "none":
            # Results of products are taken from what is kept. Eager layers keep no input: its
            # norm's is in fp32.
            there = kept_per_token(geometry, train, kind, recompute_of(train)) - (
                0 if is_compiled(train) else stream
            )
        again.append(first + second - there)
        again_in_first.append(first - there)
    # the last product's
    of_second = min(model.experts // 3 if model.experts else geometry.hidden * width, unit)
    return [
        _Half(round(tokens * (max(again) + in_second)), of_second),
        _Half(round(tokens * (max(again_in_first) + _in_attention(geometry, train))), unit),
    ]


def _in_attention(geometry: Geometry, train: Train) -> float:
    """Return the bytes per token of attention's backward pass: of its gradients.

    These are the gradients of its result, queries, keys and values. Flash kernels add up those of
    queries in fp32, and compute those of keys and values for each head of the queries.
    """
    arithmetic = Arithmetic.of(train)
    number = arithmetic.number_bytes
    stream = arithmetic.stream_bytes(train) * geometry.hidden
    q = geometry.heads * geometry.head_dim
    k = geometry.kv_heads * geometry.head_dim
    return (
        stream + number * (2 * q + 2 * k) + (FP32_BYTES + 2 * number) * q + _sent(geometry, train)
    )


def _sent(geometry: Geometry, train: Train) -> int:
    """Return the bytes per token that are sent beside what is received, if ranks share blocks."""
    if train.ranks_per_block == 1:
        return 0
    return max(exchanged_by_a_layer(geometry, train, kind) for kind in geometry.kinds)


def _in_a_layer_in_chunks(geometry: Geometry, train: Train, tokens: int) -> float:
    """Return `_in_a_layer` for a chunked second half of a layer: the first, and the larger of two.

    In the second half that is the gradients of its result and its input, and a chunk in work. In
    the first it is the gradient of its result, and attention's.
    """
    arithmetic = Arithmetic.of(train)
    number = arithmetic.number_bytes
    stream = arithmetic.stream_bytes(train) * geometry.hidden
    of_chunk = fed_per_token(geometry, train, False) + 2 * number * geometry.intermediate
    chunk = tokens_at_once(tokens) * (of_chunk + stream)
    if train.method == "full":  # gradients of weights, in fp32, of a chunk and added up
        chunk += 2 * FP32_BYTES * sum(math.prod(geometry.linears[name]) for name in FED)
    before = max(before_chunks(geometry, train, kind) for kind in geometry.kinds)
    return tokens * before + max(
        tokens * 2 * stream + chunk, tokens * _in_attention(geometry, train)
    )


def _end_of_backward(train: Train, model: Model, gradients: int) -> Moment:
    """Return the memory after the last activations: a tied embedding is reduced in fp32."""
    exchanged = 0
    if train.method == "full":
        number = compute_bytes(train)
        of_zero = (number + FP32_BYTES) * max(ZERO_BUCKET, model.matrix)
        exchanged = FP32_BYTES * model.matrix if train.strategy == "ddp" else of_zero
    return Moment("at the end of the backward pass", gradients, 0, exchanged, 0, 0)


@dataclass(frozen=True)
class _Sharded:
    """What FSDP2 allocates in a step; tests hold it against torch's memory tracker.

    A unit is gathered into a buffer, and copied from it. Forward, the buffer is freed when the next
    unit has been copied, so that the last one is there during the loss. Backward, the next unit is
    gathered while one computes, and the buffer of a unit's gradients is freed when those of the
    next unit are complete. One rank gathers without a buffer. (torch/distributed/fsdp/_fully_shard:
    _fsdp_param_group.py and _fsdp_collectives.py.)
    """

    geometry: Geometry
    train: Train
    model: Model
    tokens: int
    has_triton: bool
    accumulation: int
    gradients: int  # bytes of all that a rank keeps
    share: int  # ranks that share a copy

    def moments(self) -> list[Moment]:
        """Return the moments before the update, in order."""
        units = math.ceil(self.geometry.layers / self.train.unit_layers)
        halves = _in_a_layer(self.geometry, self.train, self.model, self.tokens)
        of_layers = [
            self._unit(done, half)
            for done in sorted({0, min(1, units - 1), units - 1})
            for half in halves
        ]
        if self.train.method == "lora":
            return [self._before_loss(), self._loss(), *of_layers, self._end_of_adapters()]
        return [self._loss(), self._head(), *of_layers, self._end()]

    @cached_property
    def _kept(self) -> int:
        return _kept_on_device(self.geometry, self.train, self.tokens)

    @cached_property
    def _number(self) -> int:
        return compute_bytes(self.train)

    @property
    def _reduced(self) -> int:
        """Bytes of a gradient on its way to other ranks."""
        return HALF_BYTES if self.train.gradient_compression == "bf16" else FP32_BYTES

    @cached_property
    def _adapters_bytes(self) -> int:
        return self._number * self.model.trained if self.train.method == "lora" else 0

    @cached_property
    def _unit_bytes(self) -> int:
        adapters = (
            self._adapters_bytes
            * min(self.train.unit_layers, self.geometry.layers)
            // self.geometry.layers
        )
        return round(self.model.layer_bytes(self.train) * self.model.unit) + adapters

    @cached_property
    def _whole_bytes(self) -> int:
        return round(self.model.base_bytes(self.train)) + self._adapters_bytes

    @cached_property
    def _head_bytes(self) -> int:
        """Bytes of the head, if it is gathered by itself."""
        return 0 if self.geometry.tied else self._number * self.model.matrix

    @cached_property
    def _stays(self) -> bool:
        return stays_gathered(self.train)

    def _kept_gradients(self, parameters: int) -> int:
        """Return the bytes of gradients once so many are reduced: all, from the second pass on.

        Replicas keep what they add up, and exchange, as it is reduced; in fp32 that is the gradient
        itself.
        """
        reduced = self.gradients * parameters // self.model.trained
        known = self.gradients if self.accumulation > 1 else reduced
        if self.train.strategy == "hsdp" and self._reduced < FP32_BYTES:
            return reduced + known * self._reduced // FP32_BYTES
        return known

    def _at_loss(self) -> int:
        """Return the bytes that are gathered at the loss, with the last buffer."""
        last = (self._head_bytes or self._unit_bytes) if self.share > 1 else 0
        if self._stays:  # gathered in the first pass only, when there are no gradients
            return self._whole_bytes + max(0, last - self._kept_gradients(0))
        return self._number * self.model.root + last

    def _before_loss(self) -> Moment:
        """Return the memory when the head is copied from its buffer, beside the last unit."""
        gathered = self._at_loss() + (
            self._unit_bytes if self._head_bytes and self.share > 1 else 0
        )
        activations = self._kept
        return Moment(AT_LOSS, self._kept_gradients(0), gathered, 0, activations, 0)

    def _loss(self) -> Moment:
        activations = self._kept
        activations += _last_hidden(self.geometry, self.train, self.tokens)
        loss = _loss(self.geometry, self.train, self.model, self.tokens, self.has_triton)
        return Moment(AT_LOSS, self._kept_gradients(0), self._at_loss(), 0, activations, loss)

    def _head(self) -> Moment:
        """Return the memory when the head's gradient is rounded and the last unit is gathered."""
        if self._stays:
            gathered = self._whole_bytes
        else:
            gathered = self._number * self.model.root + (self._unit_bytes if self.share > 1 else 0)
        rounded = FP32_BYTES + (self._number if self._number < FP32_BYTES else 0)
        # Then it is copied, and reduced.
        reduced = 0 if self.geometry.tied else self._reduced + math.ceil(self._reduced / self.share)
        activations = self._kept
        activations += _last_hidden(self.geometry, self.train, self.tokens)
        if not self._stays or self.accumulation <= 2:
            reduced -= self._number
        exchanged = max(rounded, reduced) * self.model.matrix
        return Moment(
            "in the backward pass", self._kept_gradients(0), gathered, exchanged, activations, 0
        )

    def _unit(self, done: int, half: _Half) -> Moment:
        """Return the memory in a unit's backward pass, after `done` others, with its gradients."""
        unit = self._unit_bytes
        matrix = self.model.matrix
        if self._stays:
            is_last_pass = self.accumulation <= 2
            gathered = self._whole_bytes
            gathered -= self._head_bytes + done * unit if is_last_pass else 0
        else:
            is_next = self.share > 1 and done + 1 < math.ceil(
                self.geometry.layers / self.train.unit_layers
            )
            gathered = (
                self._number * self.model.root - self._head_bytes + unit * (2 if is_next else 1)
            )
        gathered += self.model.dequantized_bytes(self.train)
        exchanged = reduced = 0
        if self.train.method == "full":
            own = 0 if self.geometry.tied else matrix
            reduced = own + done * self.model.unit
            layer = self.model.unit // min(self.train.unit_layers, self.geometry.layers)
            complete = self.model.unit - layer + half.weights  # of the unit in work
            exchanged = self._number * complete + self._reduced * (self.model.unit if done else own)
            # until the embedding's is added to it
            exchanged += self._number * matrix if self.geometry.tied else 0
        kept = self._kept
        if not keeps_on_host(self.train):
            kept -= kept * done * self.train.unit_layers // self.geometry.layers
        activations = kept + half.activations
        return Moment(
            "in the backward pass",
            self._kept_gradients(reduced),
            gathered,
            exchanged,
            activations,
            0,
        )

    def _end(self) -> Moment:
        """Return the memory when the embedding's gradient, and a tied head's, is complete."""
        number = self._number
        first = self.model.first
        complete = (
            number * first * (2 if self.geometry.tied else 1) + self._reduced * self.model.unit
        )
        copied = (
            max(number + self._reduced, self._reduced + math.ceil(self._reduced / self.share))
            * first
        )
        gradients = self._kept_gradients(self.model.trained - first)
        if self._stays and self.accumulation > 1:
            gathered = number * self.model.parameters
            exchanged = max(complete, copied)
        elif copied > number * first + complete:
            gathered, exchanged = 0, copied
        else:
            gathered = number * first
            exchanged = complete
        return Moment("at the end of the backward pass", gradients, gathered, exchanged, 0, 0)

    def _end_of_adapters(self) -> Moment:
        is_for_next = self._stays and self.accumulation > 1
        gathered = self._whole_bytes if is_for_next else self._number * self.model.root
        return Moment("at the end of the backward pass", self.gradients, gathered, 0, 0, 0)


def _kept(geometry: Geometry, train: Train, tokens: int, layers: int) -> int:
    """Return the bytes that `layers` average layers keep, with attention's results where kept.

    A block may be one document.
    """
    recompute = recompute_of(train)
    share = layers / geometry.layers
    of_all = sum(
        count * kept_per_token(geometry, train, kind, recompute)
        for kind, count in geometry.kinds.items()
    )
    attending = kept_attention(
        geometry, train, tokens * train.ranks_per_block / train.micro_batch_blocks
    )
    of_attention = geometry.heads * (geometry.head_dim * compute_bytes(train) + FP32_BYTES)
    return round(
        tokens * (share * of_all + min(attending, share * geometry.attention_layers) * of_attention)
    )


def _kept_on_device(geometry: Geometry, train: Train, tokens: int) -> int:
    """Return the bytes of `_kept` on the device: of the current layer and those on the way."""
    layers = min(LAYERS_ON_DEVICE, geometry.layers) if keeps_on_host(train) else geometry.layers
    return _kept(geometry, train, tokens, layers)


def kept_on_host(geometry: Geometry, train: Train, tokens: int) -> int:
    """Return the bytes of layers that a rank keeps in host memory, for `tokens` tokens."""
    return _kept(geometry, train, tokens, geometry.layers) if keeps_on_host(train) else 0


def sharded_over(train: Train, ranks: Ranks) -> int:
    """Return the number of ranks that share one copy of what the strategy shards."""
    return {"ddp": 1, "hsdp": train.shard_ranks or ranks.per_node}.get(train.strategy, ranks.total)
