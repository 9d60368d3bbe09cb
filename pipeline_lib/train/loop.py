"""The training loop of one rank, from the newest checkpoint to the last step."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pipeline_lib.base.errors import Interrupted
from pipeline_lib.base.events import EventLog
from pipeline_lib.base.fsio import read_jsonl
from pipeline_lib.base.stage import peak_rss_bytes
from pipeline_lib.config.schema import Train
from pipeline_lib.data.shard import order
from pipeline_lib.data.shard.blocks import BlockReader
from pipeline_lib.train import checkpoint
from pipeline_lib.train.batch import Batch, read_batch
from pipeline_lib.train.dist import World
from pipeline_lib.train.schedule import learning_rate
from pipeline_lib.train.state import TrainState
from pipeline_lib.train.step import Stepper, StepResult


@dataclass(frozen=True)
class Batches:
    """This rank's share of every step: arithmetic on (seed, step), so that resuming needs one integer."""

    reader: BlockReader
    seed: int
    batch_blocks: int
    micro_batch_blocks: int
    world: World

    def of_step(self, step: int) -> list[Batch]:
        """The micro-batches of global step `step`, from 0."""
        ids = order.step_blocks(self.seed, step, self.reader.index.groups, self.batch_blocks)
        costs = self.reader.costs[ids]
        mine = order.rank_blocks(ids, costs, self.world.rank, self.world.size, self.micro_batch_blocks)
        return [read_batch(self.reader, micro) for micro in mine]

    def total_steps(self, epochs: int) -> int:
        """Optimizer steps of that many passes over the blocks, each used as often as its weight says."""
        return order.total_steps(self.reader.index.groups, self.batch_blocks, epochs)

    def epoch_of(self, step: int) -> int:
        """The pass that global step `step` belongs to, both from 0."""
        return order.epoch_of(step, self.reader.index.groups, self.batch_blocks)


@dataclass
class Loop:
    """Everything one rank needs to train. `last_step` is where to stop, `total_steps` what the schedule spans."""

    train: Train
    state: TrainState
    stepper: Stepper
    batches: Batches
    checkpoints: Path
    events: EventLog
    total_steps: int
    last_step: int
    attempt: int

    def run(self, resume_from: Path | None) -> None:
        """Train up to `last_step`, saving on the way. Raises Interrupted after a save if asked to stop."""
        self.stepper.warm_up(self.batches.of_step(self.state.step))
        if resume_from is not None:
            self.restore(resume_from)
        start_s = time.monotonic()
        for step in range(self.state.step, self.last_step):
            batches = self.batches.of_step(step)
            self.events.notify("step.begin", step=step + 1)
            result = self.stepper.step(batches, learning_rate(self.train, step + 1, self.total_steps))
            self.state.step, self.state.updates = step + 1, self.state.updates + 1
            self.record(step + 1, result, time.monotonic() - start_s)
            is_due = (step + 1) % self.train.save_every_steps == 0 or step + 1 == self.last_step
            if is_due or result.stop_agreed:
                self.save()
            if result.stop_agreed and step + 1 < self.last_step:
                raise Interrupted(f"stopped by a signal after step {step + 1}, which is saved; run again to continue")

    def restore(self, found: Path) -> None:
        """Continue from the verified checkpoint `found`."""
        scalars = checkpoint.read_state(found)
        self.state.step, self.state.updates = int(scalars["step"]), int(scalars["updates"])
        self.state.rows = read_jsonl(found / checkpoint.METRICS_NAME)
        self.stepper.strategy.restore(partial(checkpoint.load_tensors, found / checkpoint.TENSORS), self.state.updates)
        checkpoint.restore_random_state(found, self.stepper.world)
        self.events.emit("run.resumed", step=self.state.step, checkpoint=found.name)

    def save(self) -> None:
        """Publish a checkpoint of the state and drop the oldest."""
        world, start_s = self.stepper.world, time.monotonic()
        scalars = {"attempt": self.attempt, "strategy": self.train.strategy, "updates": self.state.updates}
        checkpoint.save_checkpoint(
            self.checkpoints, world, self.state.step, self.stepper.strategy.snapshot(), scalars, self.state.rows
        )
        if world.is_first:
            checkpoint.retain(self.checkpoints, self.train.keep_last, self.state.step)
        self.events.emit("checkpoint.saved", step=self.state.step, duration_s=round(time.monotonic() - start_s, 3))

    def record(self, step: int, result: StepResult, elapsed_s: float) -> None:
        """Add the step's row to the metrics and tell the observers."""
        row: dict[str, Any] = {
            "step": step,
            "epoch": self.batches.epoch_of(step - 1),
            "loss": result.loss,
            "lr": learning_rate(self.train, step, self.total_steps),
            "grad_norm": result.grad_norm,
            "tokens": result.tokens,
            "supervised_tokens": result.supervised_tokens,
            "step_s": round(result.duration_s, 6),
            "tokens_per_s": round(result.tokens / result.duration_s, 1),
            "elapsed_s": round(elapsed_s, 3),
            "peak_memory_bytes": peak_memory_bytes(self.stepper.world),
            "attempt": self.attempt,
        }
        self.state.rows.append(row)
        self.events.notify("step.end", **row)


def peak_memory_bytes(world: World) -> int:
    """The most memory this rank has held: on the GPU where it has one, else in the process."""
    if world.device.type == "cuda":
        return torch.cuda.max_memory_allocated(world.device)
    return peak_rss_bytes()
