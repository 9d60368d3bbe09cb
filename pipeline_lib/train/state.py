"""Names of what a checkpoint holds, and the result of a step."""

from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline_lib.train.guards import Judgement

WEIGHTS = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")
LOSS_SCALE = "loss_scale"  # of fp16, the same on all ranks: own state of a strategy that any other can use
STATE_KINDS = (WEIGHTS, *MOMENTS)  # the large tensors of a checkpoint are named `KIND.NAME`


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of `tensor`, sharing its memory: all of a plain tensor, the local shard of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class StepResult:
    """The result of a step; all but its times is equal on every rank.

    `loss` is in nats per supervised token of the global batch.
    """

    loss: float
    grad_norm: float
    judgement: Judgement
    supervised_tokens: int
    tokens: int
    squared_lengths: int  # sum over the documents
    duration_s: float
    phases: dict[str, float]  # seconds, by `forward_s`, `backward_s`, `update_s`; of this rank
    stop_agreed: bool
    save_failed: bool
    readings: tuple[float, ...] = ()  # of all ranks, rank by rank, in steps that exchange them
