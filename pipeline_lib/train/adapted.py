"""A frozen linear module with its adapter as one operator: x W' + s (x A') B', with the second product added in place.

peft's own modules widen their input to fp32, round it again, and pass over the widest tensors of a layer four times
more than need be. Here the input is kept once for all modules that share it, and nothing of the output's size is kept.
Adapters with dropout or DoRA's magnitudes stay peft's. What is trained is the same, rounded less often.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from pipeline_lib.train.gpu import has_triton

ADAPTER = "default"  # peft's name of the only one


def fuse_adapters(model: nn.Module) -> None:
    """Let the modules of `model` that have adapters compute by `adapted`; names and weights stay as they are.

    Which kinds of adapters may be, plan/placement.py says, as memory and time go by it.
    """
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(layer: Any, hidden: Tensor) -> Tensor:
    if layer.disable_adapters or layer.merged:
        without: Tensor = type(layer).forward(layer, hidden)
        return without
    base = layer.get_base_layer()
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else base.weight.dtype
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    bias = None if base.bias is None else base.bias.to(dtype)
    rows = hidden.to(dtype).flatten(0, -2)
    output: Tensor
    output, _ = adapted(rows, base.weight.to(dtype), bias, a.to(dtype), b.to(dtype) * layer.scaling[ADAPTER])
    return output.view(*hidden.shape[:-1], output.shape[-1])


@torch.library.custom_op("qwen3_pipeline::adapted", mutates_args=())
def adapted(hidden: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """[N, outputs] = hidden [N, inputs] x weight' + (hidden x a') x b', and what is between the last two, [N, r].

    `weight` [outputs, inputs] and `bias` have no gradients; `a` is [r, inputs], and `b`, which is scaled, [outputs, r].
    """
    narrow = hidden @ a.t()
    return _add_product(F.linear(hidden, weight, bias), narrow, b.t()), narrow


@adapted.register_fake
def _(hidden: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(len(hidden), len(weight)), hidden.new_empty(len(hidden), len(a))


@torch.library.custom_op("qwen3_pipeline::adapted_backward", mutates_args=())
def adapted_backward(
    gradient: Tensor, hidden: Tensor, narrow: Tensor, weight: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `hidden`, `a` and `b`."""
    of_narrow = gradient @ b
    of_hidden = _add_product(gradient @ weight, of_narrow, a)
    return of_hidden, of_narrow.t() @ hidden, gradient.t() @ narrow


def _add_product(total: Tensor, narrow: Tensor, wide: Tensor) -> Tensor:
    """Add narrow [N, r] x wide [r, M] to `total` in place: the libraries' products are slow for an inner size of r."""
    if total.dtype != torch.float32 and has_triton(total.device):
        from pipeline_lib.train.kernels import add_low_rank_, has_rank

        if has_rank(narrow.shape[1]):
            return add_low_rank_(total, narrow, wide)
    return total.addmm_(narrow, wide)


@adapted_backward.register_fake
def _(
    gradient: Tensor, hidden: Tensor, narrow: Tensor, weight: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(a), torch.empty_like(b)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, weight, _, a, b = inputs
    ctx.save_for_backward(hidden, output[1], weight, a, b)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    of_hidden, of_a, of_b = adapted_backward(gradient.contiguous(), *ctx.saved_tensors)
    return of_hidden, None, None, of_a, of_b


adapted.register_autograd(_backward, setup_context=_save)
