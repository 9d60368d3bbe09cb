"""What the config leaves open: the fastest way to train that fits. With `strategy: auto` the strategy is open too."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from pipeline_lib.base.errors import DataError
from pipeline_lib.config.schema import Train
from pipeline_lib.plan.compute import COMPILE_S
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.machine import Machine, Ranks
from pipeline_lib.plan.memory import STRATEGIES
from pipeline_lib.plan.placement import AUTO, can_compile, free_keys, is_compiled, is_sharded
from pipeline_lib.plan.prediction import Prediction, predict_step
from pipeline_lib.plan.remedies import is_legal
from pipeline_lib.plan.units import gib
from pipeline_lib.plan.workload import Workload

# Of the fastest: predictions tell no more apart, and among these the simplest is taken. On CPUs they tell less apart:
# what makes strategies differ (casts, launches, what exchanges hide behind) was read off GPUs.
AS_GOOD, _AS_GOOD_ON_CPUS = 0.02, 0.25
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
        return Ranks.of(self.machine)

    @property
    def as_good(self) -> float:
        """How much longer than the fastest strategy one may take that counts as fast, as a fraction."""
        return AS_GOOD if self.machine.is_gpu else _AS_GOOD_ON_CPUS

    @property
    def is_memory_known(self) -> bool:
        """Whether anything is known that could be too small."""
        return self.machine.gpu_memory_bytes is not None or self.machine.host_memory_bytes is not None

    def predict(self, train: Train) -> Prediction:
        """The prediction for one way to train; `compile: auto` is settled by what it saves.

        Layers are compiled if the run wins more by it than COMPILE_S, or is of unknown length, or fits by it alone.
        """
        if train.compile != AUTO:
            return predict_step(self.geometry, train, self.machine, self.workload, self.batch_blocks, self.steps)
        plain, compiled = (train.model_copy(update={"compile": value}) for value in (False, True))
        if not can_compile(train, self.machine.has_triton):
            return self.predict(plain)
        then = self.predict(compiled)
        if self.steps is None:
            return then
        now = self.predict(plain)
        saved_s = self.steps * (now.step_s.value - then.step_s.value)
        return then if saved_s > COMPILE_S or (then.fits and not now.fits) else now

    def step_s(self, one: Prediction) -> float:
        """Seconds of a step, with its part of the compilation."""
        return one.step_s.value + (COMPILE_S / self.steps if self.steps and is_compiled(one.train) else 0.0)


def choose(setting: Setting, train: Train, held: Collection[str], has_deepspeed: bool) -> Choice:
    """The choice for `train`, of all that `free_keys` leaves open.

    With a strategy that is named the others are for comparison, and what needs least is chosen if nothing fits; with
    `strategy: auto` that raises DataError.
    """
    left_out = {} if has_deepspeed else dict.fromkeys(("zero1", "zero2", "zero3"), "DeepSpeed is not installed here")
    if train.strategy != AUTO:
        own = predictions(setting, train, held)
        chosen, beside = _fastest(setting, own), _by_strategy(setting, _beside(train), _kept_beside(train))
        best = {name: _fastest(setting, found) for name, found in beside.items() if name not in left_out}
        fitting = sum(one.fits for one in own)
        return Choice(chosen, {**best, train.strategy: chosen}, len(own), left_out, fitting)
    found = {name: all_of for name, all_of in _by_strategy(setting, train, held).items() if name not in left_out}
    everything = [one for all_of in found.values() for one in all_of]
    fitting_ways = [one for one in everything if one.fits]
    if not fitting_ways:
        raise _nothing_fits(setting, len(everything))
    best = {name: _fastest(setting, all_of) for name, all_of in found.items()}
    chosen = _simplest(setting, _of_simplest_strategy(setting, fitting_ways))
    return Choice(chosen, best, len(everything), left_out, len(fitting_ways))


def _beside(train: Train) -> Train:
    """What the other strategies are compared with: as `train`, but for what belongs to its own."""
    return train.model_copy(update={"strategy": AUTO, "shard_ranks": None, "reshard": AUTO})


def _kept_beside(train: Train) -> list[str]:
    return [key for key in ("micro_batch_blocks", "recompute", "offload", "compile") if getattr(train, key) != AUTO]


def predictions(setting: Setting, train: Train, held: Collection[str]) -> list[Prediction]:
    """One for each of `candidates`."""
    return [setting.predict(candidate) for candidate in candidates(setting, train, held)]


def _by_strategy(setting: Setting, train: Train, held: Collection[str]) -> dict[str, list[Prediction]]:
    found: dict[str, list[Prediction]] = {}
    for one in predictions(setting, train, held):
        found.setdefault(one.train.strategy, []).append(one)
    return found


def candidates(setting: Setting, train: Train, held: Collection[str]) -> Iterator[Train]:
    """Every legal way to train on the same global batch that keeps what is `held`; `compile` may be left `auto`."""
    free = free_keys(train, held)
    if train.strategy != AUTO:
        yield from _ways(setting, train, free)
        return
    is_hsdp = "shard_ranks" not in free and train.shard_ranks is not None
    for strategy in ("hsdp",) if is_hsdp else STRATEGIES:
        update: dict[str, Any] = {"strategy": strategy}
        if strategy != "hsdp":
            update["shard_ranks"] = None
        own = free if strategy == "hsdp" else free - {"shard_ranks"}
        for candidate in _ways(setting, train.model_copy(update=update), own):
            if is_legal(candidate, setting.ranks):
                yield candidate


def _ways(setting: Setting, train: Train, free: Iterable[str]) -> Iterator[Train]:
    """All combinations of the `free` keys, under the strategy of `train`."""
    ranks, can_keep = setting.ranks.total, is_sharded(train) and setting.is_memory_known
    of_a_rank = max(1, setting.batch_blocks // ranks)
    values: dict[str, list[Any]] = {
        "shard_ranks": [size for size in range(2, ranks) if ranks % size == 0],
        "micro_batch_blocks": [size for size in range(1, of_a_rank + 1) if of_a_rank % size == 0],
        "recompute": list(RECOMPUTE),
        # Without GPUs the state lies in host memory in any case.
        "offload": list(OFFLOAD) if setting.machine.is_gpu else ["none"],
        "reshard": [False, True] if can_keep else [True],
        "compile": [AUTO],
    }
    own = {key: choices for key, choices in values.items() if key in free}
    for chosen in product(*own.values()):
        yield train.model_copy(update=dict(zip(own, chosen, strict=True)))


def _fastest(setting: Setting, found: list[Prediction]) -> Prediction:
    """Of those that fit, else the one that needs least."""
    fitting = [one for one in found if one.fits]
    return _simplest(setting, fitting) if fitting else min(found, key=lambda one: one.needed_memory_bytes.value)


def _of_simplest_strategy(setting: Setting, fitting: list[Prediction]) -> list[Prediction]:
    """On CPUs, the ways of the first strategy that is as fast as the fastest; on GPUs all."""
    if setting.machine.is_gpu:
        return fitting
    limit_s = min(map(setting.step_s, fitting)) * (1 + setting.as_good)
    fast = {one.train.strategy for one in fitting if setting.step_s(one) <= limit_s}
    first = min(fast, key=STRATEGIES.index)
    return [one for one in fitting if one.train.strategy == first]


def _simplest(setting: Setting, fitting: list[Prediction]) -> Prediction:
    """Of those as fast as the fastest: the first strategy, the least computed and gathered again, the least memory.

    Where nobody says how much memory the host has, nothing is offloaded that fits without.
    """
    if setting.machine.host_memory_bytes is None:
        fitting = [one for one in fitting if not one.memory.host_bytes] or fitting
    limit_s = min(map(setting.step_s, fitting)) * (1 + AS_GOOD)
    return min((one for one in fitting if setting.step_s(one) <= limit_s), key=_complexity)


def _complexity(one: Prediction) -> tuple[int, int, int, bool, float]:
    train = one.train
    places = (STRATEGIES.index(train.strategy), OFFLOAD.index(train.offload), RECOMPUTE.index(train.recompute))
    return (*places, train.reshard is not False, one.needed_memory_bytes.value)


def _nothing_fits(setting: Setting, considered: int) -> DataError:
    if not considered:
        return DataError("train.strategy: auto finds no way to train that the other keys of `train` allow; free some")
    machine = setting.machine
    limit = "" if machine.gpu_memory_bytes is None else f" with {gib(machine.gpu_memory_bytes)}"
    return DataError(f"none of {considered} ways to train fits {machine.ranks} x {machine.name}{limit}")
