"""Computation: the passes through a layer, and through the ends, which are all outside the layers.

The time of products with weights and of attention follows from their FLOPs. The time of all
kernels between them follows from the bytes that they read and write: for eager layers those of
transformers' kernels, counted in their source, for compiled layers those of fused kernels. The
host's time follows from the number of operations that it launches. Measurements of this model's
shapes (cluster.json) replace the formula, which then only adapts them to other document lengths.
Constants for eager layers were measured on one H200 with torch 2.11 (benchmarks/RESULTS.md).
"""

import math
from dataclasses import astuple, dataclass

from pipeline_lib.arch.geometry import EMBEDDING, FP32_BYTES, HALF_BYTES, HEAD, NF4_BYTES, Geometry
from pipeline_lib.arch.layers import (
    LOGITS_AT_ONCE,
    has_fused_adapters,
    is_compiled,
    kept_attention,
    recompute_of,
    stays_gathered,
)
from pipeline_lib.config.train import AUTO, Lora, Train
from pipeline_lib.core.units import from_gbyte_per_s
from pipeline_lib.plan.activations import Arithmetic, compute_bytes, exchanged_bytes_per_token
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.machine import End, MeasuredPart, Pass, Speeds, beside_memory
from pipeline_lib.plan.moments import Model
from pipeline_lib.plan.trained import trained_shapes
from pipeline_lib.plan.workload import documents_at

# Seconds that compiling a layer, forward and backward, adds to a run: 6 to 20 for Qwen3-8B on one
# H200, more elsewhere.
COMPILE_S = 30.0


@dataclass(frozen=True)
class _Bytes:
    """Bytes that a layer's small kernels move for each token, in half precision.

    `by_hidden` is for each channel of the hidden state, `by_head` for each channel of queries and
    keys (head norms, rotation, copies), `by_mlp` for each channel of the MLP.
    """

    by_hidden: float
    by_head: float
    by_mlp: float


_BACKWARD = 2.0  # eager kernels' bytes in the backward pass, relative to the forward pass
_EAGER = (_Bytes(80, 58, 10), _Bytes(_BACKWARD * 80, _BACKWARD * 58, _BACKWARD * 10))
# Fused: 2-byte numbers read + written. Forward: first norm 1 + 1, second norm with the sum before
# it 2 + 1, last sum 3 + 1; norm and rotation of heads 1 + 1; SwiGLU 2 + 1. Backward: second norm 5
# + 1 (gradients of gate, up and sum, both terms of the sum), first norm 5 + 1 (gradients of q, k, v
# and sum, its input), the gradients of their weights 4 and 4 more; heads 2 + 1, the gradients of
# their weights 2; SwiGLU 3 + 2.
_COMPILED = (_Bytes(18, 4, 6), _Bytes(24 + 16, 6 + 4, 10))
_COMPILED_FROZEN = (_COMPILED[0], _Bytes(24, 6, 10))  # with frozen norm weights
# Beside its time in memory, each byte of a fused kernel takes as long as at this rate on the chip:
# on H200 they come to 0.8 of a long stream's bandwidth.
_FUSED_ON_CHIP_BYTES_S = from_gbyte_per_s(16_000.0)
_AUTOCAST = 1.2  # norms with fp32 weights output fp32, which is cast again for each product
_ADAPTED = 1.15  # peft's own modules
# reads and writes of two copies, by model/context.py; not measured on a GPU
_COPIES_OF_EXCHANGED = 4
# 4-byte instead of 2-byte numbers; eager norms use 4 bytes in any case
_OF_FP32 = 1.6
_COMPILED_OF_FP32 = 2.0
# model/lora.py, for each input and output channel of a linear, forward and backward: the narrow
# products read the input, its gradient and the output's gradient; the wide ones are accumulated in
# place.
_ADAPTER_BYTES = ((2, 4), (6, 4))
# model/build.py: products are twice as fast by the data sheets; casting moves this many bytes for
# each input and output channel of a linear, forward and backward. Fitted to two runs, of widths
# 4096 and 2560, within 5 %.
_FP8_GAIN = 2.0
_FP8_BYTES = (5.0, 10.0)
# Operations that the host launches for a layer, forward and backward.
_LAUNCHES = (77, 136)
_ADAPTED_LAUNCHES = (127, 222)  # with peft's own modules
_COMPILED_LAUNCHES = (15, 25)
_LAUNCHES_OF_ADAPTER = (5, 6)  # more for each adapted linear, with model/lora.py
_COMPILED_LAUNCHES_OF_ADAPTER = (3, 4)
# Other host work for a layer, in units of launches: gathering, autograd hooks, modes that intercept
# every operation.
_STRATEGY_LAUNCHES = {
    "ddp": (0, 0),
    "fsdp": (44, 54),
    "zero1": (35, 28),
    "zero2": (35, 40),
    "zero3": (228, 350),
}
_RECOMPUTE_LAUNCHES = {"none": (0, 0), "selective": (139, 214), "full": (40, 110)}
# selective is part of the graph
_COMPILED_RECOMPUTE_LAUNCHES = {"none": (0, 0), "selective": (0, 8), "full": (40, 48)}
_ENDS_LAUNCHES = (60, 40)
# The rate of grouped expert products, relative to a dense product: fitted to four runs on H200.
_GROUPED = 0.5
# The same of the gated delta rule, both passes: 29 to 43 TFLOP/s at 9B's widths on one H100, where
# products count as 633 TFLOP/s (benchmarks/RESULTS.md).
_DELTA = 0.055
# The host's pace varies from minute to minute, even on one machine; so one measurement may be off
# by this factor.
_HOST_PACE = {End.BAD: 1.4, End.EXPECTED: 1.0, End.GOOD: 0.8}


def family_of(train: Train) -> str:
    """Return the strategy as far as it affects one rank's computation: hsdp is the same as fsdp."""
    return "fsdp" if train.strategy == "hsdp" else train.strategy


def variant_of(train: Train) -> str:
    """Return a key for how a layer computes; measurements hold for their own variant only."""
    method = f"{train.method}-nf4" if train.lora.base == "nf4" else train.method
    plain = f"{family_of(train)}/{method}/{recompute_of(train)}"
    return f"{plain}/compiled" if is_compiled(train) else plain


def shape_of(geometry: Geometry) -> tuple[int, ...]:
    """Return the widths that determine the cost of a layer and of the ends."""
    dense = (
        geometry.vocab,
        geometry.hidden,
        geometry.intermediate,
        geometry.heads,
        geometry.kv_heads,
    )
    routed = (geometry.experts, geometry.experts_per_token, geometry.expert_intermediate)
    if geometry.delta is None:
        return (*dense, geometry.head_dim, *routed)
    return (
        *dense,
        geometry.head_dim,
        *routed,
        *astuple(geometry.delta),
        len(geometry.delta_layers),
        geometry.layers,
    )


@dataclass(frozen=True)
class Passes:
    """Forward and backward of one micro-batch through a part of the model, measured or computed."""

    forward: Pass
    backward: Pass
    recomputed_per_token_s: float  # the part of the backward pass that recomputes activations
    is_measured: bool


def layer_passes(case: Case, end: End) -> Passes:
    """Return the passes through an average decoder layer, measured here or by formula."""
    return _best_known("layer", case, end)


def ends_passes(case: Case, end: End) -> Passes:
    """Return the passes through embedding, last norm, head, loss; gradients come with forward."""
    return _best_known("ends", case, end)


def _best_known(part: str, case: Case, end: End) -> Passes:
    """Return the passes as measured, else by formula, corrected by the most similar variant."""
    documents = documents_at(case.workload, end)
    supervised = case.workload.supervised_fraction
    computed = _by_formula(part, case, case.train, documents, supervised, end)
    found = _measured(part, case, case.train)
    if found is not None:
        as_measured = case.train.model_copy(update=_AS_MEASURED)
        then = _as_then(part, case, as_measured, found, end)
        forward = _carried(found.forward, computed.forward, then.forward, end)
        backward = _carried(found.backward, computed.backward, then.backward, end)
        gain = found.backward.per_token_s / max(then.backward.per_token_s, _LEAST_S)
        return Passes(forward, backward, computed.recomputed_per_token_s * gain, is_measured=True)
    if not case.machine.measured:  # the variants take half the time of a choice
        return computed
    for like in _nearest(case.train):
        found = _measured(part, case, like)
        if found is not None:
            then = _as_then(part, case, like, found, end)
            forward = _corrected(computed.forward, found.forward, then.forward)
            backward = _corrected(computed.backward, found.backward, then.backward)
            gain = backward.per_token_s / max(computed.backward.per_token_s, _LEAST_S)
            again_s = computed.recomputed_per_token_s * gain
            return Passes(forward, backward, again_s, is_measured=False)
    return computed


_LEAST_S = 1e-15  # of a token, so that nothing is divided by 0


def _by_formula(
    part: str, case: Case, train: Train, document_tokens: float, supervised: float, end: End
) -> Passes:
    formula = _layer if part == "layer" else _ends
    speeds = case.machine.speeds_in(document_tokens, end)
    return formula(case.geometry, train, speeds, document_tokens, supervised)


def _as_then(part: str, case: Case, train: Train, found: MeasuredPart, end: End) -> Passes:
    """Return what the formula says of a part as it was measured."""
    documents = found.document_tokens
    return _by_formula(part, case, train, documents, found.supervised_fraction, end)


# Measurements are of layers that are resharded after each pass, and keep their attention.
_AS_MEASURED = {"reshard": True, "kept_attention_layers": AUTO}


def _nearest(train: Train) -> list[Train]:
    """Return the method's variants, most similar first: by compilation, by strategy, others."""
    ways: list[tuple[str, str]] = [
        (train.strategy, recompute) for recompute in ("none", "full", "selective")
    ]
    ways += [(strategy, "none") for strategy in ("fsdp", "zero1", "zero2", "zero3", "ddp")]
    as_measured = train.model_copy(update=_AS_MEASURED)
    return [
        as_measured.model_copy(
            update={"strategy": strategy, "recompute": recompute, "compile": compiled}
        )
        for compiled in (is_compiled(train), not is_compiled(train))
        for strategy, recompute in ways
    ]


def _corrected(computed: Pass, measured: Pass, then: Pass) -> Pass:
    # a size at which both are bound by the device
    measured_s = measured.device_s(8192)
    then_s = then.device_s(8192)
    device = measured_s / then_s if then_s else 1.0
    host = measured.host_s / then.host_s if then.host_s and measured.host_s else 1.0
    return Pass(computed.fixed_s * device, computed.per_token_s * device, computed.host_s * host)


def _measured(part: str, case: Case, train: Train) -> MeasuredPart | None:
    wanted = (part, shape_of(case.geometry), variant_of(train))
    for one in case.machine.measured:
        if (one.part, one.shape, one.variant) == wanted:
            return one
    return None


def _carried(measured: Pass, now: Pass, then: Pass, end: End) -> Pass:
    """Return a measured pass adapted to other document lengths, in the formula's proportion."""
    factor = now.per_token_s / then.per_token_s if then.per_token_s else 1.0
    fixed_s = max(0.0, measured.fixed_s + now.fixed_s - then.fixed_s)
    return Pass(fixed_s, measured.per_token_s * factor, measured.host_s * _HOST_PACE[end])


@dataclass(frozen=True)
class LayerForward:
    """A token in an average layer by formula: weights in products, seconds of the forward pass."""

    # experts, and fp8, count as the dense products in half precision that would take as long
    weights: float
    adapters: float
    products_s: float  # of both
    attention_s: float
    delta_s: float
    pointwise_s: float
    backward_pointwise_s: float  # of the backward pass

    @property
    def sum_s(self) -> float:
        """Seconds of all of it."""
        return self.products_s + self.attention_s + self.delta_s + self.pointwise_s


def layer_forward(
    geometry: Geometry, train: Train, speeds: Speeds, document_tokens: float
) -> LayerForward:
    """Return the forward pass of one token of a document of `document_tokens` tokens."""
    products = (geometry.matmul_parameters - geometry.vocab * geometry.hidden) / geometry.layers
    adapters = (
        geometry.adapter_matmul_parameters(train.lora) / geometry.layers
        if train.method == "lora"
        else 0.0
    )
    channels = geometry.heads * geometry.head_dim
    if geometry.expert_layers:
        of_expert = 3 * geometry.hidden * geometry.expert_intermediate
        share = len(geometry.expert_layers) / geometry.layers
        products += (1 / _GROUPED - 1) * share * geometry.experts_per_token * of_expert
    attending = geometry.attention_layers / geometry.layers
    matmul_s = 1 / speeds.matmul_flop_s
    attention_s = attending * 2 * channels * document_tokens / speeds.attention_flop_s
    of_delta = 0 if geometry.delta is None else geometry.delta.flops_per_token
    delta_s = (1 - attending) * of_delta * matmul_s / _DELTA
    if train.precision == "fp8":
        rounded = geometry.adapted_linears(
            Lora()
        ).values()  # not experts, so those that can have adapters
        products -= (1 - 1 / _FP8_GAIN) * sum(inputs * outputs for inputs, outputs in rounded)
    products_s = 2 * (products + adapters) * matmul_s
    return LayerForward(
        products, adapters, products_s, attention_s, delta_s, *_pointwise(geometry, train, speeds)
    )


def _layer(
    geometry: Geometry, train: Train, speeds: Speeds, document_tokens: float, _: float
) -> Passes:
    forward = layer_forward(geometry, train, speeds, document_tokens)
    trained = (
        forward.weights * _trained_fraction(geometry, train)
        if train.method == "full"
        else forward.adapters
    )
    of_weights_s = 2 * trained / speeds.matmul_flop_s
    mixing_s = forward.attention_s + forward.delta_s
    backward_s = forward.products_s + of_weights_s + 2 * mixing_s + forward.backward_pointwise_s
    kept = kept_attention(geometry, train, document_tokens) / max(1, geometry.attention_layers)
    again = {
        "none": 0.0,
        "selective": forward.pointwise_s,
        "full": forward.sum_s - kept * forward.attention_s,
    }
    again_s = again[recompute_of(train)]
    fixed = _weight_passes(geometry, train, speeds)
    host = _launches(geometry, train)
    return Passes(
        Pass(fixed[0], forward.sum_s, host[0] * speeds.launch_s),
        Pass(fixed[1], backward_s + again_s, host[1] * speeds.launch_s),
        again_s,
        is_measured=False,
    )


def _pointwise(geometry: Geometry, train: Train, speeds: Speeds) -> tuple[float, float]:
    """Return seconds per token, forward and backward, without weight products and attention."""
    compiled_rate = beside_memory(speeds.memory_bytes_s, _FUSED_ON_CHIP_BYTES_S)
    compiled = _COMPILED_FROZEN if train.method == "lora" else _COMPILED
    kinds, rate = (
        (compiled, compiled_rate) if is_compiled(train) else (_EAGER, speeds.pointwise_bytes_s)
    )
    forward, backward = (_pointwise_bytes(kind, geometry, train) / rate for kind in kinds)
    if train.precision == "fp8":
        channels = sum(
            inputs + outputs for inputs, outputs in geometry.adapted_linears(Lora()).values()
        )
        return forward + _FP8_BYTES[0] * channels / rate, backward + _FP8_BYTES[1] * channels / rate
    if not has_fused_adapters(train):
        return forward, backward
    linears = geometry.adapted_linears(train.lora).values()
    added = [
        sum(of_input * inputs + of_output * outputs for inputs, outputs in linears)
        * compute_bytes(train)
        / HALF_BYTES
        for of_input, of_output in _ADAPTER_BYTES
    ]
    return forward + added[0] / compiled_rate, backward + added[1] / compiled_rate


def _pointwise_bytes(kind: _Bytes, geometry: Geometry, train: Train) -> float:
    heads: float = (geometry.heads + geometry.kv_heads) * geometry.head_dim
    if geometry.delta is not None:  # its channels are convolved and normalized, its values gated
        recurrent = len(geometry.delta_layers) / geometry.layers
        heads += recurrent * (geometry.delta.channels + 2 * geometry.delta.values - heads)
    width = geometry.intermediate
    if geometry.expert_layers:
        width = geometry.experts_per_token * (geometry.expert_intermediate + geometry.hidden)
        if geometry.shared_expert:
            width += geometry.intermediate
    head_bytes = kind.by_head if geometry.normed_heads or is_compiled(train) else kind.by_head / 2
    total = kind.by_hidden * geometry.hidden + head_bytes * heads + kind.by_mlp * width
    if (
        train.ranks_per_block > 1
    ):  # each part is copied together to be sent, and apart when it has come
        total += _COPIES_OF_EXCHANGED * exchanged_bytes_per_token(geometry, train) / geometry.layers
    if Arithmetic.of(train).by_autocast and train.method == "full":
        total *= _AUTOCAST
    if compute_bytes(train) == FP32_BYTES:
        total *= _COMPILED_OF_FP32 if is_compiled(train) else _OF_FP32
    is_by_peft = train.method == "lora" and not has_fused_adapters(train)
    return total * (_ADAPTED if is_by_peft else 1.0)


def _weight_passes(geometry: Geometry, train: Train, speeds: Speeds) -> tuple[float, float]:
    """Return seconds, forward and backward, of passes over a layer's weights, for any tokens."""
    model = Model.of(geometry, train)
    weights = (model.parameters - model.root) / geometry.layers
    trained = (
        weights * _trained_fraction(geometry, train)
        if train.method == "full"
        else model.trained / geometry.layers
    )
    number = compute_bytes(train)
    of_layer = model.layer_bytes(train) * weights
    if family_of(train) == "fsdp":  # copied out when gathered; gradients widened for the exchange
        again = 0.0 if stays_gathered(train) else 2 * of_layer
        moved = (2 * of_layer, again + (number + FP32_BYTES) * trained)
    elif (
        train.strategy == "ddp" and Arithmetic.of(train).by_autocast
    ):  # weights cast; gradients widened and added
        moved = ((number + FP32_BYTES) * trained, (number + 4 * FP32_BYTES) * trained)
    else:
        moved = (0.0, (number + 2 * FP32_BYTES) * trained)
    read_and_written = (NF4_BYTES + number) * model.quantized / geometry.layers
    dequantized_s = read_and_written / beside_memory(speeds.memory_bytes_s, _FUSED_ON_CHIP_BYTES_S)
    forward_s = moved[0] / speeds.memory_bytes_s + dequantized_s
    times = 2 if recompute_of(train) == "full" else 1
    return forward_s, moved[1] / speeds.memory_bytes_s + times * dequantized_s


def _launches(geometry: Geometry, train: Train) -> tuple[float, float]:
    own, of_adapter = _LAUNCHES, _LAUNCHES_OF_ADAPTER
    if is_compiled(train):
        own, of_adapter = _COMPILED_LAUNCHES, _COMPILED_LAUNCHES_OF_ADAPTER
    elif train.method == "lora" and not has_fused_adapters(train):
        own = _ADAPTED_LAUNCHES
        of_adapter = (0, 0)
    adapters = len(geometry.adapted_linears(train.lora)) if train.method == "lora" else 0
    of_recompute = _COMPILED_RECOMPUTE_LAUNCHES if is_compiled(train) else _RECOMPUTE_LAUNCHES
    around = _STRATEGY_LAUNCHES[family_of(train)]
    again = of_recompute[recompute_of(train)]
    forward, backward = (
        own[place] + adapters * of_adapter[place] + around[place] + again[place] for place in (0, 1)
    )
    return forward, backward


def _trained_fraction(geometry: Geometry, train: Train) -> float:
    if not train.freeze:
        return 1.0
    names = {
        name: math.prod(shape) for name, shape in geometry.shapes().items() if ".layers." in name
    }
    trained = trained_shapes(geometry, train)
    return sum(size for name, size in names.items() if name in trained) / sum(names.values())


def _ends(
    geometry: Geometry, train: Train, speeds: Speeds, _: float, supervised_fraction: float
) -> Passes:
    matrix = geometry.vocab * geometry.hidden
    is_full = train.method == "full"
    is_full = is_full and (EMBEDDING if geometry.tied else HEAD) in trained_shapes(geometry, train)
    flops = (6.0 if is_full else 4.0) * matrix
    # logits read, log p written, read and turned into gradients
    softmax_bytes = 12.0 * geometry.vocab
    if is_full:  # the head's gradient is read and written once for each chunk of logits
        softmax_bytes += 10.0 * matrix * geometry.vocab / LOGITS_AT_ONCE
    of_supervised_s = flops / speeds.matmul_flop_s + softmax_bytes / speeds.memory_bytes_s
    norm_s = 34 * geometry.hidden / speeds.pointwise_bytes_s
    gradient_s = 4 * FP32_BYTES * matrix / speeds.memory_bytes_s if is_full else 0.0
    forward_host, backward_host = (count * speeds.launch_s for count in _ENDS_LAUNCHES)
    return Passes(
        Pass(0.0, supervised_fraction * of_supervised_s + norm_s, forward_host),
        Pass(gradient_s, _BACKWARD * norm_s, backward_host),
        0.0,
        is_measured=False,
    )
