"""Where a run is, and what a step came to. Weights and moments are the strategy's; the data order needs no state."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline_lib.train.guards import Judgement

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


@dataclass(frozen=True)
class StepResult:
    """The same on every rank. `loss` is in nats per supervised token of the global batch."""

    loss: float
    grad_norm: float
    judgement: Judgement
    supervised_tokens: int
    tokens: int
    squared_lengths: int  # of the documents, added up
    duration_s: float
    phases: dict[str, float]  # seconds, by `forward_s`, `backward_s`, `update_s`; of this rank
    stop_agreed: bool
    save_failed: bool
