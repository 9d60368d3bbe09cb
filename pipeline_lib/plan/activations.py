"""Activations: the bytes that a decoder layer keeps for its backward pass, tensor by tensor.

Derived from transformers' Qwen2, Qwen3, Qwen3-MoE and Qwen3.5 layers, with one attention kernel for
all documents. A test compares them with what autograd saves. With h hidden, q query and k key
channels, i channels of the MLP, and bf16 weights: 16 h + 10 q + 10 k + 8 i bytes a token in eager
mode, which is 26.3 times the hidden state for Qwen3-8B. Compiled, AOTAutograd's partitioner
recomputes some of them: 8 h + 6 q + 6 k + 6 i, or 16.8 times. For DoRA the formula gives what eager
layers keep.
"""

from collections.abc import Collection
from typing import NamedTuple

from pipeline_lib.arch.geometry import (
    DELTA_CHUNK,
    FP32_BYTES,
    HALF_BYTES,
    OF_HEADS,
    Delta,
    Geometry,
    LayerKind,
)
from pipeline_lib.arch.layers import has_fused_adapters, is_compiled
from pipeline_lib.config.train import Train

# for each expert of a token: index, weight, and its positions in the order by experts
_CHOICE_BYTES = 40
# Linears by what they multiply, where it is not theirs alone.
_SHARED_INPUTS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "of attention"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z", *OF_HEADS), "of the delta rule"),
    **dict.fromkeys(("gate_proj", "up_proj"), "of the MLP"),
}
FED = ("gate_proj", "up_proj", "down_proj")


def compute_bytes(train: Train) -> int:
    """Return the bytes of a number in the precision of the arithmetic."""
    return FP32_BYTES if train.precision == "fp32" else HALF_BYTES


class Arithmetic(NamedTuple):
    """The number format of the layers.

    `by_autocast`: weights are fp32 and are cast for each product, as under ddp. Then the norms of
    trained weights output fp32, and every product casts its input separately.
    """

    number_bytes: int
    by_autocast: bool

    @staticmethod
    def of(train: Train) -> "Arithmetic":
        """Return the arithmetic for the strategy and precision of `train`."""
        return Arithmetic(
            compute_bytes(train), train.strategy == "ddp" and train.precision != "fp32"
        )

    def stream_bytes(self, train: Train) -> int:
        """Return the bytes of a hidden number between layers: fp32 if the embedding is fp32."""
        return FP32_BYTES if self.by_autocast and train.method == "full" else self.number_bytes


def kept_per_token(geometry: Geometry, train: Train, kind: LayerKind, recompute: str) -> float:
    """Return the bytes per token, with padding, that a layer of that kind keeps for backward."""
    arithmetic = Arithmetic.of(train)
    stream = arithmetic.stream_bytes(train) * geometry.hidden
    if recompute != "none":
        return (
            stream if recompute == "full" else stream + _products(geometry, train, arithmetic, kind)
        )
    return mixed_per_token(geometry, train, kind) + fed_per_token(geometry, train, kind.has_experts)


def mixed_per_token(geometry: Geometry, train: Train, kind: LayerKind) -> float:
    """Return the bytes per token that a layer's first half keeps: norm, attention or delta rule."""
    arithmetic = Arithmetic.of(train)
    hidden = geometry.hidden
    number = arithmetic.number_bytes
    kept: float = FP32_BYTES  # of the norm
    if kind.is_recurrent and geometry.delta is not None:
        kept += _carried_per_token(geometry.delta, train)
    else:
        kept += _attended_per_token(geometry, train)
    names = [name for name in geometry.linears_of(kind) if name not in FED]
    if train.method == "lora":  # between the two factors of each adapter
        kept += (
            number
            * train.lora.rank
            * sum(name in names for name in geometry.adapted_linears(train.lora))
        )
    if is_compiled(train):
        # Inputs of products, and the layer's input. The last product's result is kept instead of
        # its sum with that.
        kept += arithmetic.stream_bytes(train) * hidden + number * hidden
        return kept + _inputs_of_linears(
            geometry, train, Arithmetic(number, by_autocast=False), names
        )
    kept += FP32_BYTES * hidden  # the norm's input
    if train.method == "full":  # the normalized values that a norm multiplies by its weight
        kept += hidden * _normalized_bytes(geometry, arithmetic)
    return kept + _inputs_of_linears(geometry, train, arithmetic, names)


def _attended_per_token(geometry: Geometry, train: Train) -> float:
    """Return the bytes per token that attention keeps between projections, with its norms."""
    number = compute_bytes(train)
    q = geometry.heads * geometry.head_dim
    k = geometry.kv_heads * geometry.head_dim
    normed = q + k if geometry.normed_heads else 0
    # Attention: query, output, key and value. If ranks share blocks, each has a head of keys and
    # values at least, and the exchanged output is kept beside the one that the kernel needs.
    of_keys = exchanged_kv_heads(geometry, train) * geometry.head_dim
    kept: float = number * (2 * q + 2 * of_keys) + FP32_BYTES * geometry.heads
    if train.ranks_per_block > 1 and (
        train.method == "full" or "o_proj" in geometry.adapted_linears(train.lora)
    ):
        kept += number * q
    # the gate, or its sigmoid; what it gates, which adapters and eager layers copy
    if geometry.gated_attention:
        copies = 2 if train.method == "full" and is_compiled(train) else 3
        kept += number * q * (copies if number < FP32_BYTES or is_compiled(train) else copies + 1)
    # Of each row that a norm processes, one fp32 number.
    kept += FP32_BYTES * (geometry.heads + geometry.kv_heads if geometry.normed_heads else 0)
    if is_compiled(train):
        return kept + number * normed
    kept += FP32_BYTES * normed  # inputs of norms
    if train.method == "full":
        kept += normed * (FP32_BYTES if _has_fp32_norms(geometry) else number)
    return kept


def _carried_per_token(delta: Delta, train: Train) -> float:
    """Return the bytes per token that the delta rule keeps between projections, with its norm."""
    arithmetic = Arithmetic.of(train)
    number = arithmetic.number_bytes
    # What is convolved, and as queries, keys and values what comes of it; the gate, and what is
    # gated; the inverses.
    kept: float = number * (2 * delta.channels + 2 * delta.values + delta.value_heads * DELTA_CHUNK)
    # Of each row that a norm processes, one fp32 number; and of each head, what its decay and its
    # rate are made of.
    kept += FP32_BYTES * delta.value_heads
    if is_compiled(train):
        return kept + delta.value_heads * (2 * FP32_BYTES + number)
    kept += 4 * FP32_BYTES * delta.value_heads
    # Of the convolution its sums too, and its input only if its weights are trained.
    kept += delta.channels * (FP32_BYTES - (0 if train.method == "full" else number))
    # The gated norm computes in fp32: its input, the gate and its activation, beside the normalized
    # values.
    kept += delta.values * (3 * FP32_BYTES - number)
    if train.method == "full":
        kept += delta.values * (FP32_BYTES if arithmetic.by_autocast else number)
    return kept


def _has_fp32_norms(geometry: Geometry) -> bool:
    """Return whether norms multiply by weights before rounding, as the Qwen3.5 family's do."""
    return geometry.delta is not None


def _normalized_bytes(geometry: Geometry, arithmetic: Arithmetic) -> int:
    """Return the bytes of a normalized hidden value, in eager layers whose norms are trained."""
    return (
        FP32_BYTES
        if arithmetic.by_autocast or _has_fp32_norms(geometry)
        else arithmetic.number_bytes
    )


def exchanged_kv_heads(geometry: Geometry, train: Train) -> int:
    """Return the heads of keys and values of all ranks together, for each token of a block."""
    return max(geometry.kv_heads, train.ranks_per_block)


def exchanged_bytes_per_token(geometry: Geometry, train: Train) -> int:
    """Return the bytes that all layers exchange forward per token, if ranks share blocks.

    A token is one of a rank.
    """
    return sum(
        count * exchanged_by_a_layer(geometry, train, kind)
        for kind, count in geometry.kinds.items()
    )


def exchanged_by_a_layer(geometry: Geometry, train: Train, kind: LayerKind) -> int:
    """Return the bytes that a layer exchanges forward per token of a rank, if ranks share blocks.

    These are queries, keys, values and outputs (model/context.py), including what stays on the
    rank; and what the decays and rates of a delta rule are made of.
    """
    if kind.is_recurrent and geometry.delta is not None:
        delta = geometry.delta
        return compute_bytes(train) * (delta.channels + 2 * delta.value_heads + delta.values)
    heads = 2 * geometry.heads + 2 * exchanged_kv_heads(geometry, train)
    return compute_bytes(train) * heads * geometry.head_dim


def before_chunks(geometry: Geometry, train: Train, kind: LayerKind) -> float:
    """Return what the first half keeps per token before a chunked second, with the tensor between.

    Where layers are compiled, that takes the place of o_proj's result.
    """
    arithmetic = Arithmetic.of(train)
    instead = arithmetic.number_bytes if is_compiled(train) else 0
    return mixed_per_token(geometry, train, kind) + geometry.hidden * (
        arithmetic.stream_bytes(train) - instead
    )


def fed_per_token(geometry: Geometry, train: Train, has_experts: bool) -> float:
    """Return the bytes per token that a layer's second half keeps: norm, and MLP or experts."""
    arithmetic = Arithmetic.of(train)
    compiled = is_compiled(train)
    number = arithmetic.number_bytes
    names = [] if has_experts else [name for name in geometry.linears if name in FED]
    kept: float = FP32_BYTES  # of the norm
    if train.method == "lora":
        adapters: float = sum(name in names for name in geometry.adapted_linears(train.lora))
        if has_experts:
            adapters = geometry.experts_per_token * len(geometry.adapted_experts(train.lora))
        kept += number * train.lora.rank * adapters
    if not compiled:
        kept += FP32_BYTES * geometry.hidden
        if train.method == "full":
            kept += geometry.hidden * _normalized_bytes(geometry, arithmetic)
    # Compiled, down_proj's result is not needed again; those of experts are: they are weighted.
    if has_experts:
        kept += _experts(geometry, train, number, 3 if compiled else 4)
    else:
        kept += (2 if compiled else 3) * number * geometry.intermediate
    by_autocast = arithmetic.by_autocast and not compiled
    return kept + _inputs_of_linears(geometry, train, Arithmetic(number, by_autocast), names)


def _inputs_of_linears(
    geometry: Geometry, train: Train, arithmetic: Arithmetic, names: Collection[str]
) -> float:
    """Return the bytes of inputs of the linears called `names` that train weights or have adapters.

    Attention keeps its output itself.
    """
    linears = geometry.linears if train.method == "full" else geometry.adapted_linears(train.lora)
    widths = {name: inputs for name, (inputs, _) in linears.items() if name in names}
    if train.method == "full":
        widths.pop("o_proj", None)
    # each adapter keeps its dropped-out input, and a mask byte
    if train.method == "lora" and train.lora.dropout > 0:
        return float((arithmetic.number_bytes + 1) * sum(widths.values()))
    if not arithmetic.by_autocast or has_fused_adapters(train):
        widths.pop("o_proj", None)
        widths = {_SHARED_INPUTS.get(name, name): inputs for name, inputs in widths.items()}
    return float(arithmetic.number_bytes * sum(widths.values()))


def _experts(geometry: Geometry, train: Train, number: int, widths: int) -> float:
    """Return the bytes kept for the experts of a token and for the router.

    For each expert: copies of the token, `widths` intermediate tensors, results and places. For the
    router: its input and scores. Inputs of products with frozen weights are not kept, unless there
    is an adapter.
    """
    inputs = 1 if train.method == "full" or geometry.adapted_experts(train.lora) else 0
    of_each = (1 + inputs) * geometry.hidden + (widths - 1 + inputs) * geometry.expert_intermediate
    of_experts = geometry.experts_per_token * (number * of_each + _CHOICE_BYTES)
    # The shared expert: its intermediate tensors, its result and its gate.
    shared = (
        number * ((widths - 1 + inputs) * geometry.intermediate + geometry.hidden)
        if geometry.shared_expert
        else 0
    )
    return of_experts + shared + inputs * number * geometry.hidden + FP32_BYTES * geometry.experts


def _products(geometry: Geometry, train: Train, arithmetic: Arithmetic, kind: LayerKind) -> float:
    """Return the bytes of results of products, and of attention or the delta rule.

    These `selective` keeps beside the layer's input. Compiled layers do not keep down_proj's
    result.
    """
    outputs = {name: output for name, (_, output) in geometry.linears_of(kind).items()}
    if kind.has_experts:
        of_each = 2 * geometry.expert_intermediate + geometry.hidden
        outputs["experts"] = geometry.experts_per_token * of_each + geometry.experts
        if geometry.shared_expert:
            outputs["experts"] += 2 * geometry.intermediate + geometry.hidden
    elif is_compiled(train):
        outputs.pop("down_proj")
    mixed = geometry.heads * geometry.head_dim
    of_heads = FP32_BYTES * geometry.heads
    if kind.is_recurrent and geometry.delta is not None:
        mixed = geometry.delta.values + geometry.delta.value_heads * DELTA_CHUNK
        of_heads = 0
    total = sum(outputs.values()) + mixed
    if has_fused_adapters(train):
        total += train.lora.rank * len(
            geometry.adapted_linears(train.lora).keys() & geometry.linears_of(kind).keys()
        )
    elif train.method == "lora":
        targets = outputs if train.lora.targets == "all-linear" else train.lora.targets
        total += sum(outputs[name] for name in targets if name in outputs and name != "experts")
    return arithmetic.number_bytes * total + of_heads
