"""The loss on the held-out blocks while training, and what its course says: which step was best, and when to stop.

It changes nothing of the training: no gradients, no dropout, no random number drawn.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from pipeline_lib.data.shard import order
from pipeline_lib.data.shard.blocks import BlockReader
from pipeline_lib.train.batch import block_losses, read_batch
from pipeline_lib.train.dist import World, sum_over_ranks
from pipeline_lib.train.parallel import Strategy


@contextmanager
def evaluating(wrapped: nn.Module, strategy: Strategy) -> Iterator[None]:
    """Surrounds forward passes that do not train."""
    was_training = wrapped.training
    wrapped.eval()
    try:
        with torch.no_grad(), strategy.autocast():
            yield
    finally:
        wrapped.train(was_training)


def held_out_loss(
    wrapped: nn.Module, strategy: Strategy, reader: BlockReader, micro_batch_blocks: int, world: World
) -> float:
    """Nats per supervised token of all blocks of `reader`, shared over the ranks; the same on each.

    Every rank makes as many forward passes, since those are exchanges too: what is missing is padding.
    """
    ids = np.arange(len(reader), dtype=np.int64)
    mine = order.rank_blocks(ids, reader.costs[ids], world.rank, world.size, micro_batch_blocks)
    nats, tokens = 0.0, 0
    with evaluating(wrapped, strategy):
        for micro in mine:
            batch = read_batch(reader, micro)
            nats += float(block_losses(wrapped, batch.to(world.device)).sum(dtype=torch.float64))
            tokens += batch.supervised_tokens
    all_nats, all_tokens = sum_over_ranks([nats, float(tokens)], world.device)
    return all_nats / max(1.0, all_tokens)


@dataclass
class Validations:
    """The course of the held-out loss. Checkpoints hold it as `to_json` gives it."""

    last_step: int = 0
    best_step: int = 0
    best_loss: float = math.inf
    without_gain: int = 0  # validations since the best

    @staticmethod
    def of(rows: Iterable[Mapping[str, Any]]) -> "Validations":
        """The course after the steps that `rows` tell of."""
        course = Validations()
        for row in rows:
            course.add(row)
        return course

    @staticmethod
    def from_json(known: Mapping[str, Any]) -> "Validations":
        """The course that gave `known`."""
        return Validations(**{**known, "best_loss": math.inf if known["best_loss"] is None else known["best_loss"]})

    def to_json(self) -> dict[str, Any]:
        """All of it; a best loss that there is not yet is None."""
        return {**asdict(self), "best_loss": self.best_loss if self.best_step else None}

    def add(self, row: Mapping[str, Any]) -> None:
        """Take in the row of the next step; one that is not finite is no gain."""
        if "validation_loss" not in row:
            return
        loss = row["validation_loss"]
        self.last_step, self.without_gain = row["step"], self.without_gain + 1
        if loss is not None and loss < self.best_loss:
            self.best_step, self.best_loss, self.without_gain = row["step"], loss, 0

    def should_stop(self, patience: int | None) -> bool:
        """Whether `patience` validations in a row brought no gain."""
        return patience is not None and self.without_gain >= patience
