"""One optimizer step: the loss of the whole global batch, token by token, however it is spread."""

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeline_lib.base.errors import TrainingError
from pipeline_lib.train.batch import Batch, loss_sum
from pipeline_lib.train.dist import StopRequest, World, sum_over_ranks
from pipeline_lib.train.parallel import Strategy


@dataclass(frozen=True)
class StepResult:
    """The same on every rank. `loss` is in nats per supervised token of the global batch."""

    loss: float
    grad_norm: float
    supervised_tokens: int
    tokens: int
    duration_s: float
    stop_agreed: bool


@dataclass(frozen=True)
class Stepper:
    """Runs optimizer steps of a wrapped model."""

    wrapped: nn.Module
    strategy: Strategy
    world: World
    stop: StopRequest

    def accumulate(self, batches: list[Batch], supervised_tokens: float) -> Tensor:
        """Gradients of (sum of token losses) / `supervised_tokens`; returns this rank's sum, detached.

        Ranks average their gradients, so each scales its loss by the number of ranks.
        """
        total = torch.zeros((), device=self.world.device)
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            with self.strategy.accumulating(is_last):
                with self.strategy.autocast():
                    loss = loss_sum(self.wrapped, batch.to(self.world.device))
                self.strategy.backward(loss * (self.world.size / supervised_tokens))
            total += loss.detach()
        return total

    def step(self, batches: list[Batch], lr: float) -> StepResult:
        """One update from this rank's micro-batches. Raises TrainingError, before the update, if it is not finite."""
        start_s = time.monotonic()
        supervised, tokens, stops = sum_over_ranks(
            [
                sum(batch.supervised_tokens for batch in batches),
                sum(batch.real_tokens for batch in batches),
                float(self.stop.is_set),
            ],
            self.world.device,
        )
        local_sum = self.accumulate(batches, max(1.0, supervised))
        grad_norm = self.strategy.grad_norm()
        loss = sum_over_ranks([float(local_sum)], self.world.device)[0] / max(1.0, supervised)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise TrainingError(f"loss {loss} and gradient norm {grad_norm} are not finite; nothing was updated")
        self.strategy.update(lr)
        duration_s = time.monotonic() - start_s
        return StepResult(loss, grad_norm, int(supervised), int(tokens), duration_s, stops > 0)

    def warm_up(self, batches: list[Batch]) -> None:
        """A forward and backward that is thrown away, before the first step of every attempt.

        It meets an out-of-memory early, and makes DDP lay its buckets as they will stay: without it a resumed
        run of three ranks or more differs from an uninterrupted one in the last bits.
        """
        self.accumulate(batches, 1.0)
        self.strategy.discard()
