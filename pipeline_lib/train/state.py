"""Names of what a checkpoint holds."""

from torch import Tensor
from torch.distributed.tensor import DTensor

WEIGHTS = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")
LOSS_SCALE = "loss_scale"  # of fp16, the same on all ranks: own state of a strategy that any other can use
STATE_KINDS = (WEIGHTS, *MOMENTS)  # the large tensors of a checkpoint are named `KIND.NAME`


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, sharing its memory: all of a plain tensor, the local shard of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
