"""What a model with experts needs beside its layers: a loss that keeps them in balance, and their precision.

The balance is that of each packed block, over its real tokens: so it is the same sum however blocks are spread over
ranks and micro-batches, and padding, which is routed too, has no say.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

GROUPED = "grouped_in_precision"


def register() -> None:
    """Let transformers load models with `experts_implementation=GROUPED`."""
    ExpertsInterface.register(GROUPED, grouped_experts)


def router_loss_sum(router_logits: tuple[Tensor, ...], real: Tensor, experts_per_token: int) -> Tensor:
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


class _InPrecision:
    """Experts whose matrices are in another precision, as autocast has it for a linear."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self._experts = experts
        self.gate_up_proj = experts.gate_up_proj.to(dtype)
        self.down_proj = experts.down_proj.to(dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


def grouped_experts(experts: nn.Module, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """All experts' products in one call for each matrix, in autocast's precision, which this kernel does not heed.

    `hidden` is [N, H], `chosen` and `weights` [N, k]; returns [N, H].
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        experts = _InPrecision(experts, torch.get_autocast_dtype(kind))  # type: ignore[assignment]
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
