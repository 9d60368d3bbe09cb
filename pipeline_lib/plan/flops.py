"""How much arithmetic a training step needs, by the two usual conventions. What is computed again never counts.

A product with a matrix of N weights takes 2 N FLOPs a token forward, 2 N for the gradient of its input, and 2 N for
that of the weights, if they are trained: 6 N, or 4 N for frozen ones. Of MoE layers the experts count that a token
goes through. Attention between n tokens and the m that they see takes 4 n m a channel forward and 8 n m backward.
Norms, the softmax and other pointwise work are left out, as everyone does. Padding is no work.
"""

import math
from dataclasses import dataclass

from pipeline_lib.config.schema import Train
from pipeline_lib.plan.frozen import frozen_names
from pipeline_lib.plan.geometry import EMBEDDING, HEAD, Geometry


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of a batch. `causal` counts the tokens that are seen (NVIDIA's convention), half of each square.

    `full_attention` counts whole squares, as PaLM, nanoGPT and torchtitan do, though half of them is never computed.
    """

    causal: float
    full_attention: float


def step_flops(
    geometry: Geometry, train: Train, tokens: int, squared_lengths: int, supervised_tokens: int | None = None
) -> StepFlops:
    """Work of a step over `tokens` without padding, in documents whose squared lengths add up to `squared_lengths`.

    The head counts for the `supervised_tokens` only, as the others never reach it here; None stands for all of them.
    The backward pass is counted down to the first layer, even where frozen layers would let it end above.
    """
    attention = 6.0 * geometry.layers * geometry.heads * geometry.head_dim * squared_lengths
    without_head = 0 if supervised_tokens is None else tokens - supervised_tokens
    linear = flops_per_token(geometry, train) * tokens - _head_flops(geometry, train) * without_head
    return StepFlops(linear + attention, linear + 2 * attention)


def flops_per_token(geometry: Geometry, train: Train) -> float:
    """Products with weights, forward and backward."""
    base = geometry.matmul_parameters
    if train.method == "lora":
        return 4.0 * base + 6.0 * geometry.adapter_parameters(train.lora)
    return 6.0 * base - 2.0 * _frozen_matmul_parameters(geometry, train)


def _head_flops(geometry: Geometry, train: Train) -> float:
    """Of a token, forward and backward; a head is not adapted."""
    is_frozen = train.method == "lora" or any(geometry.is_head(name) for name in frozen_parameters(geometry, train))
    return (4.0 if is_frozen else 6.0) * geometry.vocab * geometry.hidden


def frozen_parameters(geometry: Geometry, train: Train) -> set[str]:
    """The parameters that `train.freeze` names; a tied head is the embedding."""
    if not train.freeze:
        return set()
    names = geometry.shapes()
    return frozen_names({name: (name, HEAD) if geometry.is_head(name) else (name,) for name in names}, train.freeze)


def _frozen_matmul_parameters(geometry: Geometry, train: Train) -> float:
    """Those of `matmul_parameters` that `train.freeze` names."""
    shapes = geometry.shapes()
    used = geometry.experts_per_token / geometry.experts if geometry.experts else 1.0
    return sum(
        math.prod(shapes[name]) * (used if ".experts." in name else 1.0)
        for name in frozen_parameters(geometry, train)
        if len(shapes[name]) > 1 and (name != EMBEDDING or geometry.is_head(name))
    )
