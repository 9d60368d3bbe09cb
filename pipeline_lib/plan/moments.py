"""The moments of a step at which memory peaks, and what is in use at each beside the state that a rank keeps."""

import math
from dataclasses import dataclass

from pipeline_lib.config.schema import Train
from pipeline_lib.plan.activations import FP32_BYTES, Arithmetic, compute_bytes, kept_per_token
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.placement import is_sharded, recompute_of, stays_gathered

# The loss makes that many logits at a time (train/loss.py).
LOGITS_AT_ONCE = 2**28
# Elements that DeepSpeed reduces at a time, as train/parallel/zero_config.py tells it; a larger matrix goes alone.
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
