"""Remedies: the cheapest changes of `train` that make a run fit, each with its predicted memory.

Changes of placement come first, ordered by their expected cost in time. Changes of the training
itself come after them: another optimizer, or adapters instead of all weights. No remedy is offered
that a later check refuses, that needs DeepSpeed where it is not installed, or that is not predicted
to fit with the margin that the plan keeps.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.arch.layers import (
    can_keep_attention,
    eager_under_deepspeed,
    keeps_on_host,
    recompute_of,
)
from pipeline_lib.config.optimizers import OPTIMIZERS
from pipeline_lib.config.strategies import STRATEGIES
from pipeline_lib.config.train import AUTO, Train, in_file
from pipeline_lib.core.units import gib
from pipeline_lib.plan.legal import is_legal
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.memory import MARGIN, MemoryOfWays, predict
from pipeline_lib.plan.ways import Ways
from pipeline_lib.records.plan import Memory

AT_MOST = 3
# Expected cost as a fraction of the step time; only the order matters. Measured on 8 H200: halving
# the micro-batch costs 7.5 %, resharding 1.5 %. Full recomputation costs a third of the FLOPs, 20 %
# of the time in practice.
_COSTS: dict[str, dict[Any, float]] = {
    "strategy": {name: row.cost for name, row in STRATEGIES.items()},
    "recompute": {"none": 0.0, "selective": 0.09, "full": 0.22},
    "reshard": {False: 0.0, True: 0.015},
    "offload_activations": {False: 0.0, True: 0.03},
    "kept_attention_layers": {0: 0.1},
    "offload": {"none": 0.0, "optimizer": 1.0, "optimizer+params": 2.0},
}
_HALVING_COST = 0.06
_OTHER_TRAINING = {"optimizer": 10.0, "method": 20.0}
# 8-bit states need less memory, but only 32-bit states can be offloaded: either may be the one that
# fits.
STAND_INS = tuple(name for name, row in OPTIMIZERS.items() if row.is_stand_in)
_LEAST_SAVING = 0.97  # of the present memory: a change that leaves more than this is no remedy


@dataclass(frozen=True)
class Load:
    """What ranks train: a step has `batch_blocks` blocks of `block_tokens` tokens in all."""

    geometry: Geometry
    train: Train
    ranks: Ranks
    block_tokens: int
    batch_blocks: int

    @property
    def memory(self) -> Memory:
        """The predicted memory of one rank."""
        accumulation = self.train.accumulation(self.batch_blocks, self.ranks.total)
        return predict(self.geometry, self.train, self.ranks, self.block_tokens, accumulation)


@dataclass(frozen=True)
class Remedy:
    """New values of keys of `train`, the memory predicted with them, and their expected cost.

    `needed_bytes` is the predicted total, scaled up where earlier predictions were too low. `cost`
    is a fraction of the step time. `is_least` if the plan still chooses other keys, and may choose
    what needs more memory.
    """

    changes: dict[str, Any]
    memory: Memory
    needed_bytes: int
    cost: float
    is_least: bool = False

    @property
    def is_other_training(self) -> bool:
        """Whether it changes what is trained, not only how."""
        return not _OTHER_TRAINING.keys().isdisjoint(self.changes)

    def __str__(self) -> str:
        """Return the remedy as one line for a message."""
        as_written = {
            key: str(value).lower() if isinstance(value, bool) else value
            for key, value in self.changes.items()
        }
        keys = ", ".join(f"{in_file(key)}: {value}" for key, value in as_written.items())
        notes = {
            "method": "trains adapters instead",
            "optimizer": "another optimizer, so another run",
        }
        note = "; ".join(text for key, text in notes.items() if key in self.changes)
        least = "at least " if self.is_least else ""
        return f"{keys}  ({least}{gib(self.needed_bytes)} a GPU{f'; {note}' if note else ''})"


def remedies(load: Load, device_bytes: int, ratio: float, has_deepspeed: bool) -> list[Remedy]:
    """Return up to AT_MOST remedies, the cheapest first; none of them extends another.

    Empty if nothing is enough. `ratio` is measured over predicted memory, as far as known;
    predictions are multiplied by it if it is above 1.
    """
    found: list[Remedy] = []
    for way in sorted(_leaner_ways(load, has_deepspeed), key=lambda each: each.cost):
        needed_bytes = way.total_bytes * max(1.0, ratio)
        is_enough = needed_bytes <= device_bytes * min(1 - MARGIN, 1 / (1 + way.error))
        if is_enough and not any(_goes_further(way.changes, other.changes) for other in found):
            found.append(way.remedy(ratio))
        if len(found) == AT_MOST:
            break
    return found


def _goes_further(changes: dict[str, Any], others: dict[str, Any]) -> bool:
    """Return whether `changes` include all of `others`; a smaller micro-batch counts as one."""
    micro = "micro_batch_blocks"
    return all(
        key in changes and (changes[key] == value or (key == micro and changes[key] < value))
        for key, value in others.items()
    )


def least(load: Load, ratio: float, has_deepspeed: bool) -> Remedy | None:
    """Return the change that needs least memory, fit or not; None if nothing can be changed."""
    ways = _leaner_ways(load, has_deepspeed)
    way = min(ways, key=lambda each: each.total_bytes, default=None)
    return None if way is None else way.remedy(ratio)


@dataclass(frozen=True)
class _Way:
    """A row of a table of ways: what it changes, what it needs, and its expected cost."""

    changes: dict[str, Any]
    memory: MemoryOfWays
    row: int
    cost: float

    @property
    def total_bytes(self) -> float:
        return float(self.memory.total[self.row])

    @property
    def error(self) -> float:
        return float(self.memory.error[self.row])

    def remedy(self, ratio: float) -> Remedy:
        memory = self.memory.memory(self.row)
        return Remedy(self.changes, memory, round(memory.total_bytes * max(1.0, ratio)), self.cost)


def _leaner_ways(load: Load, has_deepspeed: bool) -> list[_Way]:
    """Return every legal way to train on the same global batch with less memory that runs here."""
    train = load.train
    now_bytes = load.memory.total_bytes
    smaller = [
        size for size in range(1, train.micro_batch_blocks) if train.micro_batch_blocks % size == 0
    ]
    found = []
    for changes, memory in _tables(load, [*smaller, train.micro_batch_blocks], has_deepspeed):
        for row in np.flatnonzero(memory.total < _LEAST_SAVING * now_bytes):
            own = changes[memory.ways.kind[row]]
            micro = int(memory.ways.micro_batch_blocks[row])
            if micro != train.micro_batch_blocks:
                own = {"micro_batch_blocks": micro, **own}
            found.append(_Way(own, memory, int(row), _cost(train, own)))
    return found


def _tables(
    load: Load, sizes: Sequence[int], has_deepspeed: bool
) -> Iterator[tuple[list[dict[str, Any]], MemoryOfWays]]:
    """Yield the changes of all kinds of ways with these micro-batches, and their memory.

    A table is of one optimizer and one method, on which the formulas depend as a whole.
    """
    train = load.train
    for optimizer in sorted({train.optimizer, *STAND_INS}):
        for method in sorted({train.method, "lora"}):
            kinds = []
            changes = []
            for own in _changes(load, {"optimizer": optimizer, "method": method}):
                kind = _changed(load, own)
                can_run = has_deepspeed or not kind.uses_deepspeed
                if can_run and is_legal(kind, load.ranks):
                    kinds.append(kind)
                    changes.append(own)
            if kinds:
                yield changes, _memory_of(load, kinds, sizes)


def _memory_of(load: Load, kinds: Sequence[Train], sizes: Sequence[int]) -> MemoryOfWays:
    layers = load.geometry.attention_layers
    kept = [
        layers if kind.kept_attention_layers == AUTO else kind.kept_attention_layers
        for kind in kinds
    ]
    ways = Ways(
        kinds=kinds,
        kind=np.repeat(np.arange(len(kinds)), len(sizes)),
        micro_batch_blocks=np.tile(sizes, len(kinds)),
        kept_layers=np.repeat(kept, len(sizes)),
        attention_layers=layers,
    )
    groups = load.ranks.total // load.train.ranks_per_block
    accumulation = np.ceil(load.batch_blocks / (groups * ways.micro_batch_blocks))
    return MemoryOfWays(load.geometry, ways, load.ranks, load.block_tokens, accumulation)


def _changed(load: Load, changes: dict[str, Any]) -> Train:
    """Return the training with these changes, without keys that have no effect beside them."""
    changed = eager_under_deepspeed(load.train.model_copy(update=changes))
    is_kept_new = {"recompute", "kept_attention_layers"} & changes.keys()
    if not is_kept_new and recompute_of(changed) != "full":
        return changed.model_copy(update={"kept_attention_layers": AUTO})
    return changed


def _changes(load: Load, fixed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what differs from the present settings: `fixed`, and each combination of other keys."""
    train = load.train
    kept = train.kept_attention_layers
    full = train.model_copy(update={"recompute": "full"})
    strategies = [name for name in STRATEGIES if name not in load.geometry.left_out]
    can_drop = kept and can_keep_attention(full, load.block_tokens)
    choices: dict[str, list[Any]] = {
        "strategy": strategies if load.ranks.total > 1 else [train.strategy],
        "recompute": list(_COSTS["recompute"]),
        "reshard": [False, True] if train.reshard is False else [train.reshard],
        "offload": list(_COSTS["offload"]),
        "offload_activations": list(_COSTS["offload_activations"]),
        "kept_attention_layers": [kept, 0] if can_drop else [kept],
        **{key: [value] for key, value in fixed.items()},
    }
    now = {key: getattr(train, key) for key in choices}
    now |= {"recompute": recompute_of(train), "offload_activations": keeps_on_host(train)}
    for values in product(*choices.values()):
        yield {key: value for key, value in zip(choices, values, strict=True) if value != now[key]}


def _cost(train: Train, changes: dict[str, Any]) -> float:
    cost = 0.0
    for key, costs in _COSTS.items():
        if key in changes:
            cost += max(0.0, costs[changes[key]] - costs.get(getattr(train, key), 0.0)) + 0.001
    micro: int = changes.get("micro_batch_blocks", train.micro_batch_blocks)
    cost += _HALVING_COST * math.log2(train.micro_batch_blocks / micro)
    return cost + sum(penalty for key, penalty in _OTHER_TRAINING.items() if key in changes)
