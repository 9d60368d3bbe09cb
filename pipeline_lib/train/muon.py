"""Muon: orthogonal updates for the matrices of layers, AdamW for all else.

The update of a matrix is its Nesterov momentum, made orthogonal by torch's Newton-Schulz iterations
in bf16, and scaled to the size of AdamW's updates (`match_rms_adamw` of torch.optim.Muon): so
learning rate and weight decay mean the same for both. Of the same gradients, any number of ranks
makes the updates of torch.optim.Muon, bit for bit.

A matrix is a parameter as the model has it. All heads of a projection are one; so are queries with
their gates (`q_proj` of Qwen3.5), and queries, keys and values of a delta rule (`in_proj_qkv`).

Iterations need the whole matrix. As many matrices are taken at a time as there are ranks that share
them, and each of these ranks makes the update of one.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim._muon import (
    DEFAULT_A,
    DEFAULT_B,
    DEFAULT_C,
    EPS,
    _adjust_lr,
    _zeropower_via_newtonschulz,
)

from pipeline_lib.config.train import Train
from pipeline_lib.train.adamw import update_group
from pipeline_lib.train.state import own_part

_MOMENTUM = 0.95  # torch.optim.Muon's default


class Muon(torch.optim.Optimizer):
    """Muon and AdamW over groups whose `rule` says which; every rank makes each `step`."""

    def __init__(self, groups: list[dict[str, Any]], train: Train) -> None:
        """Set up for `groups`, without moments; betas and epsilon are for AdamW."""
        settings = {"lr": train.lr, "betas": (train.beta1, train.beta2), "eps": train.adam_eps}
        super().__init__(groups, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            if group["rule"].newton_schulz_steps:
                self._update_matrices(group)
            else:
                update_group(group, self.state)

    def _update_matrices(self, group: Mapping[str, Any]) -> None:
        matrices = [parameter for parameter in group["params"] if parameter.grad is not None]
        # Those at a time are about equally large, so that no rank waits long for another.
        matrices.sort(key=lambda matrix: -matrix.numel())
        at_once = _sharing(matrices[0]).size() if matrices else 1
        for start in range(0, len(matrices), at_once):
            some = matrices[start : start + at_once]
            for matrix, update in zip(some, self._orthogonal(some, group), strict=True):
                own = own_part(matrix)
                own.mul_(1 - group["lr"] * group["weight_decay"])
                own.add_(update, alpha=-_adjust_lr(group["lr"], "match_rms_adamw", matrix.shape))

    def _orthogonal(
        self, matrices: Sequence[nn.Parameter], group: Mapping[str, Any]
    ) -> list[Tensor]:
        """Return this rank's parts of the orthogonal updates, in bf16: one matrix for each rank."""
        updates = [self._with_momentum(matrix) for matrix in matrices]
        steps = group["rule"].newton_schulz_steps
        if not isinstance(matrices[0], DTensor):
            return _from_whole(updates, steps)
        shapes = [(matrix.shape[0], matrix.shape[1]) for matrix in matrices]
        return _from_parts(updates, shapes, _sharing(matrices[0]), steps)

    def _with_momentum(self, matrix: nn.Parameter) -> Tensor:
        """Add the gradient to the momentum; return this rank's part of the update, in bf16."""
        gradient = own_part(cast(Tensor, matrix.grad))
        momentum = own_part(self.state[matrix]["momentum_buffer"])
        momentum.lerp_(gradient, 1 - _MOMENTUM)
        return gradient.lerp(momentum, _MOMENTUM).bfloat16()


def _sharing(matrix: Tensor) -> dist.ProcessGroup:
    """Return the ranks that share the work for `matrix`: those with its parts, or all."""
    if not isinstance(matrix, DTensor):
        return cast(dist.ProcessGroup, dist.group.WORLD)
    is_sharded = [placement.is_shard() for placement in matrix.placements]
    return matrix.device_mesh.get_group(is_sharded.index(True))


def _from_whole(updates: list[Tensor], steps: int) -> list[Tensor]:
    """Return the orthogonal of each of `updates`, up to one for each rank, which all ranks have."""
    rank = dist.get_rank()
    if rank < len(updates):
        updates[rank] = _orthogonalised(updates[rank], steps)
    sent = [
        dist.broadcast(update, src=owner, async_op=True) for owner, update in enumerate(updates)
    ]
    for work in sent:
        work.wait()
    return updates


def _from_parts(
    updates: list[Tensor], shapes: list[tuple[int, int]], ranks: dist.ProcessGroup, steps: int
) -> list[Tensor]:
    """Return this rank's rows of the orthogonal of each matrix, of which `updates` are its rows.

    There is up to one matrix for each of `ranks`, of the given shapes. A rank receives all rows of
    its own, and sends back those of the result.
    """
    idle = ranks.size() - len(updates)
    sent = [update.numel() for update in updates] + [0] * idle
    received = [0] * ranks.size()
    own_shape = (0, 0)
    if ranks.rank() < len(updates):
        own_shape = shapes[ranks.rank()]
        received = [rows * own_shape[1] for rows in _rows_of_ranks(own_shape[0], ranks.size())]
    own = _exchanged(torch.cat([update.flatten() for update in updates]), sent, received, ranks)
    if own.numel():
        own = _orthogonalised(own.view(own_shape), steps).flatten()
    parts = torch.split(_exchanged(own, received, sent, ranks), sent)[: len(updates)]
    return [part.view_as(update) for part, update in zip(parts, updates, strict=True)]


def _rows_of_ranks(rows: int, ranks: int) -> list[int]:
    """Return how many of the rows of a matrix each rank has under FSDP2; the last may have none."""
    most = math.ceil(rows / ranks)
    return [min(most, max(0, rows - most * rank)) for rank in range(ranks)]


def _exchanged(
    values: Tensor, sent: list[int], received: list[int], ranks: dist.ProcessGroup
) -> Tensor:
    """Send `sent[i]` of `values` to each rank i; return what came, `received[i]` values of each."""
    found = values.new_empty(sum(received))
    dist.all_to_all_single(found, values, received, sent, group=ranks)
    return found


def _orthogonalised(update: Tensor, steps: int) -> Tensor:
    """Return the bf16 matrix `update`, which is overwritten, with singular values of about 1."""
    found: Tensor = _zeropower_via_newtonschulz(
        update, (DEFAULT_A, DEFAULT_B, DEFAULT_C), steps, EPS
    )
    return found.contiguous()
