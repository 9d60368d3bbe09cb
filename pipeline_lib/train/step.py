"""One optimizer step: the loss of the whole global batch, token by token, however it is spread."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline_lib.train.batch import Batch, loss_sums
from pipeline_lib.train.dist import World, sum_over_ranks
from pipeline_lib.train.guards import Judgement, Verdict
from pipeline_lib.train.parallel import Strategy
from pipeline_lib.train.phases import PhaseClock
from pipeline_lib.train.stop import StopRequest


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


@dataclass
class Stepper:
    """Runs optimizer steps of a wrapped model."""

    wrapped: nn.Module
    strategy: Strategy
    world: World
    stop: StopRequest
    clock: PhaseClock = field(init=False)

    def __post_init__(self) -> None:
        """Begin with no phases."""
        self.clock = PhaseClock(self.world.device)

    def accumulate(self, batches: list[Batch], count: Callable[[], tuple[float, float]]) -> Tensor:
        """Gradients of the mean token loss, and of the mean router loss; returns this rank's token losses, detached.

        `count` gives the supervised and all tokens of the step. It is called once, when the first forward pass is
        queued: what the hosts exchange for it costs a GPU no time.
        Ranks average their gradients, so each scales its losses by the number of ranks.
        """
        total = torch.zeros((), device=self.world.device)
        supervised_tokens, tokens = 0.0, 0.0
        for index, batch in enumerate(batches):
            is_last = index == len(batches) - 1
            with self.strategy.accumulating(is_last):
                with self.clock.phase("forward"), self.strategy.autocast():
                    of_tokens, of_routers = loss_sums(self.wrapped, batch.to(self.world.device))
                if index == 0:
                    supervised_tokens, tokens = count()
                mean = of_tokens / supervised_tokens + of_routers / tokens
                with self.clock.phase("backward"):
                    self.strategy.backward(mean * self.world.size)
            total += of_tokens.detach()
        return total

    def step(
        self, batches: list[Batch], lr: float, judge: Callable[[float, float, int], Judgement], save_failed: bool
    ) -> StepResult:
        """One update from this rank's micro-batches, if `judge`, given loss and gradient norm, lets it be made.

        If not, weights and moments keep every bit. `save_failed` on one rank is so on all. The host waits for the GPU
        once, for what is judged: the update runs while the next step is prepared, and its time counts with that one.
        """
        start_s = time.monotonic()
        totals: list[float] = []

        def count() -> tuple[float, float]:
            totals.extend(self._totals(batches, save_failed))
            return max(1.0, totals[0]), max(1.0, totals[1])

        local_sum = self.accumulate(batches, count)
        supervised, tokens, squares, stops, failures = totals
        with self.clock.phase("update"):
            loss_sum = local_sum.double()
            dist.all_reduce(loss_sum)
            measured = torch.stack([loss_sum, self.strategy.grad_norm()])
        total_loss, grad_norm = measured.tolist()  # waits for the GPU
        loss = total_loss / max(1.0, supervised)
        judgement = judge(loss, grad_norm, int(supervised))
        with self.clock.phase("update"):
            if judgement.verdict == Verdict.APPLY:
                self.strategy.update(lr, grad_norm)
            else:
                self.strategy.discard(grad_norm)
        phases = self.clock.take()
        duration_s = time.monotonic() - start_s
        counts = (int(supervised), int(tokens), int(squares))
        return StepResult(loss, grad_norm, judgement, *counts, duration_s, phases, stops > 0, failures > 0)

    def _totals(self, batches: list[Batch], save_failed: bool) -> list[float]:
        """Over all ranks: supervised tokens, tokens, squared lengths, requests to stop, failed saves."""
        mine = [
            float(sum(batch.supervised_tokens for batch in batches)),
            float(sum(batch.real_tokens for batch in batches)),
            float(sum(batch.squared_lengths for batch in batches)),
            float(self.stop.is_set),
            float(save_failed),
        ]
        return sum_over_ranks(mine, torch.device("cpu"))  # by gloo: the GPU is not asked

    def warm_up(self, batch: Batch) -> None:
        """Two passes that are thrown away, before the first step of every attempt.

        They meet an out-of-memory early. The first makes DDP lay its buckets as they will stay: without it a resumed
        run of three ranks or more differs from an uninterrupted one in the last bits. The second fills them.
        """
        for _ in range(2):
            self.accumulate([batch], lambda: (1.0, 1.0))
            self.strategy.discard()
        self.clock.drop()
