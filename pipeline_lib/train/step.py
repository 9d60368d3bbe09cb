"""One optimizer step of one rank, and the time of its phases."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline_lib.launch.ranks import StopRequest
from pipeline_lib.model.batch import Batch, loss_sums
from pipeline_lib.train.dist import World, placed, sum_over_ranks
from pipeline_lib.train.guards import Judgement, Verdict
from pipeline_lib.train.strategy import Strategy

PHASES = ("forward", "backward", "update")


class PhaseClock:
    """A clock that adds up seconds by phase.

    On a GPU it uses events in the stream, so that nothing waits for it.
    """

    def __init__(self, device: torch.device) -> None:
        """Start empty."""
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any, Any]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the enclosed work as part of the phase `name`."""
        start = self._mark()
        yield
        self._marks.append((name, start, self._mark()))

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, keyed `forward_s` and so on.

        Work that a GPU has not finished yet counts in a later call.
        """
        totals = {f"{name}_s": 0.0 for name in PHASES}
        queued = []
        for name, start, end in self._marks:
            if self._is_gpu and not end.query():
                queued.append((name, start, end))
            else:
                totals[f"{name}_s"] += (
                    start.elapsed_time(end) / 1000 if self._is_gpu else end - start
                )
        self._marks = queued
        return {name: round(seconds, 6) for name, seconds in totals.items()}

    def drop(self) -> None:
        """Discard all measurements, after a GPU has finished the work."""
        if self._is_gpu:
            torch.cuda.synchronize(self._device)
        self._marks = []

    def _mark(self) -> Any:
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


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
    save_due: bool
    readings: tuple[float, ...] = ()  # of all ranks, rank by rank, in steps that exchange them


class Stepper:
    """A runner of optimizer steps on a wrapped model.

    The loss is the mean over the tokens of the whole global batch, however that is split.
    """

    def __init__(
        self, wrapped: nn.Module, strategy: Strategy, world: World, stop: StopRequest
    ) -> None:
        """Start with an empty clock."""
        self.wrapped, self.strategy, self.world, self.stop = wrapped, strategy, world, stop
        self.clock = PhaseClock(world.device)

    def accumulate(self, batches: list[Batch], count: Callable[[], tuple[float, float]]) -> Tensor:
        """Accumulate gradients of mean token and router losses; return this rank's token losses.

        The losses are summed, and detached from the graph. `count` returns the step's supervised
        tokens and all its tokens. It is called once, when the first forward pass is queued, so that
        the exchange between hosts costs a GPU no time. Ranks average their gradients, so each
        scales its losses by the number of ranks.
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
        self,
        batches: list[Batch],
        lr: float,
        judge: Callable[[float, float, int], Judgement],
        save_failed: bool,
        save_due: bool = False,
        readings: Sequence[float] = (),
    ) -> StepResult:
        """Run one step on this rank's micro-batches; update if `judge` accepts it.

        `judge` is given loss and gradient norm. A refused step changes no bit of weights and
        moments. `save_failed` or `save_due` on one rank is reported on all, and so are the
        `readings` of each: they are exchanged with the counts of the step. The host waits for the
        GPU once, for the values to judge: the update runs while the next step is prepared, and its
        time counts with that one.
        """
        start_s = time.monotonic()
        totals: list[float] = []  # over all ranks

        def count() -> tuple[float, float]:
            mine = [
                float(sum(batch.supervised_tokens for batch in batches)),
                float(sum(batch.real_tokens for batch in batches)),
                float(sum(batch.squared_lengths for batch in batches)),
                float(self.stop.is_set),
                float(save_failed),
                float(save_due),
                *placed(readings, self.world),
            ]
            totals.extend(sum_over_ranks(mine, torch.device("cpu")))  # over gloo, without the GPU
            return max(1.0, totals[0]), max(1.0, totals[1])

        local_sum = self.accumulate(batches, count)
        supervised, tokens, squares, stops, failures, dues, *of_ranks = totals
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
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            judgement=judgement,
            supervised_tokens=int(supervised),
            tokens=int(tokens),
            squared_lengths=int(squares),
            duration_s=duration_s,
            phases=phases,
            stop_agreed=stops > 0,
            save_failed=failures > 0,
            save_due=dues > 0,
            readings=tuple(of_ranks),
        )

    def warm_up(self, batch: Batch) -> None:
        """Run a forward and backward pass and discard it, before the first step of every attempt.

        It compiles, and reveals most out-of-memories early. It gives DDP's buckets their final
        order: without it, a resumed run of three ranks or more would differ from an uninterrupted
        one in the last bits.
        """
        self.accumulate([batch], lambda: (1.0, 1.0))
        self.strategy.discard()
        self.clock.drop()
