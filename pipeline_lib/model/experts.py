"""Mixture-of-experts models: the router's balancing loss, grouped matmuls, adapters of experts.

The balance loss is computed for each packed block over its real tokens. Its sum therefore does not
depend on how blocks are spread over ranks and micro-batches, and padding, which is also routed,
does not affect it.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.integrations.moe import (
    ExpertsInterface,
    _grouped_linear,
    grouped_mm_experts_forward,
)

from pipeline_lib.model.context import Part

GROUPED = "grouped_in_precision"
_ROUTER_LOGITS = "router_logits"


def register() -> None:
    """Register `grouped_experts` with transformers as `experts_implementation=GROUPED`."""
    ExpertsInterface.register(GROUPED, grouped_experts)


def router_loss_sum(
    router_logits: Sequence[Tensor], real: Tensor, experts_per_token: int, part: Part | None = None
) -> Tensor:
    """Return the sum over blocks of balance loss times number of real tokens; a scalar in fp32.

    `router_logits` has one tensor [B * T, E] for each layer with experts; `real` [B, T] is False
    for padding. A block's loss is what transformers' `load_balancing_loss_func` gives for its real
    tokens: E times the sum over experts of the share of (layer, token) pairs that use the expert,
    times the expert's mean probability. It is `experts_per_token` if all experts are used equally.
    With `part`, the logits are of this rank's part of the tokens, and the sum over the ranks of its
    group is that of whole blocks.
    """
    blocks, length = real.shape
    experts = router_logits[0].shape[-1]
    mask = real.to(torch.float32).unsqueeze(-1)
    probabilities = used = torch.zeros(blocks, experts, device=real.device)
    for logits in router_logits:
        of_layer = torch.softmax(logits.view(blocks, length, experts), dim=-1, dtype=torch.float32)
        chosen = of_layer.detach().topk(experts_per_token, dim=-1).indices
        probabilities = probabilities + (of_layer * mask).sum(dim=1)
        used = used + (torch.zeros_like(of_layer).scatter_(2, chosen, 1.0) * mask).sum(dim=1)
    tokens = mask.sum(dim=(1, 2))
    # the loss is linear in the probabilities, so each rank adds the term of its own
    if part is not None:
        used = part.summed(used)
        tokens = part.summed(tokens)
    tokens = tokens.clamp(min=1.0)  # a block of only padding adds 0
    return (experts * (used * probabilities).sum(dim=1) / (len(router_logits) ** 2 * tokens)).sum()


class _Overlay:
    """A module's proxy with the attributes in `others` replaced: the `self` of its methods."""

    def __init__(self, module: nn.Module, **others: Any) -> None:
        self._module = module
        for name, value in others.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def has_router(layer: nn.Module) -> bool:
    """Return True if a decoder layer has experts and a router."""
    return hasattr(getattr(layer, "mlp", None), "gate")


def with_router_logits(plain: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Wrap `plain`, a layer's `forward`, to return also the router's logits [N, E] of all tokens.

    `return_router_logits` has to be called on each of these layers first. The hook with which
    transformers collects the logits is not used, since it causes graph breaks in compiled layers.
    """
    # without transformers' checkpointing wrapper, which checks the class of `self`
    bare = inspect.unwrap(plain)

    @functools.wraps(plain)
    def forward(layer: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []

        def mlp(hidden: Tensor) -> Any:
            output, logits = layer.mlp(hidden)
            kept.append(logits)
            return output

        return bare(_Overlay(layer, mlp=mlp), *args, **kwargs), kept[0]

    return forward


def return_router_logits(layer: nn.Module) -> None:
    """Make the expert block of `layer` return (output, router logits), not the output alone."""

    def forward(block: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        kept: list[Tensor] = []

        def gate(hidden: Tensor) -> Any:
            routing = block.gate(hidden)
            kept.append(routing[0])
            return routing

        return type(block).forward(_Overlay(block, gate=gate), hidden), kept[0]

    block: Any = layer.mlp
    block.forward = MethodType(forward, block)


def keeping_router_logits(forward: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """Wrap a layer's `forward` to store router logits for `take_router_logits` with gradients."""

    @functools.wraps(forward)
    def run(layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        hidden, logits = forward(layer, *args, **kwargs)
        if torch.is_grad_enabled():
            vars(layer)[_ROUTER_LOGITS] = logits
        return hidden

    return run


def take_router_logits(model: nn.Module) -> list[Tensor]:
    """Return the router logits that the layers of `model` stored, in order, and clear them."""
    return [
        vars(module).pop(_ROUTER_LOGITS)
        for module in model.modules()
        if _ROUTER_LOGITS in vars(module)
    ]


def grouped_experts(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Apply the experts with one grouped matmul for each matrix; return [N, H].

    `hidden` is [N, H], `chosen` and `weights` are [N, k]. The kernel ignores autocast, so the
    weights are cast here.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        matrices = {
            name: getattr(experts, name).to(dtype) for name in ("gate_up_proj", "down_proj")
        }
        experts = _Overlay(experts, **matrices)  # type: ignore[assignment]
    with _without_gathered_weights(experts):
        return grouped_mm_experts_forward(experts, hidden, chosen, weights)


def adapted_experts(
    experts: nn.Module,
    factors: Mapping[str, tuple[Tensor, Tensor]],
    hidden: Tensor,
    chosen: Tensor,
    weights: Tensor,
) -> Tensor:
    """Apply the experts with their adapters; return [N, H].

    `factors` holds A [E, r, inputs] and B [E, outputs, r], already scaled, of the matrices with
    adapters, by their names in `experts`. `hidden` is [N, H], `chosen` and `weights` are [N, k].
    Each product is one grouped matmul over the rows of all experts, those of the adapters included:
    rows x W' + (rows x A') x B'.
    """
    kind = hidden.device.type
    module: Any = experts
    dtype = module.down_proj.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    order = chosen.flatten().argsort(stable=True)  # rows of one expert stand together
    counts = torch.zeros(module.num_experts, dtype=torch.int32, device=hidden.device)
    counts = counts.index_add(
        0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.int32)
    )
    ends = counts.cumsum(0, dtype=torch.int32)

    def product(rows: Tensor, name: str) -> Tensor:
        result = _grouped_linear(rows, getattr(module, name).to(dtype), ends)
        if name not in factors:
            return result
        a, b = (factor.to(dtype) for factor in factors[name])
        return result + _grouped_linear(_grouped_linear(rows, a, ends), b, ends)

    rows = hidden.to(dtype)[order // chosen.shape[-1]]
    rows = product(module._apply_gate(product(rows, "gate_up_proj")), "down_proj")
    rows = rows * weights.flatten()[order].unsqueeze(-1)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return rows[back].view(*chosen.shape, -1).sum(dim=1).to(hidden.dtype)


def _without_gathered_weights(experts: nn.Module) -> AbstractContextManager[Any]:
    """Return a context where autograd saves the experts' parameters, not views gathered by ZeRO-3.

    ZeRO-3 releases a parameter's memory after the forward pass and gathers it again before the
    backward pass. A saved view would keep the gathered weights of all layers in memory. Under
    activation checkpointing nothing is saved, and hooks set here would take precedence over those
    of the checkpointing, so none are set.
    """
    gathered = [
        parameter for parameter in experts.parameters(recurse=False) if hasattr(parameter, "ds_id")
    ]
    if not gathered or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return nullcontext()
    by_place = {parameter.data_ptr(): parameter for parameter in gathered}

    def keep(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        parameter = by_place.get(tensor.data_ptr())
        if parameter is None or (tensor.numel(), tensor.dtype) != (
            parameter.numel(),
            parameter.dtype,
        ):
            return tensor
        size = tensor.size()
        stride = tensor.stride()
        return lambda: parameter.detach().as_strided(size, stride)

    return saved_tensors_hooks(keep, lambda kept: kept if isinstance(kept, Tensor) else kept())
