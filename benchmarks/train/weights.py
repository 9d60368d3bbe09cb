"""Equal random weights for every side, however spread: each tensor is drawn from its name."""

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_lib.model.weights import base_parameters, whole_shape

STD = 0.02  # as large as real ones: zeros would be multiplied faster


def fill(model: nn.Module, device: torch.device, put: Callable[[Tensor, Tensor], None]) -> None:
    """Let each weight of the base model be random, and norms 1.

    `put(parameter, values)` keeps this rank's part.
    """
    with torch.no_grad():
        for parameter, names in base_parameters(model):
            shape = tuple(getattr(parameter, "ds_shape", whole_shape(parameter)))
            put(parameter, _values(names[0], shape, device))
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _values(name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device).mul_(STD)


def put_whole_or_zero_3(parameter: Tensor, values: Tensor) -> None:
    """Fill a parameter of plain torch, or the part that DeepSpeed's stage 3 has left of it."""
    held: Any = getattr(parameter, "ds_tensor", None)
    if held is None:
        parameter.copy_(values)
        return
    rank = torch.distributed.get_rank()
    mine = values.flatten()[rank * held.numel() : (rank + 1) * held.numel()]
    held.flatten()[: len(mine)].copy_(mine)
