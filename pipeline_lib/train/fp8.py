"""Products of the decoder layers in 8-bit floating point (torchao), by themselves about twice as fast as in bf16.

Inputs, weights and gradients are each scaled by their largest value as a whole (torchao's recipe `tensorwise`). Norms,
attention, the head and the masters in fp32 are as under bf16. Only passes with gradients compute so: validations,
answers and the probe see the model as it will be exported, in bf16.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pipeline_lib.base.errors import ConfigError
from pipeline_lib.config.cross_check import FP8_TILE

RECIPE = "tensorwise"
_ADA = (8, 9)  # the first compute capability with products in fp8


def use_fp8(layer: nn.Module) -> None:
    """Let the linear modules of `layer` multiply in 8 bits; names and weights stay.

    Routers of experts are left alone, and what the kernels' tiles do not fit. Raises ConfigError where torchao is not
    installed, or for a GPU that has no such products.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.float8_linear import Float8Linear
    except ImportError as error:
        raise ConfigError("train.precision", ["fp8 needs torchao: pip install 'qwen3-pipeline[fp8]'"]) from error
    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _ADA:
        raise ConfigError("train.precision", [f"{torch.cuda.get_device_name()} has no products in fp8; it may be bf16"])
    convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name(RECIPE), module_filter_fn=_is_meant)
    for module in layer.modules():
        if isinstance(module, Float8Linear):
            module.forward = MethodType(_forward, module)


def _is_meant(module: nn.Module, name: str) -> bool:
    sizes = getattr(module, "weight", torch.empty(0)).shape
    return not name.endswith("mlp.gate") and all(size % FP8_TILE == 0 for size in sizes)


def _forward(linear: Any, hidden: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return F.linear(hidden, linear.weight, linear.bias)
    found: Tensor = type(linear).forward(linear, hidden)
    return found
