"""Low-rank adapters: peft's modules, their initial values, and operators for frozen matrices."""

import math
import warnings
from collections.abc import Callable
from itertools import chain
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline_lib.arch.geometry import OF_HEADS
from pipeline_lib.arch.weight_files import ADAPTER
from pipeline_lib.config.train import Lora
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.processes import hidden
from pipeline_lib.model.dropout import DRAWING, Drawing, SeededDropout
from pipeline_lib.model.experts import adapted_experts
from pipeline_lib.model.gpu import has_triton
from pipeline_lib.model.nf4 import Nf4Linear, dequantized, dtype_of

# peft imports bitsandbytes, and that inductor, for quantized layers of its kind. Ours are of
# another (model/nf4.py).
with hidden("bitsandbytes"):
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.import_utils import is_bnb_available
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    is_bnb_available()  # peft remembers the answer

# A frozen linear and its adapter as one operator: x W' + s (x A') B', where the second product is
# added in place. peft's modules convert the input to fp32 and back, and make four more passes over
# the widest tensors of a layer. Here modules share one saved input, and nothing of the output's
# size is saved. The result is the same, rounded less often. Adapters with dropout or DoRA keep
# peft's modules.


def fuse_adapters(model: nn.Module) -> None:
    """Make the adapted modules of `model` use the operator `adapted`; names and weights stay.

    Call this only if `has_fused_adapters` in arch/layers.py is true, which the memory and time
    estimates assume.
    """
    nested = set()  # ids of what a wrapper of peft's is around
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            nested.add(id(module.base_layer))
    for module in model.modules():
        if isinstance(module, LoraLinear):
            module.forward = MethodType(_forward, module)  # type: ignore[method-assign]
        elif isinstance(module, ParamWrapper) and id(module) not in nested:
            module.forward = MethodType(_forward_experts, module)  # type: ignore[method-assign]


def _forward_experts(outer: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Apply the experts in `outer` with all their adapters.

    `outer` is one of peft's nested wrappers for each adapted matrix.
    """
    wrappers: list[Any] = []
    experts: Any = outer
    while isinstance(experts, ParamWrapper):
        wrappers.append(experts)
        experts = experts.base_layer
    if outer.disable_adapters:
        return cast(Tensor, experts(hidden, chosen, weights))
    factors = {}
    for wrapper in wrappers:
        of_peft = (wrapper.lora_A[ADAPTER].weight, wrapper.lora_B[ADAPTER].weight)
        a, b = expert_factors(*of_peft, wrapper.r[ADAPTER])
        factors[wrapper.parameter_name] = a, b * wrapper.scaling[ADAPTER]
    return adapted_experts(experts, factors, hidden, chosen, weights)


def expert_factors(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return A [E, r, inputs] and B [E, outputs, r] of all experts, from `a` and `b`.

    `a` is [E r, inputs], `b` [outputs, r E]. peft orders the rows of `a` by expert and then by
    rank, and the columns of `b` by rank and then by expert.
    """
    return a.view(-1, rank, a.shape[-1]), by_expert(b, rank)


def factors_of_experts(
    a: Tensor, b: Tensor, rank: int, experts: slice, rows: slice
) -> tuple[Tensor, Tensor]:
    """Return A and B as `expert_factors` does, but only of some `experts` and some `rows` of B."""
    own_a = a.view(-1, rank, a.shape[-1])[experts]
    own_b = b.view(len(b), rank, -1)[rows, :, experts]
    return expert_factors(own_a.flatten(0, 1), own_b.flatten(1), rank)


@torch.library.custom_op("qwen3_pipeline::by_expert", mutates_args=())
def by_expert(b: Tensor, rank: int) -> Tensor:
    """Return peft's `b` [outputs, r E] as [E, outputs, r], contiguous.

    It is an operator because the compiler would keep the order in memory, which grouped products do
    not take.
    """
    return b.view(len(b), rank, -1).permute(2, 0, 1).contiguous()


@by_expert.register_fake
def _(b: Tensor, rank: int) -> Tensor:
    return b.new_empty(b.shape[1] // rank, len(b), rank)


def _save_rank(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.rank = inputs[1]


def _by_peft(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    return gradient.permute(1, 2, 0).reshape(gradient.shape[1], -1), None


by_expert.register_autograd(_by_peft, setup_context=_save_rank)


def _forward(layer: Any, hidden: Tensor) -> Tensor:
    if layer.disable_adapters or layer.merged:
        return cast(Tensor, type(layer).forward(layer, hidden))
    base = layer.get_base_layer()
    if isinstance(base, Nf4Linear):
        return _forward_nf4(layer, base, hidden)
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else base.weight.dtype
    a = layer.lora_A[ADAPTER].weight
    b = layer.lora_B[ADAPTER].weight
    bias = None if base.bias is None else base.bias.to(dtype)
    rows = hidden.to(dtype).flatten(0, -2)
    output, _ = adapted(
        rows, base.weight.to(dtype), bias, a.to(dtype), b.to(dtype) * layer.scaling[ADAPTER]
    )
    return cast(Tensor, output.view(*hidden.shape[:-1], output.shape[-1]))


def _forward_nf4(layer: Any, base: Nf4Linear, hidden: Tensor) -> Tensor:
    dtype = dtype_of(base, hidden)
    a = layer.lora_A[ADAPTER].weight
    b = layer.lora_B[ADAPTER].weight
    bias = None if base.bias is None else base.bias.to(dtype)
    rows = hidden.to(dtype).flatten(0, -2)
    output, _ = adapted_nf4(
        rows, *base.parts, bias, a.to(dtype), b.to(dtype) * layer.scaling[ADAPTER]
    )
    return cast(Tensor, output.view(*hidden.shape[:-1], base.out_features))


@torch.library.custom_op("qwen3_pipeline::adapted", mutates_args=())
def adapted(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return hidden x weight' + bias + (hidden x a') x b', [N, outputs], and hidden x a', [N, r].

    `hidden` is [N, inputs], `weight` [outputs, inputs], `a` [r, inputs], and `b` [outputs, r],
    already scaled. `weight` and `bias` get no gradients.
    """
    return _product(hidden, weight, bias, a, b)


@adapted.register_fake
def _(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(len(hidden), len(weight)), hidden.new_empty(len(hidden), len(a))


@torch.library.custom_op("qwen3_pipeline::adapted_backward", mutates_args=())
def adapted_backward(
    gradient: Tensor, hidden: Tensor, narrow: Tensor, weight: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `hidden`, `a` and `b`."""
    return _gradients(gradient, hidden, narrow, weight, a, b)


def _product(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor]:
    narrow = hidden @ a.t()
    return _add_product(F.linear(hidden, weight, bias), narrow, b.t()), narrow


def _gradients(
    gradient: Tensor, hidden: Tensor, narrow: Tensor, weight: Tensor, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    of_narrow = gradient @ b
    of_hidden = _add_product(gradient @ weight, of_narrow, a)
    return of_hidden, of_narrow.t() @ hidden, gradient.t() @ narrow


def _add_product(total: Tensor, narrow: Tensor, wide: Tensor) -> Tensor:
    """Add narrow [N, r] x wide [r, M] to `total` in place, if possible with Triton.

    cuBLAS is slow for small r.
    """
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


# The same for a base in 4 bits (model/nf4.py), which is dequantized in the forward and again in the
# backward pass.


@torch.library.custom_op("qwen3_pipeline::adapted_nf4", mutates_args=())
def adapted_nf4(
    hidden: Tensor,
    codes: Tensor,
    absmax: Tensor,
    statistics: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return what `adapted` returns, for the weight of an `Nf4Linear` in the dtype of `hidden`."""
    return _product(hidden, dequantized(codes, absmax, statistics, hidden.dtype), bias, a, b)


@adapted_nf4.register_fake
def _(
    hidden: Tensor,
    codes: Tensor,
    absmax: Tensor,
    statistics: Tensor,
    bias: Tensor | None,
    a: Tensor,
    b: Tensor,
) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(len(hidden), len(codes)), hidden.new_empty(len(hidden), len(a))


@torch.library.custom_op("qwen3_pipeline::adapted_nf4_backward", mutates_args=())
def adapted_nf4_backward(
    gradient: Tensor,
    hidden: Tensor,
    narrow: Tensor,
    codes: Tensor,
    absmax: Tensor,
    statistics: Tensor,
    a: Tensor,
    b: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `hidden`, `a` and `b`."""
    weight = dequantized(codes, absmax, statistics, gradient.dtype)
    return _gradients(gradient, hidden, narrow, weight, a, b)


@adapted_nf4_backward.register_fake
def _(
    gradient: Tensor,
    hidden: Tensor,
    narrow: Tensor,
    codes: Tensor,
    absmax: Tensor,
    statistics: Tensor,
    a: Tensor,
    b: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(a), torch.empty_like(b)


def _save_nf4(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    hidden, codes, absmax, statistics, _, a, b = inputs
    ctx.save_for_backward(hidden, output[1], codes, absmax, statistics, a, b)


def _backward_nf4(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    of_hidden, of_a, of_b = adapted_nf4_backward(gradient.contiguous(), *ctx.saved_tensors)
    return of_hidden, None, None, None, None, of_a, of_b


adapted_nf4.register_autograd(_backward_nf4, setup_context=_save_nf4)


# Adding peft's adapters and drawing their initial values: A random, B zero, DoRA's magnitudes the
# norms of the base's rows, so that the model's output is unchanged at first. The values are bitwise
# those that peft draws on one device, however the model is sharded. Only DoRA's magnitudes stay in
# fp32: peft rounds them, which would change the model.


def lora_config(lora: Lora, linears: list[str]) -> LoraConfig:
    """Return peft's config by the settings of `lora`, for linears of those names and experts."""
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=linears,
        target_parameters=[f"mlp.{name}" for name in lora.of_experts] or None,
        use_rslora=lora.rslora,
        use_dora=lora.dora,
        task_type="CAUSAL_LM",
    )


def add_adapters(base: PreTrainedModel, lora: Lora, seed: int) -> PeftModel:
    """Return `base` frozen, with new fp32 adapters that leave its output unchanged at first.

    The values are drawn from `seed`; on the meta device `draw_adapters` has to fill them in later.
    In a model with experts, `all-linear` is the linears of attention and of the delta rule; the
    fused matrices of the experts get adapters if they are named, and routers never do. Raises
    DataError naming the targets that the model does not have.
    """
    config = lora_config(lora, _targeted_linears(base, lora))
    config._register_custom_module({Nf4Linear: LoraLinear})
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unsupported layer type")  # Nf4Linear
        torch.manual_seed(seed)
        model = get_peft_model(
            base,
            config,
            autocast_adapter_dtype=True,  # in fp32
            low_cpu_mem_usage=base.device.type == "meta",  # then nothing is drawn
        )
    if lora.dropout:
        drawing = Drawing()
        setattr(base, DRAWING, drawing)
        for number, layer in enumerate(_adapted(model)):
            layer.lora_dropout[ADAPTER] = SeededDropout(lora.dropout, number, drawing)
    if lora.dora:
        for layer in _adapted(model):
            weight = layer.get_base_layer().weight
            if not weight.is_meta:
                layer.lora_magnitude_vector[ADAPTER].weight.data = row_norms(weight)
    return model


def _targeted_linears(base: PreTrainedModel, lora: Lora) -> list[str]:
    """Return the last words of the names of the linears that get adapters.

    Raises DataError naming the targets that `base` has neither as linears nor as experts' matrices.
    """
    matrices = _matrices_of_experts(base)
    linears = _linears(base, has_experts=bool(matrices))
    targets = linears if lora.targets == "all-linear" else lora.targets
    absent = [name for name in targets if name not in linears and name not in matrices]
    if absent:
        text = (
            f"train.lora.targets: this {base.config.model_type} model has no linear for adapters "
            f"called {', '.join(absent)}; it has {', '.join(linears)}"
        )
        if matrices:
            text += f", {', '.join(matrices)}. Its routers get none"
        raise DataError(text)
    return [name for name in targets if name in linears]


def _matrices_of_experts(base: PreTrainedModel) -> list[str]:
    """Return the names of the fused matrices of a layer's experts; none without experts."""
    for name, module in base.named_modules():
        if name.endswith(".experts"):
            return [f"experts.{matrix}" for matrix, _ in module.named_parameters()]
    return []


def _linears(base: PreTrainedModel, *, has_experts: bool) -> list[str]:
    """Return the distinct last words of the names of the linears that may get adapters."""
    head = base.get_output_embeddings()  # type: ignore[no-untyped-call]
    found = []
    for name, module in base.named_modules():
        if not isinstance(module, nn.Linear | Nf4Linear) or module is head:
            continue
        is_of_experts = has_experts and ".mlp." in name
        if not is_of_experts and not name.endswith(OF_HEADS):
            found.append(name.rpartition(".")[2])
    return list(dict.fromkeys(found))


def draw_adapters(
    model: nn.Module,
    seed: int,
    put: Callable[[Tensor, Tensor], None],
    whole: Callable[[Tensor], Tensor],
) -> None:
    """Fill new adapters as peft does on one device; every rank draws all values, layer by layer.

    `put(parameter, values)` stores this rank's shard of the whole `values`. `whole(parameter)`
    returns the whole parameter and is a collective.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for layer in _adapted(model):
            of_experts = isinstance(layer, ParamWrapper)
            base = layer.get_base_layer()
            rank = layer.r[ADAPTER] * (layer.num_experts if of_experts else 1)
            drawn = nn.Linear(layer.in_features, rank, bias=False).weight
            # peft also draws B before setting it to zero,
            nn.Linear(rank, layer.out_features, bias=False)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))  # and then draws A again
            # peft rounds to the base's dtype, although adapters are kept in fp32, unless that is of
            # integers
            if of_experts:
                weight = layer.get_param()
            elif isinstance(base, Nf4Linear):
                weight = drawn
            else:
                weight = base.weight
            put(layer.lora_A[ADAPTER].weight, drawn.to(weight.dtype))
            put(layer.lora_B[ADAPTER].weight, torch.zeros(layer.out_features, rank))
            if layer.lora_magnitude_vector:
                put(layer.lora_magnitude_vector[ADAPTER].weight, row_norms(whole(weight)))


def row_norms(matrix: Tensor) -> Tensor:
    """Return the L2 norm of each row of `matrix` [rows, columns]: [rows], in fp32."""
    return cast(Tensor, torch.linalg.vector_norm(matrix.detach().float(), dim=1))


def _adapted(model: nn.Module) -> list[Any]:
    """Return the adapted modules in peft's order: linears, then experts from the inside out."""
    linears: list[Any] = []
    of_experts: dict[int, list[Any]] = {}
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            of_experts.setdefault(id(module.get_base_layer()), []).insert(0, module)
        elif isinstance(module, LoraLayer):
            linears.append(module)
    return [*linears, *chain.from_iterable(of_experts.values())]


def adapted_matrices(model: nn.Module) -> dict[int, str]:
    """Return the names of peft's expert wrappers by the id of the fused matrix each adapts."""
    names = {}
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            names[id(module.get_param())] = name  # type: ignore[no-untyped-call]
    return names
