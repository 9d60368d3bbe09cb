"""Where a run is. Weights and moments are the strategy's; the data order needs no state."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

WEIGHTS = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")
LOSS_SCALE = "loss_scale"  # of fp16, the same on all ranks: what a strategy keeps for itself, yet any other can use
STATE_KINDS = (WEIGHTS, *MOMENTS)  # a tensor of size in a checkpoint is called `KIND.NAME`


def own_part(tensor: Tensor) -> Tensor:
    """What this rank has of `tensor`, sharing its memory: all of one that is whole, its shard of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class TrainState:
    """After the global batches up to `step`, of which `updates` changed the weights."""

    step: int = 0
    updates: int = 0
