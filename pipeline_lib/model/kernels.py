"""Two Triton kernels for GPUs that replace several passes of torch over large tensors.

Both are memory-bound: at best each element is read once and written once. Importing this module
needs Triton.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 8192  # of a row, per loop iteration
_TILE = 64, 128  # rows and columns of the output per program


def softmax_in_place(logits: Tensor, targets: Tensor) -> Tensor:
    """Return -log p [N] of `targets` [N], in fp32.

    It overwrites `logits` [N, V] with the probabilities.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    _softmax[(len(logits),)](
        logits, targets, losses, logits.stride(0), logits.shape[1], COLUMNS=_COLUMNS, num_warps=16
    )
    return losses


@triton.jit  # type: ignore[untyped-decorator]
def _softmax(logits, targets, losses, stride, columns, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    places = tl.arange(0, COLUMNS)
    largest = tl.full((COLUMNS,), float("-inf"), tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    # each lane keeps its own maximum and sum: no reduction in the loop
    for first in range(0, columns, COLUMNS):
        values = tl.load(
            start + first + places, mask=first + places < columns, other=float("-inf")
        ).to(tl.float32)
        higher = tl.maximum(largest, values)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - safe) + tl.exp(values - safe)
        largest = higher
    top = tl.max(largest, axis=0)
    log_sum = top + tl.log(tl.sum(total * tl.exp(largest - top), axis=0))
    chosen = tl.load(start + tl.load(targets + row)).to(tl.float32)
    tl.store(losses + row, log_sum - chosen)
    tl.debug_barrier()  # the chosen logit has been read before it is overwritten
    for first in range(0, columns, COLUMNS):
        mask = first + places < columns
        values = tl.load(start + first + places, mask=mask, other=float("-inf")).to(tl.float32)
        tl.store(
            start + first + places, tl.exp(values - log_sum).to(logits.dtype.element_ty), mask=mask
        )


def add_low_rank_(total: Tensor, narrow: Tensor, wide: Tensor) -> Tensor:
    """Add narrow [N, r] x wide [r, M] to `total` [N, M] in place; r is 16, 32, 64 or 128."""
    rows, columns = total.shape
    grid = (triton.cdiv(columns, _TILE[1]), triton.cdiv(rows, _TILE[0]))
    _add_low_rank[grid](
        *(total, narrow, wide, rows, columns),
        *(total.stride(0), narrow.stride(0), wide.stride(0), wide.stride(1)),
        RANK=narrow.shape[1],
        ROWS=_TILE[0],
        COLUMNS=_TILE[1],
        num_warps=4,
    )
    return total


def has_rank(rank: int) -> bool:
    """Return True if `add_low_rank_` supports the inner size `rank`."""
    return rank in (16, 32, 64, 128)


@triton.jit  # type: ignore[untyped-decorator]
def _add_low_rank(  # type: ignore[no-untyped-def]
    total,
    narrow,
    wide,
    rows,
    columns,
    total_stride,
    narrow_stride,
    wide_stride,
    wide_column,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inner = tl.arange(0, RANK)
    left = tl.load(
        narrow + row[:, None] * narrow_stride + inner[None, :], mask=row[:, None] < rows, other=0.0
    )
    right = tl.load(
        wide + inner[:, None] * wide_stride + column[None, :] * wide_column,
        mask=column[None, :] < columns,
        other=0.0,
    )
    places = total + row[:, None].to(tl.int64) * total_stride + column[None, :]
    mask = (row[:, None] < rows) & (column[None, :] < columns)
    found = tl.load(places, mask=mask, other=0.0).to(tl.float32) + tl.dot(left, right)
    tl.store(places, found.to(total.dtype.element_ty), mask=mask)
