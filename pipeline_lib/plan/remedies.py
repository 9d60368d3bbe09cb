"""What to change when a run does not fit: the cheapest changes that would, with the memory that each is predicted.

Changes of placement come first, by the time that they are expected to cost. After them come those that train
something else: the other optimizer, or adapters instead of all weights. Promise: nothing is offered that is refused
later, for which DeepSpeed would have to be there and is not, or that is not predicted to fit with a margin.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from pipeline_lib.config.cross_check import train_problems
from pipeline_lib.config.schema import Cluster, Train
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.memory import MARGIN, Memory, predict
from pipeline_lib.plan.placement import eager_under_deepspeed, recompute_of
from pipeline_lib.plan.units import gib

AT_MOST = 3
# Expected cost, as a part of the step's time: the order is what matters. On 8 H200: half the tokens at a time cost
# 7.5 %, sharding 1.5 % (performance.md, section 2); full recomputation costs a third of the products, 20 % in practice.
_STRATEGY_COST = {"ddp": 0.0, "hsdp": 0.02, "fsdp": 0.03, "zero1": 0.04, "zero2": 0.05, "zero3": 0.07}
_RECOMPUTE_COST = {"none": 0.0, "selective": 0.09, "full": 0.22}
_RESHARD_COST = {False: 0.0, True: 0.015}
_OFFLOAD_COST = {"none": 0.0, "optimizer": 1.0, "optimizer+params": 2.0}
_HALVING_COST = 0.06
_TRAINS_SOMETHING_ELSE = {"optimizer": 10.0, "method": 20.0}
# 8 bits need less, and what has them in 32 can be offloaded: each may be the one that fits.
_OPTIMIZERS = ("adamw", "adamw_8bit")
_LEAST_SAVING = 0.97  # of the memory now: a change that saves less is none


@dataclass(frozen=True)
class Remedy:
    """Keys of `train` with their new values, the memory predicted with them, and what they are expected to cost."""

    changes: dict[str, Any]
    memory: Memory
    needed_bytes: int
    cost: float

    def __str__(self) -> str:
        """As a line for people."""
        keys = ", ".join(f"train.{key}: {_as_written(value)}" for key, value in self.changes.items())
        notes = {"method": "trains adapters instead", "optimizer": "another optimizer, so another run"}
        note = "; ".join(text for key, text in notes.items() if key in self.changes)
        return f"{keys}  ({gib(self.needed_bytes)} a GPU{f'; {note}' if note else ''})"


def _as_written(value: Any) -> str:
    """As YAML has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def remedies(
    geometry: Geometry,
    train: Train,
    ranks: Ranks,
    block_tokens: int,
    device_bytes: int,
    ratio: float,
    has_deepspeed: bool,
) -> list[Remedy]:
    """Up to AT_MOST, the cheapest first, none of them another one with more changes. Empty if nothing is enough.

    `ratio` is what was needed over what was predicted, as far as known: predictions are multiplied by it.
    """
    limit = device_bytes * (1 - MARGIN)
    found: list[Remedy] = []
    possible = alternatives(geometry, train, ranks, block_tokens, ratio, has_deepspeed)
    for remedy in sorted(possible, key=lambda each: each.cost):
        if remedy.needed_bytes <= limit and not any(_goes_further(remedy.changes, one.changes) for one in found):
            found.append(remedy)
    return found[:AT_MOST]


def _goes_further(changes: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether `changes` are `others`, with more of them or with a smaller micro-batch still."""
    micro = "micro_batch_blocks"
    return all(
        key in changes and (changes[key] == value or (key == micro and changes[key] < value))
        for key, value in others.items()
    )


def least(
    geometry: Geometry, train: Train, ranks: Ranks, block_tokens: int, ratio: float, has_deepspeed: bool
) -> Remedy | None:
    """The change that needs least memory, whether that is little enough or not; None if there is nothing to change."""
    found = alternatives(geometry, train, ranks, block_tokens, ratio, has_deepspeed)
    return min(found, key=lambda each: each.needed_bytes, default=None)


def alternatives(
    geometry: Geometry, train: Train, ranks: Ranks, block_tokens: int, ratio: float, has_deepspeed: bool
) -> Iterator[Remedy]:
    """Every legal way to train on the same global batch that is predicted to need less memory and can run here."""
    now_bytes = predict(geometry, train, ranks, block_tokens).total_bytes
    for changes in _changes(train, ranks):
        changed = eager_under_deepspeed(Train.model_validate({**train.model_dump(), **changes}))
        if is_legal(changed, ranks) and (has_deepspeed or not changed.uses_deepspeed):
            memory = predict(geometry, changed, ranks, block_tokens)
            if memory.total_bytes < _LEAST_SAVING * now_bytes:
                yield Remedy(changes, memory, round(memory.total_bytes * max(1.0, ratio)), _cost(train, changes))


def _changes(train: Train, ranks: Ranks) -> Iterator[dict[str, Any]]:
    """All combinations of what could be changed, the present values left out."""
    smaller = [size for size in range(1, train.micro_batch_blocks) if train.micro_batch_blocks % size == 0]
    choices: dict[str, list[Any]] = {
        "micro_batch_blocks": [*smaller, train.micro_batch_blocks],
        "strategy": list(_STRATEGY_COST) if ranks.total > 1 else [train.strategy],
        "recompute": list(_RECOMPUTE_COST),
        "reshard": [False, True] if train.reshard is False else [train.reshard],
        "offload": list(_OFFLOAD_COST),
        "optimizer": list(_OPTIMIZERS),
        "method": sorted({train.method, "lora"}),
    }
    now = {key: getattr(train, key) for key in choices} | {"recompute": recompute_of(train)}
    for values in product(*choices.values()):
        changes = {key: value for key, value in zip(choices, values, strict=True) if value != now[key]}
        if changes:
            yield changes


def is_legal(train: Train, ranks: Ranks) -> bool:
    """Whether the config's own checks would let these ranks train so."""
    cluster = Cluster.model_construct(nodes=ranks.total // ranks.per_node, gpus_per_node=ranks.per_node)
    return not train_problems(train, cluster)


def _cost(train: Train, changes: dict[str, Any]) -> float:
    """The time that `changes` are expected to cost, as a part of the step's."""
    cost = 0.0
    tables: dict[str, dict[Any, float]] = {
        **{"strategy": _STRATEGY_COST, "recompute": _RECOMPUTE_COST},
        **{"reshard": _RESHARD_COST, "offload": _OFFLOAD_COST},
    }
    for key, costs in tables.items():
        if key in changes:
            cost += max(0.0, costs[changes[key]] - costs.get(getattr(train, key), 0.0)) + 0.001
    micro: int = changes.get("micro_batch_blocks", train.micro_batch_blocks)
    cost += _HALVING_COST * math.log2(train.micro_batch_blocks / micro)
    return cost + sum(penalty for key, penalty in _TRAINS_SOMETHING_ELSE.items() if key in changes)
