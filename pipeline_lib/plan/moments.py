"""The moments of a step when memory can peak, and what each uses beside a rank's kept state.

All sizes are columns in bytes, a number for each way to train (plan/ways.py).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeline_lib.arch.geometry import FP32_BYTES, HALF_BYTES, NF4_BLOCK, NF4_BYTES, Geometry
from pipeline_lib.arch.layers import (
    LAYERS_ON_DEVICE,
    LOGITS_AT_ONCE,
    can_feed_in_chunks,
    can_keep_attention,
    is_compiled,
    is_sharded,
    keeps_on_host,
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
from pipeline_lib.plan.ways import Column, Mask, Ways

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


@dataclass(frozen=True, eq=False)
class Moment:
    """Bytes in use at one moment, of the ways that have it. `gradients` are those a rank keeps.

    `exchanged` are those that are not reduced yet, with their buffers.
    """

    name: str
    is_had: Mask
    gradients: Column
    gathered: Column
    exchanged: Column
    activations: Column
    loss: Column

    @property
    def sum(self) -> Column:
        """The sum of all parts, in bytes; 0 where a way does not have this moment."""
        parts = self.gradients + self.gathered + self.exchanged + self.activations + self.loss
        return np.where(self.is_had, parts, 0.0)


# The keys of a way that its activations depend on.
_OF_LAYERS = ("strategy", "recompute", "compile", "context_ranks")


@dataclass(frozen=True, eq=False)
class StepMoments:
    """What a rank holds in a step, by each of `ways`.

    `accumulation` counts the micro-batches; from the second on, gradients exist in the forward
    pass. `gradients` are the bytes of all that a rank keeps.
    """

    geometry: Geometry
    ways: Ways
    model: Model
    ranks: Ranks
    block_tokens: int
    accumulation: Column
    gradients: Column

    @property
    def train(self) -> Train:
        """A way's settings, of which only keys are read that all ways have in common."""
        return self.ways.kinds[0]

    def moments(self) -> list[Moment]:
        """Return the moments in order."""
        of_sharded = [self._loss(), *self._units()]
        if self.train.method == "lora":
            of_sharded += [self._before_loss(), self._end_of_adapters()]
        else:
            of_sharded += [self._head(), self._end()]
        of_others = [self._loss_of_whole(), self._backward_of_whole(), self._end_of_whole()]
        return [*of_sharded, *of_others, self._update()]

    @cached_property
    def tokens(self) -> Column:
        """The tokens of a micro-batch, padding included."""
        parts = self.ways.each(lambda train: train.ranks_per_block, "context_ranks")
        return self.ways.micro_batch_blocks * self.block_tokens // parts

    @cached_property
    def is_chunked(self) -> Mask:
        """Whether micro-batches are fed forward in chunks."""
        can = self.ways.which(can_feed_in_chunks, "strategy", "recompute")
        return can & (self._fed_at_once < self.tokens) & (not self.geometry.expert_layers)

    @cached_property
    def _fed_at_once(self) -> Column:
        """The tokens that a dense layer feeds forward at once, if it does so in chunks."""
        sizes, row = np.unique(self.tokens, return_inverse=True)
        return np.array([float(tokens_at_once(int(size))) for size in sizes])[row]

    @cached_property
    def is_on_host(self) -> Mask:
        """Whether what the layers keep is in host memory."""
        return self.ways.which(keeps_on_host, "offload_activations", "recompute")

    @cached_property
    def kept_on_host(self) -> Column:
        """Bytes of layers that a rank keeps in host memory."""
        return np.where(self.is_on_host, self._kept_of(self.geometry.layers), 0.0)

    @cached_property
    def _kept(self) -> Column:
        """Bytes that layers keep on the device: with a host, the current one and those on the way."""
        layers = self.geometry.layers
        few = min(LAYERS_ON_DEVICE, layers)
        return np.where(self.is_on_host, self._kept_of(few), self._kept_of(layers))

    def _kept_of(self, layers: int) -> Column:
        """Return the bytes that `layers` average layers keep, with attention's results where kept.

        A block may be one document.
        """
        geometry = self.geometry

        def of_a_token(train: Train) -> float:
            recompute = recompute_of(train)
            return sum(
                count * kept_per_token(geometry, train, kind, recompute)
                for kind, count in geometry.kinds.items()
            )

        def can_keep(train: Train) -> bool:
            return can_keep_attention(train, self.block_tokens)

        share = layers / geometry.layers
        attending = np.where(self.ways.which(can_keep, "recompute"), self.ways.kept_layers, 0)
        attending = np.minimum(attending, share * geometry.attention_layers)
        of_attention = geometry.heads * (geometry.head_dim * self._number + FP32_BYTES)
        of_token = self.ways.each(of_a_token, *_OF_LAYERS)
        each: Column = share * of_token + attending * of_attention
        return self.tokens * each

    # Parts of several moments.

    @cached_property
    def _number(self) -> int:
        return compute_bytes(self.train)

    @cached_property
    def _none(self) -> Column:
        return np.zeros(len(self.ways))

    @cached_property
    def _is_sharded(self) -> Mask:
        return self.ways.which(is_sharded, "strategy")

    @cached_property
    def _last_hidden(self) -> Column:
        """Bytes of the last norm, the supervised positions, and their gradient.

        Of the norm these are input, product and result.
        """
        number = self._number

        def of_number(train: Train) -> float:
            is_wide = number == FP32_BYTES or Arithmetic.of(train).by_autocast
            return 5 * FP32_BYTES if is_wide else FP32_BYTES + 4 * number

        return self.tokens * self.geometry.hidden * self.ways.each(of_number, "strategy")

    @cached_property
    def _logits(self) -> Column:
        """Bytes of logits, of what is computed from them, and of the head's fp32 gradient.

        With Triton, logits become gradients in place. Without it there is an fp32 copy of log p,
        and half precision is widened to fp32 on its way to gradients.
        """
        vocab = self.geometry.vocab
        number = self._number
        logits = np.maximum(1, np.minimum(self.tokens, LOGITS_AT_ONCE // vocab)) * vocab
        trained_head = self.model.matrix if self.train.method == "full" else 0
        of_head = FP32_BYTES * trained_head
        if self.ranks.has_triton:
            return number * logits + of_head
        is_half = number < FP32_BYTES
        of_a_logit = 2 * FP32_BYTES + (number if is_half else 0)
        product = number * trained_head if is_half else 0
        computed: Column = np.maximum(of_a_logit * logits, number * logits + product)
        return computed + of_head

    @cached_property
    def _halves(self) -> tuple[tuple[Column, Column], tuple[Column, Column]]:
        """Both halves of a layer's backward pass, the second first: passed and recomputed.

        Of each the bytes beside what all layers keep, and the parameters that have gradients by
        then. Each is of the kind of layer that needs most. What a layer keeps of its second half is
        free in the first. A layer that feeds forward in chunks counts as one half.
        """
        geometry = self.geometry
        layer = self.model.unit // min(self.train.unit_layers, geometry.layers)
        second, first = self.ways.each(lambda train: _in_halves(geometry, train), *_OF_LAYERS)
        # the last product's
        width = max(
            geometry.intermediate, geometry.experts_per_token * geometry.expert_intermediate
        )
        experts = self.model.experts // 3
        of_second = min(experts or geometry.hidden * width, layer)
        weights = np.where(self.is_chunked, layer, of_second)
        chunked = self._in_a_layer_in_chunks()
        return (
            (np.where(self.is_chunked, chunked, self.tokens * second), weights),
            (np.where(self.is_chunked, chunked, self.tokens * first), np.full_like(weights, layer)),
        )

    def _in_a_layer_in_chunks(self) -> Column:
        """Return the same for a chunked second half of a layer: the first, and the larger of two.

        In the second half that is the gradients of its result and its input, and a chunk in work.
        In the first it is the gradient of its result, and attention's.
        """
        geometry = self.geometry
        if not self.is_chunked.any():
            return self._none
        before, of_chunk, gradients, attention = self.ways.each(
            lambda train: _in_chunks(geometry, train), *_OF_LAYERS
        )
        chunk = self._fed_at_once * of_chunk
        if self.train.method == "full":  # gradients of weights, in fp32, of a chunk and added up
            chunk += 2 * FP32_BYTES * sum(math.prod(geometry.linears[name]) for name in FED)
        in_second = self.tokens * gradients + chunk
        most: Column = self.tokens * before + np.maximum(in_second, self.tokens * attention)
        return most

    # FSDP2; tests hold it against torch's memory tracker.
    #
    # A unit is gathered into a buffer, and copied from it. Forward, the buffer is freed when the
    # next unit has been copied, so that the last one is there during the loss. Backward, the next
    # unit is gathered while one computes, and the buffer of a unit's gradients is freed when those
    # of the next unit are complete. One rank gathers without a buffer.
    # (torch/distributed/fsdp/_fully_shard: _fsdp_param_group.py and _fsdp_collectives.py.)

    @cached_property
    def _share(self) -> Column:
        """Ranks that share a copy."""
        return shares_of(self.ways, self.ranks)

    @cached_property
    def _has_buffer(self) -> Mask:
        return self._share > 1

    @cached_property
    def _stays(self) -> Mask:
        return self.ways.which(stays_gathered, "strategy", "reshard")

    @property
    def _reduced(self) -> int:
        """Bytes of a gradient on its way to other ranks."""
        return HALF_BYTES if self.train.gradient_compression == "bf16" else FP32_BYTES

    @cached_property
    def _adapters_bytes(self) -> int:
        return self._number * self.model.trained if self.train.method == "lora" else 0

    @cached_property
    def _unit_bytes(self) -> float:
        layers = self.geometry.layers
        adapters = self._adapters_bytes * min(self.train.unit_layers, layers) // layers
        return self.model.layer_bytes(self.train) * self.model.unit + adapters

    @cached_property
    def _whole_bytes(self) -> float:
        return self.model.base_bytes(self.train) + self._adapters_bytes

    @cached_property
    def _head_bytes(self) -> int:
        """Bytes of the head, if it is gathered by itself."""
        return 0 if self.geometry.tied else self._number * self.model.matrix

    def _kept_gradients(self, parameters: int) -> Column:
        """Return the bytes of gradients once so many are reduced: all, from the second pass on.

        Replicas keep what they add up, and exchange, as it is reduced; in fp32 that is the gradient
        itself.
        """
        reduced = self.gradients * (parameters / self.model.trained)
        known = np.where(self.accumulation > 1, self.gradients, reduced)
        if self._reduced == FP32_BYTES:
            return known
        is_hsdp = self.ways.which(lambda train: train.strategy == "hsdp", "strategy")
        return np.where(is_hsdp, reduced + known * self._reduced / FP32_BYTES, known)

    @cached_property
    def _gathered_at_loss(self) -> Column:
        """Bytes that are gathered at the loss, with the last buffer."""
        last = np.where(self._has_buffer, self._head_bytes or self._unit_bytes, 0.0)
        # gathered in the first pass only, when there are no gradients
        all_stay = self._whole_bytes + np.maximum(0.0, last - self._kept_gradients(0))
        return np.where(self._stays, all_stay, self._number * self.model.root + last)

    def _before_loss(self) -> Moment:
        """Return the memory when the head is copied from its buffer, beside the last unit."""
        buffer = self._unit_bytes if self._head_bytes else 0.0
        gathered = self._gathered_at_loss + np.where(self._has_buffer, buffer, 0.0)
        kept = self._kept_gradients(0)
        return Moment(AT_LOSS, self._is_sharded, kept, gathered, self._none, self._kept, self._none)

    def _loss(self) -> Moment:
        return Moment(
            AT_LOSS,
            self._is_sharded,
            gradients=self._kept_gradients(0),
            gathered=self._gathered_at_loss,
            exchanged=self._none,
            activations=self._kept + self._last_hidden,
            loss=self._logits,
        )

    def _head(self) -> Moment:
        """Return the memory when the head's gradient is rounded and the last unit is gathered."""
        number = self._number
        buffer = np.where(self._has_buffer, self._unit_bytes, 0.0)
        gathered = np.where(self._stays, self._whole_bytes, number * self.model.root + buffer)
        rounded = FP32_BYTES + (number if number < FP32_BYTES else 0)
        # Then it is copied, and reduced.
        reduced = self._none
        if not self.geometry.tied:
            reduced = self._reduced + np.ceil(self._reduced / self._share)
        is_free = ~self._stays | (self.accumulation <= 2)
        reduced = reduced - np.where(is_free, number, 0)
        return Moment(
            "in the backward pass",
            self._is_sharded,
            gradients=self._kept_gradients(0),
            gathered=gathered,
            exchanged=np.maximum(rounded, reduced) * self.model.matrix,
            activations=self._kept + self._last_hidden,
            loss=self._none,
        )

    def _units(self) -> list[Moment]:
        """Return the moments of a unit's backward pass: of the first, the second, and the last."""
        units = math.ceil(self.geometry.layers / self.train.unit_layers)
        return [
            self._unit(done, units, activations, weights)
            for done in sorted({0, min(1, units - 1), units - 1})
            for activations, weights in self._halves
        ]

    def _unit(self, done: int, units: int, in_layer: Column, weights: Column) -> Moment:
        """Return the memory in a unit's backward pass, after `done` others, with its gradients."""
        number = self._number
        unit = self._unit_bytes
        matrix = self.model.matrix
        freed = np.where(self.accumulation <= 2, self._head_bytes + done * unit, 0.0)
        is_next = self._has_buffer & (done + 1 < units)
        again = number * self.model.root - self._head_bytes + unit * np.where(is_next, 2, 1)
        gathered = np.where(self._stays, self._whole_bytes - freed, again)
        gathered += self.model.dequantized_bytes(self.train)
        exchanged = self._none
        reduced = 0
        if self.train.method == "full":
            own = 0 if self.geometry.tied else matrix
            reduced = own + done * self.model.unit
            layer = self.model.unit // min(self.train.unit_layers, self.geometry.layers)
            complete = self.model.unit - layer + weights  # of the unit in work
            exchanged = number * complete + self._reduced * (self.model.unit if done else own)
            # until the embedding's is added to it
            exchanged = exchanged + (number * matrix if self.geometry.tied else 0)
        passed = done * self.train.unit_layers / self.geometry.layers
        kept = np.where(self.is_on_host, self._kept, self._kept * (1 - passed))
        return Moment(
            "in the backward pass",
            self._is_sharded,
            gradients=self._kept_gradients(reduced),
            gathered=gathered,
            exchanged=exchanged,
            activations=kept + in_layer,
            loss=self._none,
        )

    def _end(self) -> Moment:
        """Return the memory when the embedding's gradient, and a tied head's, is complete."""
        number = self._number
        first = self.model.first
        of_first = number * first
        complete = of_first * (2 if self.geometry.tied else 1) + self._reduced * self.model.unit
        of_reduced = self._reduced + np.ceil(self._reduced / self._share)
        copied = np.maximum(number + self._reduced, of_reduced) * first
        is_for_next = self._stays & (self.accumulation > 1)
        is_copy = copied > of_first + complete
        gathered = np.where(is_copy, 0.0, of_first)
        gathered = np.where(is_for_next, number * self.model.parameters, gathered)
        exchanged = np.where(is_copy, copied, complete)
        exchanged = np.where(is_for_next, np.maximum(complete, copied), exchanged)
        return Moment(
            "at the end of the backward pass",
            self._is_sharded,
            gradients=self._kept_gradients(self.model.trained - first),
            gathered=gathered,
            exchanged=exchanged,
            activations=self._none,
            loss=self._none,
        )

    def _end_of_adapters(self) -> Moment:
        is_for_next = self._stays & (self.accumulation > 1)
        gathered = np.where(is_for_next, self._whole_bytes, self._number * self.model.root)
        return Moment(
            "at the end of the backward pass",
            self._is_sharded,
            gradients=self.gradients,
            gathered=gathered,
            exchanged=self._none,
            activations=self._none,
            loss=self._none,
        )

    # Strategies that do not shard as FSDP2 does.

    @cached_property
    def _casts(self) -> Column:
        """Bytes of weights in compute precision beside the state, from forward to backward.

        Autocast keeps a cast of each matrix. ZeRO-3 keeps parameters that it may use again, up to
        its limit.
        """
        model = self.model
        number = self._number
        untied_embedding = 0 if self.geometry.tied else model.matrix

        def of_strategy(train: Train) -> int:
            # DeepSpeed keeps the last micro-batch's gradients
            if train.strategy == "zero1" and train.precision == "bf16":
                return number * model.trained
            if train.strategy == "ddp" and Arithmetic.of(train).by_autocast:
                # frozen weights need no cast
                return number * min(model.trained, model.parameters - untied_embedding)
            return number * min(model.parameters, ZERO3_LIVE) if train.strategy == "zero3" else 0

        return self.ways.each(of_strategy, "strategy")

    def _loss_of_whole(self) -> Moment:
        """Return the memory at the loss: activations, logits, and the head's fp32 gradient."""
        return Moment(
            AT_LOSS,
            ~self._is_sharded,
            gradients=self.gradients,
            gathered=self._casts,
            exchanged=self._none,
            activations=self._kept + self._last_hidden,
            loss=self._logits,
        )

    def _backward_of_whole(self) -> Moment:
        """Return the memory in the last layer's backward: activations, gradients, and a bucket.

        ZeRO-3 gathers the tensors of a module whole and at once, however large they are, into a
        buffer from which it copies each (DeepSpeed's AllGatherCoalescedHandle); its limits are only
        for what it gathers ahead. ZeRO reduces a gradient that is larger than its bucket alone.
        Both are so of experts.
        """
        model = self.model
        number = self._number
        is_zero3 = self.ways.which(lambda train: train.strategy == "zero3", "strategy")
        of_experts = np.where(is_zero3, number * 2 * model.experts, 0)
        gathered = np.maximum(self._casts, of_experts) + model.dequantized_bytes(self.train)
        exchanged = self._none
        if self.train.method == "full":
            at_once = max(ZERO_BUCKET, 2 * model.experts // 3)
            buckets = number * model.matrix + (number + FP32_BYTES) * at_once
            exchanged = np.where(self._is_ddp, 0.0, buckets)  # ddp has them in its buckets already
        (second, _), (first, _) = self._halves
        return Moment(
            "in the backward pass",
            ~self._is_sharded,
            gradients=self.gradients,
            gathered=gathered,
            exchanged=exchanged,
            activations=self._kept + np.maximum(second, first),
            loss=self._none,
        )

    def _end_of_whole(self) -> Moment:
        """Return the memory after the last activations: a tied embedding is reduced in fp32."""
        exchanged = self._none
        if self.train.method == "full":
            of_ddp = FP32_BYTES * self.model.matrix
            of_zero = (self._number + FP32_BYTES) * max(ZERO_BUCKET, self.model.matrix)
            exchanged = np.where(self._is_ddp, of_ddp, of_zero)
        return Moment(
            "at the end of the backward pass",
            ~self._is_sharded,
            gradients=self.gradients,
            gathered=self._none,
            exchanged=exchanged,
            activations=self._none,
            loss=self._none,
        )

    @cached_property
    def _is_ddp(self) -> Mask:
        return self.ways.which(lambda train: train.strategy == "ddp", "strategy")

    def _update(self) -> Moment:
        """Return the memory in the update.

        ZeRO-1 and 2 copy the gradients of a rank's shard once more for it.
        """

        def of_update(train: Train) -> float:
            is_copied = train.strategy in ("zero1", "zero2") and train.offload == "none"
            copied = FP32_BYTES * self.model.trained // self.ranks.total if is_copied else 0
            return copied + _orthogonalising(self.geometry, train, self.ranks)

        return Moment(
            "in the update",
            np.ones(len(self.ways), np.bool_),
            gradients=self.gradients,
            gathered=self._none,
            exchanged=self.ways.each(of_update, "strategy", "offload"),
            activations=self._none,
            loss=self._none,
        )


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


def _in_halves(geometry: Geometry, train: Train) -> tuple[float, float]:
    """Return the bytes per token of both halves of a layer's backward pass, the second first."""
    number = compute_bytes(train)
    stream = Arithmetic.of(train).stream_bytes(train) * geometry.hidden
    width = max(geometry.intermediate, geometry.experts_per_token * geometry.expert_intermediate)
    # The results of the activation function and the product with it have gradients, and what comes
    # into the layer.
    in_second = 2 * number * width + stream + _sent(geometry, train)
    again = []
    again_in_first = []
    for kind in geometry.kinds:
        first = mixed_per_token(geometry, train, kind)
        second = fed_per_token(geometry, train, kind.has_experts)
        there = first + second
        if recompute_of(train) != "none":
            # Results of products are taken from what is kept. Eager layers keep no input: its
            # norm's is in fp32.
            there = kept_per_token(geometry, train, kind, recompute_of(train))
            there -= 0 if is_compiled(train) else stream
        again.append(first + second - there)
        again_in_first.append(first - there)
    return max(again) + in_second, max(again_in_first) + _in_attention(geometry, train)


def _in_chunks(geometry: Geometry, train: Train) -> tuple[float, float, float, float]:
    """Return bytes per token of a layer that feeds forward in chunks.

    These are what is there before, those of a token of a chunk, the gradients of the second half's
    result and input, and those of the first half.
    """
    arithmetic = Arithmetic.of(train)
    number = arithmetic.number_bytes
    stream = arithmetic.stream_bytes(train) * geometry.hidden
    before = max(before_chunks(geometry, train, kind) for kind in geometry.kinds)
    of_chunk = fed_per_token(geometry, train, False) + 2 * number * geometry.intermediate + stream
    return before, of_chunk, 2 * stream, _in_attention(geometry, train)


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


def shares_of(ways: Ways, ranks: Ranks) -> Column:
    """Return `sharded_over` of each way."""
    return ways.each(lambda train: sharded_over(train, ranks), "strategy", "shard_ranks")


def sharded_over(train: Train, ranks: Ranks) -> int:
    """Return the number of ranks that share one copy of what the strategy shards."""
    return {"ddp": 1, "hsdp": train.shard_ranks or ranks.per_node}.get(train.strategy, ranks.total)
