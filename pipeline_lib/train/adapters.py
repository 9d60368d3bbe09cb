"""Low-rank adapters: peft's own modules beside frozen linears, and their first values.

A is random, B zero, and DoRA's magnitudes are the norms of the base's rows: at first nothing changes. Promise: the
values are bitwise those that peft draws on one device, however the model is spread; only DoRA's magnitudes are kept in
fp32 where peft rounds them to the base's precision, which would change the model before the first step.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from pipeline_lib.base.errors import DataError
from pipeline_lib.config.schema import Lora
from pipeline_lib.train.adapted import ADAPTER

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
