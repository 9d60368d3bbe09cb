"""Where a run is. Weights and moments are the strategy's; the data order needs no state."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline_lib.train.guards import UNDONE

WEIGHTS = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")
LOSS_SCALE = "loss_scale"  # of fp16, the same on all ranks: what a strategy keeps for itself, yet any other can use
STATE_KINDS = (WEIGHTS, *MOMENTS)  # a tensor of size in a checkpoint is called `KIND.NAME`


def own_part(tensor: Tensor) -> Tensor:
    """What this rank has of `tensor`, sharing its memory: all of one that is whole, its shard of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass
class TrainState:
    """After the global batches up to `step`, of which `updates` changed the weights; a metrics row for each step.

    What the guards and the validation know of the past is in the rows, so nothing else has to be kept of them.
    """

    step: int = 0
    updates: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def undo_after(self, step: int, updates: int) -> None:
        """Take back what was learned after `step`: the batches stay used, and their rows say that it was undone."""
        self.updates = updates
        self.rows = [
            {**row, "verdict": UNDONE} if row["step"] > step and "verdict" not in row else row for row in self.rows
        ]
