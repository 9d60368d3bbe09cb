"""What moves memory without matrix products, both ways: transformers' modules, compiled, Liger.

Both ways are forward and backward.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from benchmarks.kernels.clock import Call
from benchmarks.kernels.report import Report, gradients, random

_EPSILON = 1e-6
_BF16_BYTES = 2
_Work = Callable[..., Tensor | Sequence[Tensor]]


@dataclass(frozen=True)
class Operation:
    """An operation of a step.

    `passes` are elements that forward and backward read and write at the least.
    """

    part: str
    ways: dict[str, _Work]
    shapes: tuple[tuple[int, ...], ...]
    passes: float
    calls: int
    constants: int = 0  # of the shapes, the last ones, which get no gradients


def measure_pointwise(report: Report) -> None:
    """Lines for all; ways for the parts of a step that the operations are."""
    for operation in _operations(report):
        for name, work in operation.ways.items():
            seconds = report.measure(
                "pointwise",
                f"{operation.part}: {name}",
                functools.partial(_call, report, operation, work),
                moved_bytes=_BF16_BYTES * operation.passes,
                calls=operation.calls,
            )
            report.way(operation.part, name, operation.calls * seconds)
    _measure_embedding(report)


def _call(report: Report, operation: Operation, work: _Work) -> Call:
    trained = len(operation.shapes) - operation.constants
    inputs = [
        random(*shape, device=report.device, trained=i < trained)
        for i, shape in enumerate(operation.shapes)
    ]
    return gradients(work, inputs)


def _operations(report: Report) -> list[Operation]:
    geometry, tokens = report.geometry, report.tokens
    stream, width = (1, tokens, geometry.hidden), (geometry.head_dim,)
    heads = [(1, tokens, count, geometry.head_dim) for count in (geometry.heads, geometry.kv_heads)]
    mlp = (1, tokens, geometry.intermediate)
    elements = tokens * geometry.hidden
    of_heads = tokens * (geometry.heads + geometry.kv_heads) * geometry.head_dim
    angles = (1, tokens, geometry.head_dim)
    norm, add_norm, rope = _norms(geometry.hidden, geometry.head_dim)
    return [
        Operation(
            "residual and norm",
            _three_ways(add_norm, _liger_add_norm),
            (stream, stream, (geometry.hidden,)),
            8.0 * elements,
            2 * geometry.layers,
        ),
        Operation(
            "norm alone",
            _three_ways(norm, _liger_norm),
            (stream, (geometry.hidden,)),
            5.0 * elements,
            1,
        ),
        Operation(
            "norms of heads and RoPE",
            _three_ways(rope, _liger_rope),
            (*heads, width, width, angles, angles),
            5.0 * of_heads,
            geometry.layers,
            constants=2,
        ),
        Operation(
            "SwiGLU",
            _three_ways(_swiglu, _liger_swiglu),
            (mlp, mlp),
            8.0 * tokens * mlp[2],
            geometry.layers,
        ),
    ]


def _three_ways(eager: _Work, liger: _Work) -> dict[str, _Work]:
    return {"transformers": eager, "compiled": torch.compile(eager, dynamic=False), "Liger": liger}


def _norm(module: Qwen3RMSNorm, x: Tensor, weight: Tensor) -> Tensor:
    """As transformers' module does it, with a weight from outside."""
    found: Tensor = torch.func.functional_call(module, {"weight": weight}, (x,))
    return found


def _norm_module(width: int) -> Qwen3RMSNorm:
    with torch.device("meta"):
        return Qwen3RMSNorm(width, eps=_EPSILON)


def _norms(width: int, head_width: int) -> tuple[_Work, _Work, _Work]:
    """By transformers' modules: a norm, a norm of a sum, and those of heads with RoPE."""
    module, of_heads = _norm_module(width), _norm_module(head_width)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return _norm(module, x, weight)

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        added = x + residual
        return _norm(module, added, weight), added

    def rope(
        q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
    ) -> Sequence[Tensor]:
        query = _norm(of_heads, q, q_weight).transpose(1, 2)
        key = _norm(of_heads, k, k_weight).transpose(1, 2)
        found: Sequence[Tensor] = apply_rotary_pos_emb(query, key, cos, sin)
        return found

    return norm, add_norm, rope


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _liger() -> Any:
    return importlib.import_module("liger_kernel.ops")


def _liger_norm(x: Tensor, weight: Tensor) -> Tensor:
    found: Any = _liger().LigerRMSNormFunction.apply(x, weight, _EPSILON, 0.0, "llama", False, None)
    return found  # type: ignore[no-any-return]


def _liger_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    found: Any = _liger().LigerFusedAddRMSNormFunction.apply(
        x, residual, weight, _EPSILON, 0.0, "llama", False
    )
    return found  # type: ignore[no-any-return]


def _liger_rope(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    query, key = _liger_norm(q, q_weight).transpose(1, 2), _liger_norm(k, k_weight).transpose(1, 2)
    found: Any = _liger().LigerRopeFunction.apply(query, key, cos, sin)
    return found  # type: ignore[no-any-return]


def _liger_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    found: Any = _liger().LigerSiLUMulFunction.apply(gate, up)
    return found  # type: ignore[no-any-return]


def _measure_embedding(report: Report) -> None:
    """Of a model that is trained whole: the gradient is as large as the table."""
    geometry, device = report.geometry, report.device

    def make() -> Call:
        table = random(geometry.vocab, geometry.hidden, device=device, trained=True)
        tokens = torch.randint(0, geometry.vocab, (report.tokens,), device=device)
        return gradients(lambda table: F.embedding(tokens, table), [table])

    elements = 4.0 * report.tokens * geometry.hidden + geometry.vocab * geometry.hidden
    seconds = report.measure(
        "pointwise", "embedding: torch", make, moved_bytes=_BF16_BYTES * elements, calls=1
    )
    report.way("embedding", "torch", seconds)
