"""Low-rank adapters: peft's modules, their first values, and one operator for a frozen linear with its adapter."""

import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline_lib.config.schema import Lora
from pipeline_lib.core.errors import DataError
from pipeline_lib.model.gpu import has_triton

# A frozen linear module with its adapter as one operator: x W' + s (x A') B', with the second product added in place.
#
# peft's own modules widen their input to fp32, round it again, and pass over the widest tensors of a layer four times
# more than need be. Here the input is kept once for all modules that share it, and nothing of the output's size is
# kept. Adapters with dropout or DoRA's magnitudes stay peft's. What is trained is the same, rounded less often.

ADAPTER = "default"  # peft's name of the only one


def fuse_adapters(model: nn.Module) -> None:
    """Let the modules of `model` that have adapters compute by `adapted`; names and weights stay as they are.

    Which kinds of adapters may be, plan/workload.py says, as memory and time go by it.
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
        from pipeline_lib.model.kernels import add_low_rank_, has_rank

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


# Low-rank adapters: peft's own modules beside frozen linears, and their first values.
#
# A is random, B zero, and DoRA's magnitudes are the norms of the base's rows: at first nothing changes. Promise: the
# values are bitwise those that peft draws on one device, however the model is spread; only DoRA's magnitudes are kept
# in fp32 where peft rounds them to the base's precision, which would change the model before the first step.

ALL_LINEAR = "all-linear"


def lora_config(lora: Lora, targets: list[str]) -> LoraConfig:
    """The same settings as peft calls them, for linears of the names `targets`."""
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        task_type="CAUSAL_LM",
    )


def add_adapters(base: PreTrainedModel, lora: Lora, seed: int) -> PeftModel:
    """`base` frozen, with new adapters in fp32, so that at first nothing changes.

    Their values are drawn from `seed`; on the meta device there are none before `draw_adapters`. Raises DataError
    naming targets that the model does not have.
    """
    config = lora_config(lora, target_names(base, lora))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = get_peft_model(base, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    for layer in _adapted(model):
        if lora.dora and not layer.get_base_layer().weight.is_meta:
            _magnitude(layer).data = row_norms(layer.get_base_layer().weight)
    return model


def target_names(base: PreTrainedModel, lora: Lora) -> list[str]:
    """The names of the linears that get adapters. Raises DataError for a target that the model does not have.

    Of a model with experts these are the linears of attention: its experts are fused, its routers are to be left
    alone, and peft would give them adapters if it met `all-linear` or the names that experts have in files.
    """
    head = base.get_output_embeddings()  # type: ignore[no-untyped-call]
    has_experts = any(name.endswith(".experts") for name, _ in base.named_modules())
    linears = {
        name.rpartition(".")[2]: None
        for name, module in base.named_modules()
        if isinstance(module, nn.Linear) and module is not head and (not has_experts or ".self_attn." in name)
    }
    if lora.targets == ALL_LINEAR:
        return list(linears)
    absent = [name for name in lora.targets if name not in linears]
    if absent:
        raise DataError(
            f"train.lora.targets: this {base.config.model_type} model has no linear for adapters called "
            f"{', '.join(absent)}; it has {', '.join(linears)}"
            + (". Its experts and routers get none" if has_experts else "")
        )
    return list(lora.targets)


def draw_adapters(
    model: nn.Module, seed: int, put: Callable[[Tensor, Tensor], None], whole: Callable[[Tensor], Tensor]
) -> None:
    """Fill new adapters as peft does on one device. Drawn whole, one at a time, on every rank.

    `put(parameter, values)` keeps this rank's part of the whole `values`; `whole(parameter)` is a parameter of all
    ranks, which they ask for together.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for layer in _adapted(model):
            _draw_adapter(layer, put)
            if layer.lora_magnitude_vector:
                put(_magnitude(layer), row_norms(whole(layer.get_base_layer().weight)))


def row_norms(matrix: Tensor) -> Tensor:
    """[rows]: the L2 norm of each row of `matrix` [rows, columns], in fp32."""
    norms: Tensor = torch.linalg.vector_norm(matrix.detach().float(), dim=1)
    return norms


def _adapted(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _magnitude(layer: Any) -> nn.Parameter:
    return layer.lora_magnitude_vector[ADAPTER].weight  # type: ignore[no-any-return]


def _draw_adapter(layer: Any, put: Callable[[Tensor, Tensor], None]) -> None:
    dtype = layer.get_base_layer().weight.dtype
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    rank = layer.r[ADAPTER]
    drawn = nn.Linear(layer.in_features, rank, bias=False).weight
    nn.Linear(rank, layer.out_features, bias=False)  # peft draws B too, before it makes it zero,
    nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))  # and then A once more
    put(a, drawn.to(dtype))  # rounded by peft, though adapters are kept in fp32
    put(b, torch.zeros(layer.out_features, rank))
