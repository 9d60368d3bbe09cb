"""Chooses the fastest way to train that fits, and says what would fit if none does."""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from pipeline_lib.config.checks import OFFLOADS, train_problems
from pipeline_lib.config.schema import Cluster, Train
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.units import from_gigabytes, gib, gigabytes
from pipeline_lib.model.geometry import Geometry
from pipeline_lib.plan.machine import Gpu, Machine, Ranks, find_gpu, gpu_names
from pipeline_lib.plan.memory import MARGIN, STRATEGIES, Memory, predict
from pipeline_lib.plan.predict import Prediction, fits, fits_on_gpu, host_bytes_of_node, lacks_host_memory, predict_step
from pipeline_lib.plan.step_time import COMPILE_S
from pipeline_lib.plan.workload import (
    AUTO,
    Workload,
    can_compile,
    eager_under_deepspeed,
    free_keys,
    is_compiled,
    is_sharded,
    recompute_of,
    settled,
)

# What to change when a run does not fit: the cheapest changes that would, with the memory that each is predicted.
#
# Changes of placement come first, by the time that they are expected to cost. After them come those that train
# something else: the other optimizer, or adapters instead of all weights. Promise: nothing is offered that is refused
# later, for which DeepSpeed would have to be there and is not, or that is not predicted to fit with a margin.

AT_MOST = 3
# Expected cost, as a part of the step's time: the order is what matters. On 8 H200: half the tokens at a time cost
# 7.5 %, sharding 1.5 % (performance.md, section 2); full recomputation costs a third of the products, 20 % in practice.
_STRATEGY_COST = {"ddp": 0.0, "hsdp": 0.02, "fsdp": 0.03, "zero1": 0.04, "zero2": 0.05, "zero3": 0.07}
_RECOMPUTE_COST = {"none": 0.0, "selective": 0.09, "full": 0.22}
_RESHARD_COST = {False: 0.0, True: 0.015}
_OFFLOAD_COST = {"none": 0.0, "optimizer": 1.0, "optimizer+params": 2.0}
_HALVING_COST = 0.06
_OTHER_TRAINING = {"optimizer": 10.0, "method": 20.0}
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
    return cost + sum(penalty for key, penalty in _OTHER_TRAINING.items() if key in changes)


# What the config leaves open: the fastest way to train that fits. With `strategy: auto` the strategy is open too.

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


# Whether a run fits at all, and what would have to change if it does not: settings, or a larger cluster.
#
# Goes by memory alone, which is quick: every call of snakemake asks it.

MOST_PER_NODE, MOST_NODES = 8, 512
_ANY_BYTES = 2**62
_DEFAULT = Train()
_BETWEEN_NODES = ("cluster.internode_gbit_s", "measured")  # sources of a rate that is not a guess
_TRAINS_SOMETHING_ELSE = (
    ("optimizer", "adamw", "another optimizer, so another run"),  # it can be offloaded, and the other one not
    ("optimizer", "adamw_8bit", "another optimizer, so another run"),
    ("method", "lora", "trains adapters instead"),
)


@dataclass(frozen=True)
class Wanted:
    """What is to be trained: `strategy: auto` leaves open what is not `held`, any other what is `auto`."""

    setting: Setting
    train: Train
    held: Collection[str]
    has_deepspeed: bool

    def on(self, machine: Machine) -> "Wanted":
        """The same on another machine, with a batch that has at least a micro-batch for each rank."""
        blocks = max(self.setting.batch_blocks, machine.ranks * self.blocks_at_once)
        return replace(self, setting=replace(self.setting, machine=machine, batch_blocks=blocks))

    @property
    def blocks_at_once(self) -> int:
        """The least that a rank takes of a batch at once."""
        return 1 if "micro_batch_blocks" in free_keys(self.train, self.held) else self.train.micro_batch_blocks

    def can_run(self, strategy: str) -> bool:
        """Whether what the strategy needs is installed."""
        return self.has_deepspeed or not strategy.startswith("zero")

    @property
    def fits(self) -> bool:
        """Whether one of the ways to train does."""
        return any(fits(memory, self.setting.machine) for _, memory in leanest(self))


def no_way(wanted: Wanted) -> str | None:
    """What is wrong where the keys that `auto` has to keep allow no way at all; None if they allow one."""
    if leanest(wanted):
        return None
    keys = [key for key in wanted.held if getattr(wanted.train, key) != getattr(_DEFAULT, key)]
    given = " and ".join(f"train.{key}: {getattr(wanted.train, key)}" for key in keys)
    missing = "" if wanted.has_deepspeed else ", without DeepSpeed, which is not installed here"
    kept = f"beside {given}" if given else "that the other keys of `train` allow"
    return f"train.strategy: auto finds no way to train {kept}{missing}; leave {'one' if given else 'some'} out"


def leanest(wanted: Wanted) -> list[tuple[Train, Memory]]:
    """The ways that need least memory: of each strategy that is free, and each offload.

    The one that needs least comes first, of those for which the host's memory is enough, if it is for any; if not, of
    those that the GPU has memory for, the one that needs least of the host's.
    """
    setting, ways = wanted.setting, []
    machine = setting.machine
    for train in _lean_settings(wanted):
        if is_legal(train, setting.ranks):
            accumulation = max(1, setting.batch_blocks // (setting.ranks.total * train.micro_batch_blocks))
            block_tokens = setting.workload.block_tokens
            ways.append((train, predict(setting.geometry, train, setting.ranks, block_tokens, accumulation)))
    return sorted(ways, key=lambda way: _shortage(way[1], machine))


def _shortage(memory: Memory, machine: Machine) -> tuple[bool, bool, int]:
    """What orders ways. Where only the host lacks memory, by how much of it they need: that is what can be changed."""
    if not lacks_host_memory(memory, machine):
        return False, False, memory.total_bytes
    if not fits_on_gpu(memory, machine):
        return True, True, memory.total_bytes
    return True, False, host_bytes_of_node(memory, machine)


def _lean_settings(wanted: Wanted) -> Iterator[Train]:
    train, held = wanted.train, wanted.held
    open_keys = free_keys(train, held)
    has_triton = wanted.setting.machine.has_triton
    lean = {"micro_batch_blocks": 1, "recompute": "full", "reshard": True, "compile": "auto"}
    free = {key: value for key, value in lean.items() if key in open_keys}
    if train.strategy != "auto":
        yield settled(train.model_copy(update=free), has_triton)
        return
    shard_ranks = None if "shard_ranks" in open_keys else train.shard_ranks
    # hsdp needs more than fsdp, always; who says how many ranks shard wants nothing else.
    strategies = [name for name in OFFLOADS if name not in ("auto", "hsdp")] if shard_ranks is None else ["hsdp"]
    for strategy in filter(wanted.can_run, strategies):
        offloads = OFFLOADS[strategy] if wanted.setting.machine.is_gpu else ("none",)
        for offload in offloads if "offload" in open_keys else (train.offload,):
            changes = {"strategy": strategy, "offload": offload, "shard_ranks": shard_ranks}
            yield settled(train.model_copy(update={**free, **changes}), has_triton)


def what_would_fit(wanted: Wanted) -> list[str]:
    """What to change where nothing fits, in words: settings that would do, and the smallest cluster."""
    settings = _freed(wanted) if wanted.train.strategy == "auto" else _remedies(wanted)
    said = [f"this would fit: {text}" for text in settings]
    if cluster := smallest_cluster(wanted):
        said.append(f"the smallest cluster that would do: {cluster}")
    return said or [
        f"no number of GPUs would do: what a block of {wanted.setting.workload.block_tokens} tokens needs is not "
        "spread over them; lower shard.block_tokens"
    ]


def _remedies(wanted: Wanted) -> Iterator[str]:
    """Other values of keys that are given. What the plan may choose is full recompute by now, and not compiled."""
    machine, setting = wanted.setting.machine, wanted.setting
    device_bytes, block_tokens = machine.gpu_memory_bytes or 0, setting.workload.block_tokens
    lean = {"recompute": "full"} if wanted.train.recompute == "auto" else {}
    train = wanted.train.model_copy(update=lean)
    known = (setting.geometry, train, setting.ranks, block_tokens, device_bytes)
    for remedy in remedies(*known, ratio=1.0, has_deepspeed=wanted.has_deepspeed):
        more = f" and {host_memory(host_bytes_of_node(remedy.memory, machine))}"
        yield f"{remedy}{more if lacks_host_memory(remedy.memory, machine) else _on_host(remedy.memory, machine)}"


def _freed(wanted: Wanted) -> Iterator[str]:
    """What `auto` could do without a key that it has to keep, or with what trains something else."""
    for key in wanted.held:
        if replace(wanted, held=[other for other in wanted.held if other != key]).fits:
            yield f"train.{key} left out, so that the plan chooses it"
    for key, value, note in _TRAINS_SOMETHING_ELSE:
        other = replace(wanted, train=wanted.train.model_copy(update={key: value}))
        if other.train == wanted.train:
            continue
        if other.fits:
            yield f"train.{key}: {value}  ({note}){_least_on_host(other)}"
        elif more := _more_host_memory(other):
            yield f"train.{key}: {value}  ({note}) and {more}"
    if more := _more_host_memory(wanted):
        yield more


def _more_host_memory(wanted: Wanted) -> str | None:
    """The key with the least host memory that would do on these GPUs, if any would."""
    roomy = wanted.on(replace(wanted.setting.machine, host_memory_bytes=_ANY_BYTES))
    machine = roomy.setting.machine
    ways = [memory for _, memory in leanest(roomy) if fits(memory, machine)]
    return host_memory(min(host_bytes_of_node(memory, machine) for memory in ways)) if ways else None


def host_memory(needed_bytes: int) -> str:
    """The key that asks for so much host memory."""
    return f"cluster.memory_gb: {math.ceil(needed_bytes / from_gigabytes(1))}, if the nodes have as much"


def _on_host(memory: Memory, machine: Machine) -> str:
    """What a node's host has to have for it, where nobody says what it has and something is offloaded to it."""
    is_unknown = machine.host_memory_bytes is None and machine.is_gpu and memory.host_bytes > 0
    needed_bytes = host_bytes_of_node(memory, machine)
    return f", with {gigabytes(needed_bytes)} of host memory on each node" if is_unknown else ""


def _least_on_host(wanted: Wanted) -> str:
    """The same for the way that needs least of it, of those that fit."""
    machine = wanted.setting.machine
    ways = [memory for _, memory in leanest(wanted) if fits(memory, machine)]
    return _on_host(min(ways, key=lambda memory: host_bytes_of_node(memory, machine)), machine)


def smallest_cluster(wanted: Wanted) -> str | None:
    """The fewest GPUs of this kind that would do, no fewer than now, and the least larger kind of which as many would.

    None where neither does.
    """
    machine, said = wanted.setting.machine, []
    same = next((shape for shape in _shapes(wanted) if wanted.on(shape).fits), None)
    if same is not None:
        nodes = f"cluster.nodes {same.nodes} with " if same.nodes > 1 else ""
        more = _link_for(machine, same) + _least_on_host(wanted.on(same)) + _batch_for(wanted, same)
        size = same.ranks_per_node
        ranks = f"cluster.gpus_per_node {size} of {machine.name}" if machine.is_gpu else f"cluster.cpu_ranks {size}"
        said.append(f"{nodes}{ranks}{more}")
    for gpu in _larger_gpus(machine.gpu_memory_bytes or 0, wanted.train.precision):
        larger = wanted.on(replace(machine, gpu_memory_bytes=gpu.memory_bytes))
        if larger.fits:
            said.append(f"as many {gpu.name} of {gib(gpu.memory_bytes)} as now{_least_on_host(larger)}")
            break
    return ", or ".join(said) or None


def _batch_for(wanted: Wanted, shape: Machine) -> str:
    """The larger batch that so many ranks need, if they do."""
    blocks = shape.ranks * wanted.blocks_at_once
    if blocks <= wanted.setting.batch_blocks:
        return ""
    return f" and train.global_batch_tokens {blocks * wanted.setting.workload.block_tokens}, which is another run"


def _link_for(machine: Machine, shape: Machine) -> str:
    """The key that a config of several nodes has to have, where nothing says yet what they send to each other."""
    is_known = machine.nodes > 1 or machine.rates["between_bytes_s"].source in _BETWEEN_NODES
    return "" if shape.nodes == 1 or is_known else " (which needs cluster.internode_gbit_s too)"


def _larger_gpus(than_bytes: int, precision: str) -> list[Gpu]:
    """The kinds that have more memory, the smallest first."""
    known = [gpu for name in gpu_names() if (gpu := find_gpu(name)) is not None and gpu.computes_in(precision)]
    return sorted((gpu for gpu in known if gpu.memory_bytes > than_bytes), key=lambda gpu: gpu.memory_bytes)


def _shapes(wanted: Wanted) -> Iterator[Machine]:
    """Clusters of these GPUs that can share the batch, or need a larger one: the fewest GPUs first, from now on.

    Of equally many: one node, then nodes like those now, then few nodes. Nodes that use fewer of their GPUs than now,
    so that each has more of the host's memory, come only where no others would do.
    """
    machine, batch_blocks = wanted.setting.machine, wanted.setting.batch_blocks
    now = machine.ranks_per_node
    least = {size: _least_nodes(wanted, size) for size in {*range(now, MOST_PER_NODE + 1), now}}
    if min(least.values()) > MOST_NODES:
        least = {size: _least_nodes(wanted, size) for size in range(1, now)}
    first = min((size * nodes for size, nodes in least.items()), default=1)
    for total in range(first, MOST_NODES * max(least, default=0) + 1):
        blocks = total * wanted.blocks_at_once
        if blocks > batch_blocks or batch_blocks % blocks == 0:
            for size in sorted(least, key=lambda size: (size != total, size != now, -size)):
                if total % size == 0 and least[size] <= total // size <= MOST_NODES:
                    yield replace(machine, nodes=total // size, ranks_per_node=size)


def _least_nodes(wanted: Wanted, per_node: int) -> int:
    """A number of nodes of that size below which nothing fits or there are fewer ranks than now, in a few trials.

    More nodes never need more, but for the second rank, with which the exchange begins, and for replicas, which not all
    numbers make. Of what there is now it is known that it is too little.
    """
    machine = wanted.setting.machine
    now = math.ceil(machine.ranks / per_node)
    if "hsdp" in {train.strategy for train in _lean_settings(wanted)}:
        return now
    sizes = range(now, MOST_NODES + 1)
    return now + bisect_left(
        sizes, True, key=lambda nodes: wanted.on(replace(machine, nodes=nodes, ranks_per_node=per_node)).fits
    )
