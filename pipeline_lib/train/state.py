"""Names of what a checkpoint holds."""

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline_lib.core.run_folder import WEIGHTS

MOMENTS = ("exp_avg", "exp_avg_sq")
LOSS_SCALE = "loss_scale"  # of fp16, the same on all ranks: own state of a strategy that any other can use
STATE_KINDS = (WEIGHTS, *MOMENTS)  # the large tensors of a checkpoint are named `KIND.NAME`

Value = TypeVar("Value")


def of_kind(tensors: Mapping[str, Value], kind: str) -> dict[str, Value]:
    """Return those of `tensors`, or of their sizes, that are of `kind`, by the names of their parameters."""
    return {name.removeprefix(f"{kind}."): value for name, value in tensors.items() if name.startswith(f"{kind}.")}


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, sharing its memory: all of a plain tensor, the local shard of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
