"""Search all ways to train for the fastest that fit, without predicting each of them.

Ways that differ in their micro-batch alone form a group: a larger micro-batch needs more memory,
and is never slower as long as activations stay where they are. So how many of a group fit is found
by bisection, and its fastest is the largest that fits. The largest micro-batch of all, with which
there is no accumulation and no gradient is kept meanwhile, is a group of its own. A test compares
the result with an estimate of every way.

Ranks that share each block need less memory, and time for their exchange. So ways with more ranks
to a block are looked at only where not even one block fits with fewer, and something would be
gained if it did.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.arch.layers import (
    can_compile,
    can_keep_attention,
    can_keep_on_host,
    is_compiled,
    is_sharded,
    keeps_on_host,
)
from pipeline_lib.config.checks import train_problems
from pipeline_lib.config.schema import Cluster
from pipeline_lib.config.strategies import STRATEGIES
from pipeline_lib.config.train import AUTO, Train
from pipeline_lib.plan.context import sharing_counts
from pipeline_lib.plan.machine import End, Machine, Ranks
from pipeline_lib.plan.memory import host_need_with_copies
from pipeline_lib.plan.near import NearMiss, is_near, near_miss
from pipeline_lib.plan.passes import COMPILE_S
from pipeline_lib.plan.predict import (
    Prediction,
    fits,
    fits_on_gpu,
    host_bytes_of_node,
    memory_of,
    predict_step,
)
from pipeline_lib.plan.step_time import step_time
from pipeline_lib.plan.workload import Case, free_keys, settled
from pipeline_lib.records.plan import Memory, Workload

# Predictions cannot separate ways to train whose step times differ by less than this fraction; the
# simplest of them is taken. The band is wider on CPUs: what separates strategies (casts, launches,
# overlap) was measured on GPUs.
AS_GOOD, _AS_GOOD_ON_CPUS = 0.02, 0.25
RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "optimizer", "optimizer+params")


def _simplicity(train: Train) -> tuple[int, int]:
    return train.ranks_per_block, list(STRATEGIES).index(train.strategy)


@dataclass(frozen=True)
class Estimate:
    """One way to train: its memory and its expected step time, each computed on demand."""

    case: Case

    @property
    def train(self) -> Train:
        """The settings; no key is `auto`."""
        return self.case.train

    @cached_property
    def memory(self) -> Memory:
        """The memory of a rank."""
        return memory_of(self.case)

    @cached_property
    def fits(self) -> bool:
        """Whether GPUs and hosts have the memory."""
        return fits(self.memory, self.case.machine)

    @cached_property
    def step_s(self) -> float:
        """The expected seconds of a step."""
        return step_time(self.case, End.EXPECTED).total_s

    @property
    def cost_s(self) -> float:
        """The seconds of a step, with its share of the compilation."""
        steps = self.case.steps
        return self.step_s + (COMPILE_S / steps if steps and is_compiled(self.train) else 0.0)

    @property
    def complexity(self) -> tuple[int, int, int, bool, int, bool, int]:
        """The order among equally fast ways: ranks to a block, strategy, offloading, and so on."""
        train = self.train
        places = (OFFLOAD.index(train.offload), keeps_on_host(train))
        again = (RECOMPUTE.index(train.recompute), train.reshard is not False)
        return (*_simplicity(train), *places, *again, self.memory.total_bytes)

    def predict(self) -> Prediction:
        """Return the whole prediction."""
        return predict_step(self.case)


@dataclass(frozen=True)
class Setting:
    """The model, machine, data and batch of all candidates.

    `steps` and `epoch_steps`, those of the run and of an epoch, are None while unknown.
    """

    geometry: Geometry
    machine: Machine
    workload: Workload
    batch_blocks: int
    steps: int | None
    epoch_steps: int | None = None

    @property
    def ranks(self) -> Ranks:
        """The ranks of the machine."""
        return Ranks.of(self.machine)

    @property
    def as_good(self) -> float:
        """The fraction by which a strategy may lag behind the fastest and still count as fast."""
        return AS_GOOD if self.machine.is_gpu else _AS_GOOD_ON_CPUS

    def rank_counts(self, train: Train, held: Collection[str]) -> list[int]:
        """Return `sharing_counts` for this machine and batch; 1 alone if each leaves ranks idle."""
        sizes = self.workload.block_tokens, self.batch_blocks
        return sharing_counts(self.geometry, train, held, self.ranks, *sizes) or [1]

    def case(self, train: Train) -> Case:
        """Return the case of one way to train."""
        steps = (self.steps, self.epoch_steps)
        return Case(self.geometry, train, self.machine, self.workload, self.batch_blocks, *steps)

    def predict(self, train: Train) -> Prediction:
        """Predict one way to train, with `auto` resolved as by `estimate`."""
        return self.estimate(train).predict()

    def estimate(self, train: Train, keeps_all: bool = False) -> Estimate:
        """Return a way to train, with all keys resolved that are `auto`.

        Activations are kept on the host if only that fits. If neither does, and not `keeps_all`,
        the attention's results of as many layers as fit are kept, in the faster of both places that
        have room; `kept_attention_layers` stays `auto` where all are kept. Layers are compiled if
        the run saves more than COMPILE_S by it, if its length is unknown, or if only that fits.
        """
        return self.or_reduced(train, self.keeping_everything(train), keeps_all)

    def keeping_everything(self, train: Train) -> Estimate:
        """Return `estimate` with all that `auto` may keep on the device, whether it fits or not."""
        if train.offload_activations == AUTO:
            return self._estimate(train.model_copy(update={"offload_activations": False}))
        return self._estimate(train)

    def or_reduced(self, train: Train, kept: Estimate, keeps_all: bool) -> Estimate:
        """Return `kept`, which is `keeping_everything(train)`, if it fits, else `estimate`'s."""
        found = [kept]
        if (
            not kept.fits
            and train.offload_activations == AUTO
            and self.machine.is_gpu
            and can_keep_on_host(train)
        ):
            found.append(self._estimate(train.model_copy(update={"offload_activations": True})))
        if found[-1].fits:
            return found[-1]
        if not keeps_all and self.keeps_auto(train):
            places = [way.train.offload_activations for way in found]
            found = [
                self._with_fewer(train.model_copy(update={"offload_activations": place}))
                for place in places
            ]
        return min((way for way in found if way.fits), key=lambda way: way.step_s, default=found[0])

    def keeps_auto(self, train: Train) -> bool:
        """Return whether the plan may choose how many layers keep attention's results."""
        return train.kept_attention_layers == AUTO and can_keep_attention(
            train, self.workload.block_tokens
        )

    def leaner(self, train: Train) -> Train:
        """Return `train` with no attention's results kept, if the plan may choose that."""
        return (
            train.model_copy(update={"kept_attention_layers": 0})
            if self.keeps_auto(train)
            else train
        )

    def _with_fewer(self, train: Train) -> Estimate:
        """Return `train` with attention's results of as many layers as fit, but not all; or none.

        Copies of checkpoints, which `save_async: auto` makes if they fit, take no room from these
        results.
        """
        none = self._estimate(train.model_copy(update={"kept_attention_layers": 0}))
        if not none.fits:
            return none
        train = train.model_copy(update={"compile": none.train.compile})
        save_async = False if train.save_async == AUTO else train.save_async

        def has_room(layers: int) -> bool:
            lean = {"save_async": save_async, "kept_attention_layers": layers}
            return Estimate(self.case(train.model_copy(update=lean))).fits

        kept = _count(self.geometry.attention_layers, has_room) - 1
        return self._estimate(train.model_copy(update={"kept_attention_layers": max(0, kept)}))

    def _estimate(self, train: Train) -> Estimate:
        """Return `estimate` where no more than `save_async` and `compile` may be `auto`."""
        if train.save_async == AUTO:
            return self._estimate(
                train.model_copy(update={"save_async": self._has_room_for_copies(train)})
            )
        if train.compile != AUTO:
            return Estimate(self.case(train))
        if not can_compile(train, self.machine.has_triton):
            return self._estimate(train.model_copy(update={"compile": False}))
        then = self._estimate(train.model_copy(update={"compile": True}))
        if self.steps is None:
            return then
        now = self._estimate(train.model_copy(update={"compile": False}))
        saved_s = self.steps * (now.step_s - then.step_s)
        return then if saved_s > COMPILE_S or (then.fits and not now.fits) else now

    def _has_room_for_copies(self, train: Train) -> bool:
        """Return whether a checkpoint may be copied to the host at once.

        Nothing is offloaded to it, and it fits.
        """
        if train.offload != "none":
            return False
        limit = self.machine.host_limit_bytes
        if limit is None:
            return True
        copying = train.model_copy(update={"save_async": True})
        if self.machine.is_gpu:
            need = host_need_with_copies(
                self.geometry, copying, self.ranks, self.workload.block_tokens
            )
            return need.total_bytes <= limit
        case = self.case(copying)
        return host_bytes_of_node(memory_of(case), self.machine) <= limit


@dataclass(frozen=True)
class Group:
    """Ways that differ only in their micro-batch: `train` with each of `sizes`, smallest first."""

    setting: Setting
    train: Train
    sizes: tuple[int, ...]

    @cached_property
    def _made(self) -> dict[int, Estimate]:
        return {}

    @cached_property
    def _kept(self) -> dict[int, Estimate]:
        return {}

    def way(self, place: int) -> Train:
        """Return the way with the micro-batch at `place`; some of its keys may be `auto`."""
        return self.train.model_copy(update={"micro_batch_blocks": self.sizes[place]})

    def at(self, place: int) -> Estimate:
        """Return the estimate at `place`, with `auto` resolved as by `Setting.estimate`.

        Only the first of `sizes` may keep the attention's results of fewer layers: a larger one is
        then never slower.
        """
        if place not in self._made:
            kept = self.on_device.keeping_everything(place)
            self._made[place] = self.setting.or_reduced(self.way(place), kept, keeps_all=place > 0)
        return self._made[place]

    def keeping_everything(self, place: int) -> Estimate:
        """Return `Setting.keeping_everything` of the way at `place`."""
        if place not in self._kept:
            self._kept[place] = self.setting.keeping_everything(self.way(place))
        return self._kept[place]

    def _is_all_on_device(self, place: int) -> bool:
        """Return whether the estimate at `place` keeps all allowed activations on the device."""
        train = self.at(place).train
        return (
            not keeps_on_host(train)
            and train.kept_attention_layers == self.train.kept_attention_layers
        )

    @cached_property
    def on_device(self) -> "Group":
        """The same ways with activations on the device, unless the config says where they are."""
        if self.train.offload_activations != AUTO:
            return self
        return Group(
            self.setting, self.train.model_copy(update={"offload_activations": False}), self.sizes
        )

    @cached_property
    def fitting(self) -> int:
        """The number of sizes that fit, which are the smallest ones."""
        return _count(len(self.sizes), lambda place: self.at(place).fits)

    @cached_property
    def fitting_on_device(self) -> int:
        """The number of sizes that fit with all activations that may be kept on the device."""
        return _count(self.fitting, self._is_all_on_device)

    @cached_property
    def near(self) -> int:
        """The number of sizes that fit or lack little."""
        return _count(
            len(self.sizes), lambda place: is_near(self.at(place).memory, self.setting.machine)
        )

    @property
    def fastest(self) -> Estimate:
        """The fastest that fits, which must exist: the largest, or that of `fitting_on_device`."""
        largest = self.at(self.fitting - 1)
        if self.fitting_on_device in (0, self.fitting):
            return largest
        return min(largest, self.at(self.fitting_on_device - 1), key=lambda way: way.cost_s)

    def simplest_within(self, limit_s: float) -> Estimate:
        """Return the simplest that fits and costs at most `limit_s`, as the fastest does."""
        is_on_device = (
            self.fitting_on_device > 0 and self.at(self.fitting_on_device - 1).cost_s <= limit_s
        )
        place, first = (
            (self.fitting_on_device - 1, 0)
            if is_on_device
            else (self.fitting - 1, self.fitting_on_device)
        )
        while place > first and self.at(place - 1).cost_s <= limit_s:
            place -= 1
        return self.at(place)

    @property
    def simplicity(self) -> tuple[int, int]:
        """The ranks to a block and the place of the strategy, which order ways before all else."""
        return _simplicity(self.train)

    @property
    def has_room(self) -> bool:
        """Whether its smallest micro-batch fits device and host with activations on the device."""
        return self.at(0).fits and self._is_all_on_device(0)

    @property
    def largest_s(self) -> float:
        """The seconds of a step with its largest micro-batch, given memory for all it may keep."""
        whole = {"kept_attention_layers": self.train.kept_attention_layers}
        return Estimate(
            self.setting.case(self.at(len(self.sizes) - 1).train.model_copy(update=whole))
        ).step_s

    def would_fit(self, count: int) -> bool:
        """Return if GPUs may hold its smallest micro-batch when `count` ranks share each block."""
        setting = self.setting
        lean = {"context_ranks": count, "micro_batch_blocks": self.sizes[0]}
        if self.train.offload_activations == AUTO:
            lean["offload_activations"] = can_keep_on_host(self.train)
        train = setting.leaner(
            settled(self.train.model_copy(update=lean), setting.machine.has_triton)
        )
        return fits_on_gpu(memory_of(setting.case(train)), setting.machine)

    @property
    def complexity(self) -> tuple[int, int, bool]:
        """The places of what is offloaded, recomputed and resharded; each takes time for memory."""
        train = self.train
        return (
            OFFLOAD.index(train.offload),
            RECOMPUTE.index(train.recompute),
            train.reshard is not False,
        )


def _count(most: int, holds: Callable[[int], bool]) -> int:
    """Return for how many places below `most` `holds` is true: the first ones, or none."""
    if most and holds(most - 1):
        return most
    return bisect_left(range(most), True, key=lambda place: not holds(place))


def is_legal(train: Train, ranks: Ranks) -> bool:
    """Return whether the config's checks allow these ranks to train this way."""
    cluster = Cluster.model_construct(
        nodes=ranks.total // ranks.per_node, gpus_per_node=ranks.per_node
    )
    return not train_problems(train, cluster)


def groups(setting: Setting, train: Train, held: Collection[str]) -> list[Group]:
    """Return all legal ways to train on the same global batch that keep the `held` keys.

    With more ranks to a block these are only the ways that may be faster than what fits with fewer.
    Blocks are shared across nodes only if nothing fits within them.
    """
    free = free_keys(train, held)
    first, *more = setting.rank_counts(train, held)
    within = [count for count in more if count <= setting.ranks.per_node]
    last = _of_count(setting, train.model_copy(update={"context_ranks": first}), free)
    found = list(last)
    for count in more:
        fastest_s = min((group.fastest.cost_s for group in _undominated(found)), default=math.inf)
        useful = more if fastest_s == math.inf else within
        if count not in useful:
            break
        cramped = _cramped(last, fastest_s / (1 + setting.as_good), useful[-1])
        shared = (group.train.model_copy(update={"context_ranks": count}) for group in cramped)
        last = [
            Group(setting, way, sizes)
            for way in shared
            if is_legal(way, setting.ranks)
            for sizes in _sizes(setting, way, free)
        ]
        if not last:
            break
        found += last
    return found


def _cramped(found: Iterable[Group], limit_s: float, most: int) -> Iterator[Group]:
    """Yield a group for each way in `found` that sharing ranks might make faster than `limit_s`.

    GPUs or hosts lack the memory for even one block of it, unless activations are kept on the host,
    and with the same strategy for one of a simpler way. It may fit on the GPUs if `most` ranks
    share a block, and if all blocks fit at once, a step would take less.
    """
    of_options: dict[tuple[Any, ...], list[Group]] = {}
    for group in sorted(found, key=lambda group: group.complexity):
        of_options.setdefault(
            (group.train.strategy, group.train.shard_ranks, group.complexity), []
        ).append(group)
    roomy: dict[tuple[str, int | None], list[tuple[int, int, bool]]] = {}
    for (strategy, shard_ranks, places), parts in of_options.items():
        simpler = roomy.setdefault((strategy, shard_ranks), [])
        if any(all(its <= mine for its, mine in zip(one, places, strict=True)) for one in simpler):
            continue
        if any(group.has_room for group in parts):
            simpler.append(places)
        elif parts[0].would_fit(most) and parts[-1].largest_s < limit_s:
            yield parts[-1]


def _of_count(setting: Setting, train: Train, free: frozenset[str]) -> list[Group]:
    """Return all legal ways with as many ranks to a block as `train` says, over its `free` keys."""
    if train.strategy != AUTO:
        return list(_groups(setting, train, free))
    found: list[Group] = []
    is_hsdp = "shard_ranks" not in free and train.shard_ranks is not None
    for strategy in (
        ("hsdp",)
        if is_hsdp
        else (name for name in STRATEGIES if name not in setting.geometry.left_out)
    ):
        update: dict[str, Any] = {"strategy": strategy}
        if strategy != "hsdp":
            update["shard_ranks"] = None
        own = free if strategy == "hsdp" else free - {"shard_ranks"}
        of_strategy = _groups(setting, train.model_copy(update=update), own)
        found += [group for group in of_strategy if is_legal(group.train, setting.ranks)]
    return found


def _groups(setting: Setting, train: Train, free: Collection[str]) -> Iterator[Group]:
    ranks = setting.ranks.total
    machine = setting.machine
    parts = _sizes(setting, train, free)
    is_memory_known = machine.gpu_memory_bytes is not None or machine.host_memory_bytes is not None
    values: dict[str, list[Any]] = {
        "shard_ranks": [size for size in range(2, ranks) if ranks % size == 0],
        # Without GPUs the state lies in host memory anyway.
        "offload": list(OFFLOAD) if machine.is_gpu else ["none"],
        "recompute": list(RECOMPUTE),
        "reshard": [False, True] if is_sharded(train) and is_memory_known else [True],
        "compile": [AUTO],
    }
    own = {key: choices for key, choices in values.items() if key in free}
    for chosen in product(*own.values()):
        changed = train.model_copy(update=dict(zip(own, chosen, strict=True)))
        # a number that is given has no effect
        if not can_keep_attention(changed, setting.workload.block_tokens):
            changed = changed.model_copy(update={"kept_attention_layers": AUTO})
        yield from (Group(setting, changed, part) for part in parts)


def _sizes(setting: Setting, train: Train, free: Collection[str]) -> list[tuple[int, ...]]:
    """Return the micro-batches that divide a rank's share, the largest by itself; or the given."""
    if "micro_batch_blocks" not in free:
        return [(train.micro_batch_blocks,)]
    of_a_rank = math.ceil(setting.batch_blocks * train.ranks_per_block / setting.ranks.total)
    small = [size for size in range(1, math.isqrt(of_a_rank) + 1) if of_a_rank % size == 0]
    sizes = sorted({*small, *(of_a_rank // size for size in small)})
    return [tuple(part) for part in (sizes[:-1], sizes[-1:]) if part]


def simplest_of_fastest(setting: Setting, found: Iterable[Group]) -> Estimate | None:
    """Return the simplest of the ways as fast as the fastest; None if nothing fits.

    On CPUs it is of the fewest ranks to a block, and then of the simplest strategy, that are as
    fast as the fastest.
    """
    useful = _undominated(found)
    if not useful:
        return None
    if not setting.machine.is_gpu:
        limit_s = min(group.fastest.cost_s for group in useful) * (1 + setting.as_good)
        first = min(group.simplicity for group in useful if group.fastest.cost_s <= limit_s)
        useful = [group for group in useful if group.simplicity == first]
    limit_s = min(group.fastest.cost_s for group in useful) * (1 + AS_GOOD)
    near = [group.simplest_within(limit_s) for group in useful if group.fastest.cost_s <= limit_s]
    return min(near, key=lambda way: way.complexity)


def _undominated(found: Iterable[Group]) -> list[Group]:
    """Return the groups in which something fits, without those with a simpler and faster one.

    That is one of the same strategy, ranks to a block and sizes that offloads, recomputes and
    reshards no more, and of which as large a micro-batch fits.
    """
    kept: dict[tuple[tuple[int, int], int | None, tuple[int, ...]], list[Group]] = {}
    for group in sorted(found, key=lambda group: group.complexity):
        before = kept.setdefault((group.simplicity, group.train.shard_ranks, group.sizes), [])
        places = group.complexity
        simpler = [
            one
            for one in before
            if all(mine <= its for mine, its in zip(one.complexity, places, strict=True))
        ]
        most = max((one.fitting_on_device for one in simpler), default=0)
        if most < len(group.sizes) and group.at(most).fits:
            before.append(group)
    return [group for of_strategy in kept.values() for group in of_strategy]


def least_memory(found: Sequence[Group]) -> Estimate:
    """Return the way that needs least memory, whether it fits or not; there has to be a group."""
    return min((group.at(0) for group in found), key=lambda way: way.memory.total_bytes)


def fastest_near_miss(
    setting: Setting, found: Iterable[Group], chosen: Prediction | None
) -> NearMiss | None:
    """Return the fastest way that lacks little, with activations on the device, or None.

    It has to be faster than the chosen one, which is None if nothing fits.
    """
    machine = setting.machine
    limit_s = math.inf if chosen is None else chosen.step_s.value / (1 + AS_GOOD)
    missed: list[tuple[Group, int, int]] = []
    for group in found:
        if group.fitting_on_device == len(group.sizes):
            continue
        kept = group.on_device
        if setting.keeps_auto(kept.train):  # with all that they may keep
            every = {"kept_attention_layers": setting.geometry.attention_layers}
            kept = Group(setting, kept.train.model_copy(update=every), group.sizes)
        first = kept.fitting
        end = kept.near
        if first < end and kept.at(end - 1).step_s < limit_s:
            missed.append((kept, first, end))
    if not missed:
        return None
    limit_s = min(limit_s, min(kept.at(end - 1).step_s for kept, _, end in missed) * (1 + AS_GOOD))
    ways = [
        kept.at(place)
        for kept, first, end in missed
        for place in range(first, end)
        if kept.at(place).step_s <= limit_s
    ]
    return near_miss([way.predict() for way in ways], machine, AS_GOOD)
