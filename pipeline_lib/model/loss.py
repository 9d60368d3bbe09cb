"""Chunked cross-entropy that never holds all logits, computed only at positions with a target.

Each chunk of logits is converted to its share of the gradients and freed, so that memory is bounded
by LOGITS_AT_ONCE, not by the number of tokens. The loss is computed in the head's own forward,
where every strategy has gathered the head's whole weight. Names and weights of the model do not
change.
"""

import functools
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from pipeline_lib.arch.layers import LOGITS_AT_ONCE
from pipeline_lib.core.errors import DataError
from pipeline_lib.model.dropout import DRAWING, Draws
from pipeline_lib.model.experts import router_loss_sum, take_router_logits
from pipeline_lib.model.gpu import has_triton


class LossHead(nn.Linear):
    """A head without bias that returns logits, or losses if targets are given."""

    def forward(  # type: ignore[override]
        self, hidden: Tensor, targets: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits [..., V] of `hidden` [..., H]; with `targets` [N], its `cross_entropy`."""
        if targets is None:
            return super().forward(hidden)
        return cross_entropy(hidden, self.weight, targets)


def return_losses(model: PreTrainedModel) -> None:
    """Make `model(..., targets=[B, T], predicted=[N], real=[B, T])` return fp32 losses, not logits.

    `predicted` holds the flat int64 indices of the targets that count; `real` is False for padding.
    The model returns: the sum of -log p in nats over the predicted positions, with gradients; -log
    p at each position [B, T], 0 where nothing is predicted, without gradients; and
    `router_loss_sum` times the config's `router_aux_loss_coef`, with gradients. The last is 0
    unless `output_router_logits` is set and gradients are enabled; it needs layers prepared by
    `prepare_layers` in model/build.py. With an argument `part`, all are of this rank's part of the
    tokens. With `draws`, these decide the masks of dropout (model/dropout.py). Raises DataError if
    the head is not a linear module without bias.
    """
    plain = type(model).forward
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise DataError(
            f"{plain.__qualname__}: this model's head is not a product with one matrix, as Qwen's "
            "is"
        )
    with torch.device("meta"):
        with_loss = LossHead(head.in_features, head.out_features, bias=False)
    with_loss.weight = head.weight  # the same parameter, tied or not
    model.set_output_embeddings(with_loss)

    @functools.wraps(plain)  # transformers reads the signature
    def forward(
        self: PreTrainedModel,
        *args: Any,
        targets: Tensor | None = None,
        predicted: Tensor | None = None,
        real: Tensor | None = None,
        draws: Draws | None = None,
        **kwargs: Any,
    ) -> Any:
        if hasattr(self, DRAWING):
            getattr(
                self, DRAWING
            ).draws = draws  # the backward pass, which may compute layers again, needs them too
        has_router_loss = getattr(self.config, "output_router_logits", False)
        if has_router_loss:
            kwargs["output_router_logits"] = False  # the layers store them (model/build.py)
            take_router_logits(self)  # drop those of a failed pass, which keep its graph in memory
        if targets is None or predicted is None:
            return plain(self, *args, **kwargs)
        output = self.base_model(*args, **kwargs)
        hidden = output.last_hidden_state.flatten(0, 1)
        # An empty selection still keeps the graph, so that every rank takes part in every
        # collective.
        chosen = hidden.index_select(0, predicted)
        head = self.get_output_embeddings()
        total, losses = head(chosen, targets.flatten()[predicted])
        everywhere = losses.new_zeros(targets.numel()).index_copy_(0, predicted, losses)
        of_routers = torch.zeros_like(total)
        if has_router_loss and real is not None and torch.is_grad_enabled():
            router_logits = take_router_logits(self)
            if not router_logits:
                raise DataError(
                    "no layer has router logits: train.router_aux_loss needs prepared layers with "
                    "experts"
                )
            of_routers = router_loss_sum(
                router_logits, real, self.config.num_experts_per_tok, kwargs.get("part")
            )
            of_routers = of_routers * float(self.config.router_aux_loss_coef)
        return total, everywhere.view_as(targets), of_routers

    model.forward = MethodType(forward, model)


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of -log p of `targets` [N], and each -log p [N] without gradients, in fp32.

    The logits are `hidden` [N, H] x `weight` [V, H] transposed. Matmuls use the dtype of autocast
    or of `weight`; the softmax and the accumulated gradient of `weight` are in fp32. A second
    backward pass raises RuntimeError, since the gradients are kept only once.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
    with_gradients = torch.is_grad_enabled()
    result = _CrossEntropy.apply(hidden, weight, targets, dtype, with_gradients)  # type: ignore[no-untyped-call]
    return cast(tuple[Tensor, Tensor], result)


class _CrossEntropy(torch.autograd.Function):
    """Cross-entropy that computes the gradients in its forward pass; the backward scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        dtype: torch.dtype,
        with_gradients: bool,
    ) -> tuple[Tensor, Tensor]:
        rows = hidden.to(dtype)
        head = weight.to(dtype)
        losses = torch.empty(len(rows), dtype=torch.float32, device=rows.device)
        wants_hidden = with_gradients and ctx.needs_input_grad[0]
        wants_weight = with_gradients and ctx.needs_input_grad[1]
        of_hidden = torch.empty_like(rows) if wants_hidden else None
        of_weight = torch.zeros_like(head, dtype=torch.float32) if wants_weight else None
        at_once = max(1, LOGITS_AT_ONCE // len(head))
        for start in range(0, len(rows), at_once):
            part = slice(start, start + at_once)
            losses[part], of_logits = _softmax(rows[part] @ head.t(), targets[part])
            if of_hidden is not None:
                torch.mm(of_logits, head, out=of_hidden[part])
            if of_weight is not None:
                _add_product(of_weight, of_logits.t(), rows[part])
            del of_logits  # free it before the next chunk is computed
        ctx.gradients = of_hidden, of_weight
        ctx.dtypes = hidden.dtype, weight.dtype
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the gradients of this loss have been used; run the forward pass again"
            )
        gradients = ctx.gradients
        ctx.gradients = None
        scaled = [
            None if gradient is None else gradient.mul_(factor).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None)


def _softmax(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return -log p of each row of `logits` [N, V] in fp32; leave the sum's gradient in it."""
    if has_triton(logits.device):
        from pipeline_lib.model.kernels import softmax_in_place

        losses = softmax_in_place(logits, targets)
    else:
        log_p = torch.log_softmax(logits, dim=1, dtype=torch.float32)
        losses = -log_p.gather(1, targets[:, None]).squeeze(1)
        torch.exp(log_p, out=logits)
    # p - 1, accurate also for p near 1
    logits.scatter_(1, targets[:, None], torch.expm1(-losses).to(logits.dtype)[:, None])
    return losses, logits


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left x right to `total` in place, accumulating in the dtype of `total`."""
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif total.is_cuda:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right
