"""The case: what needs are computed for, and what the choice is made of."""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.arch.layers import micro_batch_tokens
from pipeline_lib.config.train import Train
from pipeline_lib.plan.machine import Machine, Ranks
from pipeline_lib.plan.memory import MemoryOfWays
from pipeline_lib.plan.ways import Column, Ways
from pipeline_lib.records.plan import Workload


@dataclass(frozen=True)
class Case:
    """A training that is planned: a model, a machine, data, and `batch_blocks` blocks a step.

    `train` is one way to train, or leaves keys open that the plan chooses: with a named strategy
    those that are `auto`, with `strategy: auto` all but `fixed`. `steps` and `epoch_steps`, those of
    the run and of an epoch, are None while unknown.
    """

    geometry: Geometry
    train: Train
    machine: Machine
    workload: Workload
    batch_blocks: int
    steps: int | None = None
    epoch_steps: int | None = None
    fixed: Collection[str] = ()
    has_deepspeed: bool = True

    def by(self, train: Train) -> "Case":
        """Return the case with other settings."""
        return replace(self, train=train)

    def accumulation_of(self, ways: Ways) -> Column:
        """Return the micro-batches of a rank in a step, by each way."""
        ranks = self.machine.ranks
        groups = ways.each(lambda train: ranks // train.ranks_per_block, "context_ranks")
        return np.ceil(self.batch_blocks / (groups * ways.micro_batch_blocks))

    def memory_of(self, ways: Ways) -> MemoryOfWays:
        """Return the memory of a rank by each way."""
        accumulation = self.accumulation_of(ways)
        block_tokens = self.workload.block_tokens
        return MemoryOfWays(self.geometry, ways, self.ranks, block_tokens, accumulation)

    @property
    def ranks(self) -> Ranks:
        """The ranks of the machine."""
        return Ranks.of(self.machine)

    @property
    def accumulation(self) -> int:
        """The micro-batches of a rank in a step."""
        return self.train.accumulation(self.batch_blocks, self.machine.ranks)

    @property
    def micro_batch_tokens(self) -> int:
        """The tokens of a micro-batch on a rank, padding included."""
        return micro_batch_tokens(self.train, self.workload.block_tokens)
