"""What computing costs: passes through a layer and through what is no layer, and the update.

Products with weights and attention go by their FLOPs; everything between them by the bytes that transformers' eager
kernels read and write, which were counted in their source; the host by the number of operations that it launches. What
was measured of this model's shapes (cluster.json) takes the place of the formula, which then only carries it over to
other lengths of documents. Constants were read off one H200 with torch 2.11 (benchmarks/RESULTS.md).
"""

import math
from dataclasses import dataclass

from pipeline_lib.config.schema import Train
from pipeline_lib.plan.activations import FP32_BYTES, Arithmetic, compute_bytes
from pipeline_lib.plan.geometry import EMBEDDING, HEAD, Geometry
from pipeline_lib.plan.machine import Luck, Machine, MeasuredPart, Pass, Speeds
from pipeline_lib.plan.moments import LOGITS_AT_ONCE, Model
from pipeline_lib.plan.traffic import trained_shapes
from pipeline_lib.plan.workload import Workload

# Bytes that a layer's small kernels move for each token, forward, in half precision: by hidden, by query and key
# channel (norms of heads, rotation, copies), by MLP channel. The backward pass moves twice as many.
_BY_HIDDEN, _BY_HEAD_CHANNEL, _BY_MLP_CHANNEL = 80, 58, 10
_BACKWARD = 2.0
_AUTOCAST = 1.2  # norms of fp32 weights leave fp32, which is rounded again for each product
_ADAPTED = 1.15
_OF_FP32 = 1.6  # numbers of 4 bytes where half precision has 2
# Operations that the host launches for a layer: forward and backward.
_LAUNCHES = (77, 136)
_ADAPTED_LAUNCHES = (127, 222)
# What else it does for a layer, in launches: gathering, hooks of autograd, modes that watch every operation.
_STRATEGY_LAUNCHES = {"ddp": (0, 0), "fsdp": (44, 54), "zero1": (35, 28), "zero2": (35, 40), "zero3": (228, 350)}
_RECOMPUTE_LAUNCHES = {"none": (0, 0), "selective": (139, 214), "full": (40, 110)}
_ENDS_LAUNCHES = (60, 40)
_UPDATE_LAUNCHES = {"ddp": 0.5, "fsdp": 1.7, "zero1": 2.5, "zero2": 8.0, "zero3": 7.0}  # for each trained tensor
# The host's pace differs from minute to minute, also on one machine: what was measured once may be off by as much.
_HOST_PACE = {Luck.BAD: 1.4, Luck.EXPECTED: 1.0, Luck.GOOD: 0.8}
# Bytes of the update for each trained parameter of a rank: norm 4, clipping 8, AdamW 28, gradients made zero 4.
_UPDATE_BYTES = 44


def family_of(train: Train) -> str:
    """The strategy, as far as one rank computes: hsdp does what fsdp does."""
    return "fsdp" if train.strategy == "hsdp" else train.strategy


def variant_of(train: Train) -> str:
    """How a layer computes: what is measured of one variant says nothing of another."""
    return f"{family_of(train)}/{train.method}/{train.recompute}"


def shape_of(geometry: Geometry) -> tuple[int, ...]:
    """The widths that the cost of a layer and of the ends depends on."""
    dense = (geometry.vocab, geometry.hidden, geometry.intermediate, geometry.heads, geometry.kv_heads)
    routed = (geometry.experts, geometry.experts_per_token, geometry.expert_intermediate)
    return (*dense, geometry.head_dim, *routed)


@dataclass(frozen=True)
class Passes:
    """Forward and backward of one micro-batch through one part of the model; `is_measured` where it was."""

    forward: Pass
    backward: Pass
    recomputed_per_token_s: float  # of the backward pass, what computes activations again
    is_measured: bool


def layer_passes(geometry: Geometry, train: Train, machine: Machine, workload: Workload, luck: Luck) -> Passes:
    """One decoder layer, the mean of all; as measured on this machine, or by formula."""
    return _best_known("layer", geometry, train, machine, workload, luck)


def ends_passes(geometry: Geometry, train: Train, machine: Machine, workload: Workload, luck: Luck) -> Passes:
    """Embedding, last norm, head and loss. The loss makes its gradients in the forward pass (train/loss.py)."""
    return _best_known("ends", geometry, train, machine, workload, luck)


def update_pass(geometry: Geometry, train: Train, speeds: Speeds, share: int) -> Pass:
    """Norm, clipping and AdamW of a rank's part of the trained parameters, which `share` ranks spread."""
    trained = geometry.trained_parameters(train) / share
    tensors = len(trained_shapes(geometry, train))
    host_s = tensors * _UPDATE_LAUNCHES[family_of(train)] * speeds.launch_s
    return Pass(trained * _UPDATE_BYTES / speeds.memory_bytes_s, 0.0, host_s)


def _best_known(
    part: str, geometry: Geometry, train: Train, machine: Machine, workload: Workload, luck: Luck
) -> Passes:
    formula, speeds = _layer if part == "layer" else _ends, machine.speeds(luck)
    computed = formula(geometry, train, speeds, workload.document_tokens, workload.supervised_fraction)
    found = _measured(part, geometry, train, machine)
    if found is None:
        return _as_its_like(part, geometry, train, machine, speeds, computed)
    then = formula(geometry, train, speeds, found.document_tokens, found.supervised_fraction)
    return Passes(
        _carried(found.forward, computed.forward, then.forward, luck),
        _carried(found.backward, computed.backward, then.backward, luck),
        computed.recomputed_per_token_s * found.backward.per_token_s / max(then.backward.per_token_s, 1e-15),
        is_measured=True,
    )


def _as_its_like(
    part: str, geometry: Geometry, train: Train, machine: Machine, speeds: Speeds, computed: Passes
) -> Passes:
    """The formula, corrected as the likest variant that was measured corrects it: else the two would not compare."""
    for like in _nearest(train):
        found = _measured(part, geometry, like, machine)
        if found is not None:
            formula = _layer if part == "layer" else _ends
            then = formula(geometry, like, speeds, found.document_tokens, found.supervised_fraction)
            forward = _corrected(computed.forward, found.forward, then.forward)
            backward = _corrected(computed.backward, found.backward, then.backward)
            again_s = computed.recomputed_per_token_s * backward.per_token_s / max(computed.backward.per_token_s, 1e-15)
            return Passes(forward, backward, again_s, is_measured=False)
    return computed


def _nearest(train: Train) -> list[Train]:
    """Variants of the same method, the likest first: the same strategy, then those that compute alike."""
    ways: list[tuple[str, str]] = [(train.strategy, recompute) for recompute in ("none", "full", "selective")]
    ways += [(strategy, "none") for strategy in ("fsdp", "zero1", "zero2", "zero3", "ddp")]
    return [train.model_copy(update={"strategy": strategy, "recompute": recompute}) for strategy, recompute in ways]


def _corrected(computed: Pass, measured: Pass, then: Pass) -> Pass:
    tokens = 8192  # where both are bound by the device
    device = measured.device_s(tokens) / then.device_s(tokens) if then.device_s(tokens) else 1.0
    host = measured.host_s / then.host_s if then.host_s and measured.host_s else 1.0
    return Pass(computed.fixed_s * device, computed.per_token_s * device, computed.host_s * host)


def _measured(part: str, geometry: Geometry, train: Train, machine: Machine) -> MeasuredPart | None:
    wanted = (part, shape_of(geometry), variant_of(train))
    return next((one for one in machine.measured if (one.part, one.shape, one.variant) == wanted), None)


def _carried(measured: Pass, now: Pass, then: Pass, luck: Luck) -> Pass:
    """A measured pass in other documents: longer by as much as the formula says."""
    factor = now.per_token_s / then.per_token_s if then.per_token_s else 1.0
    return Pass(measured.fixed_s, measured.per_token_s * factor, measured.host_s * _HOST_PACE[luck])


def _layer(geometry: Geometry, train: Train, speeds: Speeds, document_tokens: float, _: float) -> Passes:
    products = (geometry.matmul_parameters - geometry.vocab * geometry.hidden) / geometry.layers
    adapters = geometry.adapter_parameters(train.lora) / geometry.layers if train.method == "lora" else 0.0
    channels = geometry.heads * geometry.head_dim
    matmul_s, attention_s = 1 / speeds.matmul_flop_s, 2 * channels * document_tokens / speeds.attention_flop_s
    pointwise_s = _pointwise_bytes(geometry, train) / speeds.pointwise_bytes_s
    forward_s = 2 * (products + adapters) * matmul_s + attention_s + pointwise_s
    of_weights = 2 * products * _trained_fraction(geometry, train) if train.method == "full" else 2 * adapters
    backward_s = (2 * (products + adapters) + of_weights) * matmul_s + 2 * attention_s + _BACKWARD * pointwise_s
    again_s = {"none": 0.0, "selective": pointwise_s, "full": forward_s}[train.recompute]
    fixed = _weight_passes(geometry, train, speeds)
    host = _launches(train)
    return Passes(
        Pass(fixed[0], forward_s, host[0] * speeds.launch_s),
        Pass(fixed[1], backward_s + again_s, host[1] * speeds.launch_s),
        again_s,
        is_measured=False,
    )


def _pointwise_bytes(geometry: Geometry, train: Train) -> float:
    """For each token, forward."""
    heads = (geometry.heads + geometry.kv_heads) * geometry.head_dim
    width = geometry.intermediate
    if geometry.expert_layers:
        width = geometry.experts_per_token * (geometry.expert_intermediate + geometry.hidden)
    head_bytes = _BY_HEAD_CHANNEL if geometry.normed_heads else _BY_HEAD_CHANNEL / 2
    total = _BY_HIDDEN * geometry.hidden + head_bytes * heads + _BY_MLP_CHANNEL * width
    if Arithmetic.of(train).by_autocast and train.method == "full":
        total *= _AUTOCAST
    if compute_bytes(train) == FP32_BYTES:
        total *= _OF_FP32
    return total * (_ADAPTED if train.method == "lora" else 1.0)


def _weight_passes(geometry: Geometry, train: Train, speeds: Speeds) -> tuple[float, float]:
    """Seconds, forward and backward, for passes over a layer's weights, however many tokens there are."""
    model = Model.of(geometry, train)
    weights = (model.parameters - model.root) / geometry.layers
    trained = (
        weights * _trained_fraction(geometry, train) if train.method == "full" else model.trained / geometry.layers
    )
    number = compute_bytes(train)
    if family_of(train) == "fsdp":  # copied out when gathered; gradients widened for the exchange
        moved = (2 * number * weights, 2 * number * weights + (number + FP32_BYTES) * trained)
    elif train.strategy == "ddp" and Arithmetic.of(train).by_autocast:  # rounded; gradients widened and added up
        moved = ((number + FP32_BYTES) * trained, (number + 4 * FP32_BYTES) * trained)
    else:
        moved = (0.0, (number + 2 * FP32_BYTES) * trained)
    return moved[0] / speeds.memory_bytes_s, moved[1] / speeds.memory_bytes_s


def _launches(train: Train) -> tuple[float, float]:
    own = _LAUNCHES if train.method == "full" else _ADAPTED_LAUNCHES
    around, again = _STRATEGY_LAUNCHES[family_of(train)], _RECOMPUTE_LAUNCHES[train.recompute]
    return own[0] + around[0] + again[0], own[1] + around[1] + again[1]


def _trained_fraction(geometry: Geometry, train: Train) -> float:
    """Of the layers' weights, what `train.freeze` leaves to train."""
    if not train.freeze:
        return 1.0
    names = {name: math.prod(shape) for name, shape in geometry.shapes().items() if ".layers." in name}
    trained = trained_shapes(geometry, train)
    return sum(size for name, size in names.items() if name in trained) / sum(names.values())


def _ends(geometry: Geometry, train: Train, speeds: Speeds, _: float, supervised_fraction: float) -> Passes:
    matrix = geometry.vocab * geometry.hidden
    is_full = train.method == "full"
    is_full = is_full and (EMBEDDING if geometry.tied else HEAD) in trained_shapes(geometry, train)
    flops = (6.0 if is_full else 4.0) * matrix
    softmax_bytes = 12.0 * geometry.vocab  # logits read, log p written, read and turned into gradients
    if is_full:  # the head's gradient is read and written once for each piece of logits
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
