"""`strategy: auto`: the fastest way to train that fits, of all that the config leaves open."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from pipeline_lib.base.errors import DataError
from pipeline_lib.config.schema import CHOSEN_KEYS, Train
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.machine import Machine
from pipeline_lib.plan.memory import STRATEGIES, Ranks
from pipeline_lib.plan.prediction import Prediction, predict_step
from pipeline_lib.plan.remedies import is_legal
from pipeline_lib.plan.units import gib
from pipeline_lib.plan.workload import Workload

AS_GOOD = 0.02  # of the fastest: predictions tell no more apart, and among these the simplest is taken
RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "optimizer", "optimizer+params")


@dataclass(frozen=True)
class Choice:
    """What was chosen, and the best of every strategy beside it, whether it fits or not.

    `considered` counts the candidates, `fitting` those that fit. `left_out` are strategies that were not, each with the
    reason.
    """

    chosen: Prediction
    best: Mapping[str, Prediction]
    considered: int
    left_out: Mapping[str, str]
    fitting: int = 0


@dataclass(frozen=True)
class Setting:
    """What every candidate shares."""

    geometry: Geometry
    machine: Machine
    workload: Workload
    batch_blocks: int
    steps: int | None

    @property
    def ranks(self) -> Ranks:
        """Those of the machine."""
        return Ranks(self.machine.ranks, self.machine.ranks_per_node)

    def predict(self, train: Train) -> Prediction:
        """The prediction for one candidate."""
        return predict_step(self.geometry, train, self.machine, self.workload, self.batch_blocks, self.steps)


def choose(setting: Setting, train: Train, held: Collection[str], has_deepspeed: bool) -> Choice:
    """The choice for `train`. With `strategy: auto`, keys of CHOSEN_KEYS that are not `held` are free.

    With another strategy nothing is: it is chosen as it is, and the others are for comparison. Raises DataError if
    nothing that is left open fits.
    """
    left_out = {} if has_deepspeed else dict.fromkeys(("zero1", "zero2", "zero3"), "DeepSpeed is not installed here")
    is_known = setting.machine.host_memory_bytes is not None
    if train.strategy != "auto":
        beside = _by_strategy(setting, train.model_copy(update={"shard_ranks": None}), CHOSEN_KEYS[1:])
        best = {name: _fastest(found, is_known) for name, found in beside.items() if name not in left_out}
        chosen = setting.predict(train)
        return Choice(chosen, {**best, train.strategy: chosen}, len(best), left_out)
    found = {name: all_of for name, all_of in _by_strategy(setting, train, held).items() if name not in left_out}
    everything = [one for all_of in found.values() for one in all_of]
    fitting = [one for one in everything if one.fits]
    if not fitting:
        raise _nothing_fits(setting, everything)
    best = {name: _fastest(all_of, is_known) for name, all_of in found.items()}
    return Choice(_simplest(fitting, is_known), best, len(everything), left_out, len(fitting))


def _by_strategy(setting: Setting, train: Train, held: Collection[str]) -> dict[str, list[Prediction]]:
    found: dict[str, list[Prediction]] = {}
    for candidate in candidates(setting, train, held):
        found.setdefault(candidate.strategy, []).append(setting.predict(candidate))
    return found


def candidates(setting: Setting, train: Train, held: Collection[str]) -> Iterator[Train]:
    """Every legal way to train on the same global batch that keeps what is `held`."""
    ranks = setting.ranks
    of_a_rank = max(1, setting.batch_blocks // ranks.total)
    free: dict[str, list[Any]] = {
        "shard_ranks": [size for size in range(2, ranks.total) if ranks.total % size == 0],
        "micro_batch_blocks": [size for size in range(1, of_a_rank + 1) if of_a_rank % size == 0],
        "recompute": list(RECOMPUTE),
        "offload": list(OFFLOAD),
    }
    choices = {key: [getattr(train, key)] if key in held else values for key, values in free.items()}
    is_hsdp = "shard_ranks" in held and train.shard_ranks is not None
    for strategy in ("hsdp",) if is_hsdp else STRATEGIES:
        own = choices if strategy == "hsdp" else {**choices, "shard_ranks": [None]}
        for values in product(*own.values()):
            update = {"strategy": strategy, **dict(zip(own, values, strict=True))}
            candidate = train.model_copy(update=update)
            if is_legal(candidate, ranks):
                yield candidate


def _fastest(found: list[Prediction], is_host_known: bool) -> Prediction:
    """Of those that fit, else the one that needs least."""
    fitting = [one for one in found if one.fits]
    return _simplest(fitting, is_host_known) if fitting else min(found, key=lambda one: one.needed_memory_bytes.value)


def _simplest(fitting: list[Prediction], is_host_known: bool) -> Prediction:
    """Of those as fast as the fastest: the first strategy, the least computed again, then the least memory.

    Where nobody says how much memory the host has, nothing is offloaded that fits without.
    """
    if not is_host_known:
        fitting = [one for one in fitting if not one.memory.host_bytes] or fitting
    limit_s = min(one.step_s.value for one in fitting) * (1 + AS_GOOD)
    return min((one for one in fitting if one.step_s.value <= limit_s), key=_complexity)


def _complexity(one: Prediction) -> tuple[int, int, int, float]:
    train = one.train
    places = (STRATEGIES.index(train.strategy), OFFLOAD.index(train.offload), RECOMPUTE.index(train.recompute))
    return (*places, one.needed_memory_bytes.value)


def _nothing_fits(setting: Setting, everything: list[Prediction]) -> DataError:
    if not everything:
        return DataError("train.strategy: auto finds no way to train that the other keys of `train` allow; free some")
    least = min(everything, key=lambda one: one.needed_memory_bytes.value)
    limit = setting.machine.gpu_memory_bytes or 0
    host = least.memory.host_bytes * setting.machine.ranks_per_node
    on_host = f" and {gib(host)} of host memory a node" if host else ""
    return DataError(
        f"none of {len(everything)} ways to train fits {setting.ranks.total} x {setting.machine.name} with "
        f"{gib(limit)}: the least memory, {gib(least.needed_memory_bytes.value)} a GPU{on_host}, is needed by "
        + ", ".join(f"{key} {value}" for key, value in least.changes.items() if value is not None)
    )
