"""Where a run is. Weights and moments are the strategy's; the data order needs no state."""

from dataclasses import dataclass, field
from typing import Any

WEIGHTS = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")
STATE_KINDS = (WEIGHTS, *MOMENTS)  # a tensor of size in a checkpoint is called `KIND.NAME`


@dataclass
class TrainState:
    """After the global batches up to `step`, of which `updates` changed the weights; a metrics row for each step."""

    step: int = 0
    updates: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
