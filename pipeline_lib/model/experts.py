"""What a model with experts needs beside its layers: a loss that keeps them in balance, and their precision.

The balance is that of each packed block, over its real tokens: so it is the same sum however blocks are spread over
ranks and micro-batches, and padding, which is routed too, has no say.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

GROUPED = "grouped_in_precision"
_ROUTER_LOGITS = "router_logits"


def register() -> None:
    """Let transformers load models with `experts_implementation=GROUPED`."""
    ExpertsInterface.register(GROUPED, grouped_experts)


def router_loss_sum(router_logits: Sequence[Tensor], real: Tensor, experts_per_token: int) -> Tensor:
    """Balance loss of each block times its real tokens, added up over the blocks; [] in fp32.

    `router_logits` has [B * T, E] for each layer with experts, `real` [B, T] is False for padding. A block's loss is
    what transformers' `load_balancing_loss_func` gives for its real tokens: E x the sum over experts of the share of
    (layer, token) pairs that use the expert, times its mean probability; 1 x experts_per_token if all are used alike.
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
    tokens = mask.sum(dim=(1, 2)).clamp(min=1.0)  # a block of padding adds nothing
    return (experts * (used * probabilities).sum(dim=1) / (len(router_logits) ** 2 * tokens)).sum()


class _With:
    """A module with `others` in place of attributes of those names. Its methods are called with this as `self`."""

    def __init__(self, module: nn.Module, **others: Any) -> None:
        self._module = module
        for name, value in others.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def has_router(layer: nn.Module) -> bool:
    """Whether a decoder layer has experts, and a router that chooses among them."""
    return hasattr(getattr(layer, "mlp", None), "gate")


def with_router_logits(plain: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """`plain`, the `forward` of layers with experts, giving also what the router says of each token: [N, E].

    Their blocks of experts have to `tell_router_logits`. Transformers' own way to collect them, a hook, cuts what
    torch.compile makes of a layer into pieces.
    """
    bare = inspect.unwrap(plain)  # without transformers' way of computing it again, which asks what class it is

    @functools.wraps(plain)
    def forward(layer: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        found: list[Tensor] = []

        def mlp(hidden: Tensor) -> Tensor:
            made: Tensor
            made, logits = layer.mlp(hidden)
            found.append(logits)
            return made

        return bare(_With(layer, mlp=mlp), *args, **kwargs), found[0]

    return forward


def tell_router_logits(layer: nn.Module) -> None:
    """Let the block of experts of `layer` return these beside what it makes."""

    def forward(block: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
        found: list[Tensor] = []

        def gate(hidden: Tensor) -> tuple[Tensor, ...]:
            said: tuple[Tensor, ...] = block.gate(hidden)
            found.append(said[0])
            return said

        return type(block).forward(_With(block, gate=gate), hidden), found[0]

    block: Any = layer.mlp
    block.forward = MethodType(forward, block)


def keeping_router_logits(forward: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    """A layer's `forward` that keeps the logits for `take_router_logits`, where gradients are wanted."""

    @functools.wraps(forward)
    def run(layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        hidden, logits = forward(layer, *args, **kwargs)
        if torch.is_grad_enabled():
            vars(layer)[_ROUTER_LOGITS] = logits
        return hidden

    return run


def take_router_logits(model: nn.Module) -> list[Tensor]:
    """What the layers of `model` have kept since it was last taken, in their order."""
    return [vars(module).pop(_ROUTER_LOGITS) for module in model.modules() if _ROUTER_LOGITS in vars(module)]


def grouped_experts(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """All experts' products in one call for each matrix, in autocast's precision, which this kernel does not heed.

    `hidden` is [N, H], `chosen` and `weights` [N, k]; returns [N, H].
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        matrices = {name: getattr(experts, name).to(dtype) for name in ("gate_up_proj", "down_proj")}
        experts = _With(experts, **matrices)  # type: ignore[assignment]
    with _without_gathered_weights(experts):
        found: Tensor = grouped_mm_experts_forward(experts, hidden, chosen, weights)
    return found


def _without_gathered_weights(experts: nn.Module) -> AbstractContextManager[Any]:
    """Within, autograd keeps the experts' parameters instead of views of them, where ZeRO-3 has gathered these.

    A view would keep the memory of all experts of each layer from the forward to the backward pass: ZeRO-3 lets go of
    what a parameter holds, and before the backward pass gathers it anew. Where a layer is computed again, nothing is
    kept in any case; hooks of ours would come before those that see to it.
    """
    gathered = [parameter for parameter in experts.parameters(recurse=False) if hasattr(parameter, "ds_id")]
    if not gathered or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return nullcontext()
    by_place = {parameter.data_ptr(): parameter for parameter in gathered}

    def keep(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
        parameter = by_place.get(tensor.data_ptr())
        if parameter is None or (tensor.numel(), tensor.dtype) != (parameter.numel(), parameter.dtype):
            return tensor
        size, stride = tensor.size(), tensor.stride()
        return lambda: parameter.detach().as_strided(size, stride)

    return saved_tensors_hooks(keep, lambda kept: kept if isinstance(kept, Tensor) else kept())
