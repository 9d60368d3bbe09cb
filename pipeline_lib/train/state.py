"""The state of a training: the names of its tensors, this rank's part, whether that is finite."""

import math
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline_lib.config.optimizers import OPTIMIZERS
from pipeline_lib.config.train import Train
from pipeline_lib.core.run_folder import WEIGHTS

# of fp16, the same on all ranks: own state of a strategy that any other can use
LOSS_SCALE = "loss_scale"

Value = TypeVar("Value")


def state_kinds(train: Train) -> tuple[str, ...]:
    """Return the kinds of tensors in a checkpoint, where each is named `KIND.NAME`.

    A parameter has its weight, and those moments that the optimizer's rule for it names.
    """
    return (WEIGHTS, *OPTIMIZERS[train.optimizer].moments)


def of_kind(tensors: Mapping[str, Value], kind: str) -> dict[str, Value]:
    """Return those of `tensors`, or of their sizes, that are of `kind`, by parameter name."""
    return {
        name.removeprefix(f"{kind}."): value
        for name, value in tensors.items()
        if name.startswith(f"{kind}.")
    }


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, sharing its memory.

    That is all of a plain tensor, and the local shard of a DTensor.
    """
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of `tensors` with NaN or infinity in this rank's part, without a copy."""
    return [name for name, tensor in tensors.items() if not is_finite(own_part(tensor))]


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values of `tensor` are finite, without another tensor of its size."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    low, high = tensor.aminmax()  # both are NaN if any value is
    return math.isfinite(low) and math.isfinite(high)
