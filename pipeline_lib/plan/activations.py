"""Bytes of activations that a decoder layer keeps for its gradients, tensor by tensor.

Derived from transformers' Qwen2, Qwen3 and Qwen3-MoE layers with one attention kernel for all documents; a test holds
them against what autograd really saves. With h hidden, q query and k key channels, i channels of the MLP, and bf16
weights: 16 h + 10 q + 10 k + 8 i bytes a token as they run eagerly; that is 26.3 times the hidden state for Qwen3-8B.
Compiled, with what AOTAutograd's partitioner keeps rather than makes again, 8 h + 6 q + 6 k + 6 i, or 16.8 times.
Of DoRA this is what the eager ones keep.
"""

from dataclasses import dataclass, replace

from pipeline_lib.config.schema import Train
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.placement import has_fused_adapters, is_compiled

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
