"""Choose the fastest way to train that fits, and name what would fit if none does."""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product, takewhile
from typing import Any

from pipeline_lib.arch.layers import can_keep_on_host, is_sharded
from pipeline_lib.config.optimizers import ADAPTERS, DEFAULT, OPTIMIZERS
from pipeline_lib.config.strategies import STRATEGIES
from pipeline_lib.config.train import AUTO, Train, in_file
from pipeline_lib.core import units
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.units import from_gigabytes, gib, gigabytes
from pipeline_lib.plan.context import allowed_counts, sharing_counts
from pipeline_lib.plan.gpus import find_gpu, gpu_names
from pipeline_lib.plan.machine import Machine
from pipeline_lib.plan.near import NearMiss
from pipeline_lib.plan.predict import (
    Prediction,
    fits,
    fits_on_gpu,
    host_bytes_of_node,
    lacks_host_memory,
    memory_of,
)
from pipeline_lib.plan.remedies import STAND_INS, Load, Remedy, remedies
from pipeline_lib.plan.search import (
    OFFLOAD,
    Group,
    Setting,
    fastest_near_miss,
    groups,
    is_legal,
    least_memory,
    simplest_of_fastest,
)
from pipeline_lib.plan.workload import free_keys, settled
from pipeline_lib.records.plan import TO_A_BLOCK, Memory

# The choice: the fastest way to train that fits, of all that the config leaves open.

_OF_DEEPSPEED = [name for name, row in STRATEGIES.items() if row.uses_deepspeed]


@dataclass(frozen=True)
class Choice:
    """The chosen way to train, and the best way of every other strategy, whether it fits or not.

    `considered` counts the candidates and `fitting` those that fit. `left_out` maps each strategy
    that was not considered to the reason. `near` is the fastest that lacks little, if it is faster
    than the chosen one or that does not fit.
    """

    chosen: Prediction
    best: Mapping[str, Prediction]
    considered: int
    left_out: Mapping[str, str]
    fitting: int = 0
    near: NearMiss | None = None


def choose(setting: Setting, train: Train, held: Collection[str], has_deepspeed: bool) -> Choice:
    """Choose how to train, over all keys that `free_keys` leaves open.

    If `train` names a strategy, the others are only for comparison, and the way that needs least
    memory is chosen if nothing fits. With `strategy: auto`, raise DataError if nothing fits.
    """
    without = (
        {} if has_deepspeed else dict.fromkeys(_OF_DEEPSPEED, "DeepSpeed is not installed here")
    )
    left_out = {**without, **setting.geometry.left_out}
    if train.strategy != AUTO:
        own = groups(setting, train, held)
        # Other strategies are compared without the keys that belong to the named one.
        other = train.model_copy(update={"strategy": AUTO, "shard_ranks": None, "reshard": AUTO})
        named = ("context_ranks", "micro_batch_blocks", "recompute", "offload", "compile")
        kept = [key for key in named if getattr(train, key) != AUTO]
        chosen = _best_of(setting, own)
        beside = _by_strategy(groups(setting, other, kept))
        best = {
            name: _best_of(setting, found) for name, found in beside.items() if name not in left_out
        }
        return _choice(setting, chosen, {**best, train.strategy: chosen}, own, left_out)
    found = _by_strategy(_considered(setting, train, held, has_deepspeed))
    everything = [group for of_strategy in found.values() for group in of_strategy]
    if not everything:
        text = (
            "train.strategy: auto finds no way to train that the other keys of `train` allow; "
            "leave some of them out"
        )
        raise DataError(text)
    simplest = simplest_of_fastest(setting, everything)
    if simplest is None:
        machine = setting.machine
        number = sum(len(group.sizes) for group in everything)
        limit = "" if machine.gpu_memory_bytes is None else f" with {gib(machine.gpu_memory_bytes)}"
        raise DataError(
            f"none of {number} ways to train fits {machine.ranks} x {machine.name}{limit}"
        )
    best = {name: _best_of(setting, of_strategy) for name, of_strategy in found.items()}
    return _choice(setting, simplest.predict(), best, everything, left_out)


def _choice(
    setting: Setting,
    chosen: Prediction,
    best: Mapping[str, Prediction],
    found: Sequence[Group],
    left_out: Mapping[str, str],
) -> Choice:
    considered = sum(len(group.sizes) for group in found)
    fitting = sum(group.fitting for group in found)
    near = fastest_near_miss(setting, found, chosen if chosen.fits else None)
    return Choice(chosen, best, considered, left_out, fitting, near)


def leanest_choice(
    setting: Setting, train: Train, held: Collection[str], chosen: Train
) -> Choice | None:
    """Return the choice of `chosen` if nothing fits, beside each strategy's way of least memory.

    None if there is no way at all. Strategies that are not installed are included.
    """
    found = groups(setting, train, held)
    if not found:
        return None
    ways = [least_memory(of_strategy) for of_strategy in _by_strategy(found).values()]
    ways.sort(key=lambda way: -way.memory.total_bytes)
    best: dict[str, Prediction] = {way.train.strategy: way.predict() for way in ways}
    return _choice(setting, setting.predict(chosen), best, found, {})


def _considered(
    setting: Setting, train: Train, held: Collection[str], has_deepspeed: bool
) -> list[Group]:
    found = groups(setting, train, held)
    return found if has_deepspeed else [group for group in found if not group.train.uses_deepspeed]


def _by_strategy(found: Iterable[Group]) -> dict[str, list[Group]]:
    by_name: dict[str, list[Group]] = {}
    for group in found:
        by_name.setdefault(group.train.strategy, []).append(group)
    return by_name


def _best_of(setting: Setting, found: Sequence[Group]) -> Prediction:
    """Return the simplest of the fastest that fit, or else the way that needs least memory."""
    return (simplest_of_fastest(setting, found) or least_memory(found)).predict()


# Whether a run fits at all, and what has to change if it does not: settings, or a larger cluster.
#
# It considers memory alone, which is quick: every call of snakemake checks it.

MOST_PER_NODE, MOST_NODES = 8, 512
_ANY_BYTES = 2**62
_DEFAULT = Train()
# sources of a rate that is known rather than assumed
_BETWEEN_NODES = ("cluster.internode_gbit_s", "measured")


@dataclass(frozen=True)
class Wanted:
    """A training to plan.

    `strategy: auto` leaves open all keys but `held`; with a named strategy only keys that are
    `auto` are open.
    """

    setting: Setting
    train: Train
    held: Collection[str]
    has_deepspeed: bool

    def on(self, machine: Machine) -> "Wanted":
        """Return the training on another machine, with at least one micro-batch for each rank."""
        blocks = max(self.setting.batch_blocks, self.blocks_at_once(machine))
        return replace(self, setting=replace(self.setting, machine=machine, batch_blocks=blocks))

    def blocks_at_once(self, machine: Machine) -> int:
        """Return the fewest blocks that `machine` processes at once, with few ranks to each."""
        count = replace(self.setting, machine=machine).rank_counts(self.train, self.held)[0]
        is_free = "micro_batch_blocks" in free_keys(self.train, self.held)
        return max(1, machine.ranks // count) * (1 if is_free else self.train.micro_batch_blocks)

    @property
    def fits(self) -> bool:
        """True if at least one way to train fits."""
        return any(fits(memory, self.setting.machine) for _, memory in leanest(self))


def fastest(wanted: Wanted) -> Prediction | None:
    """Return what `choose` chooses, and nothing more; None if nothing fits or is allowed."""
    setting = wanted.setting
    train = wanted.train
    held = wanted.held
    sizes = setting.workload.block_tokens, setting.batch_blocks
    if not is_legal(train, setting.ranks) or not sharing_counts(
        setting.geometry, train, held, setting.ranks, *sizes
    ):
        return None
    # a named strategy is planned in any case
    has_deepspeed = wanted.has_deepspeed or train.strategy != AUTO
    found = simplest_of_fastest(setting, _considered(setting, train, held, has_deepspeed))
    return None if found is None else found.predict()


def no_way(wanted: Wanted) -> str | None:
    """Return the problem if the keys that `auto` has to keep allow no way to train, else None."""
    if leanest(wanted):
        return None
    keys = [key for key in wanted.held if getattr(wanted.train, key) != getattr(_DEFAULT, key)]
    given = " and ".join(f"{in_file(key)}: {getattr(wanted.train, key)}" for key in keys)
    missing = "" if wanted.has_deepspeed else ", without DeepSpeed, which is not installed here"
    kept = f"beside {given}" if given else "that the other keys of `train` allow"
    return (
        f"train.strategy: auto finds no way to train {kept}{missing}; leave "
        f"{'one' if given else 'some'} out"
    )


def leanest(wanted: Wanted) -> list[tuple[Train, Memory]]:
    """Return the ways to train that need least memory: one for each free strategy and each offload.

    They have the fewest ranks to a block with which one fits; if none fits, there are those of
    every number of ranks. Ways that fit come first. After them come those that only the host lacks
    memory for, ordered by the host memory that they need, since a job can ask for more; then all
    others, ordered by the memory of a rank.
    """
    setting = wanted.setting
    machine = wanted.setting.machine
    ways = list[tuple[Train, Memory]]()
    for count in setting.rank_counts(wanted.train, wanted.held):
        for train in _lean_settings(wanted, count):
            if is_legal(train, setting.ranks):
                ways.append((train, memory_of(setting.case(train))))
        if any(fits(memory, machine) for _, memory in ways):
            break

    def shortage(way: tuple[Train, Memory]) -> tuple[bool, bool, int]:
        memory = way[1]
        if not fits_on_gpu(memory, machine):
            return True, True, memory.total_bytes
        if lacks_host_memory(memory, machine):
            return True, False, host_bytes_of_node(memory, machine)
        return False, False, memory.total_bytes

    return sorted(ways, key=shortage)


def _lean_settings(wanted: Wanted, count: int) -> Iterator[Train]:
    train = wanted.train.model_copy(update={"context_ranks": count})
    held = wanted.held
    open_keys = free_keys(train, held)
    has_triton = wanted.setting.machine.has_triton
    lean = {
        "micro_batch_blocks": 1,
        "recompute": "full",
        "reshard": True,
        "compile": AUTO,
        "save_async": False,
    }
    free = {key: value for key, value in lean.items() if key in open_keys}
    if train.strategy != AUTO:
        yield from _with_activations_away(
            settled(train.model_copy(update=free), has_triton), wanted
        )
        return
    shard_ranks = None if "shard_ranks" in open_keys else train.shard_ranks
    # hsdp always needs more memory than fsdp; a given number of sharding ranks allows only hsdp.
    strategies = (
        [name for name in STRATEGIES if name != "hsdp"] if shard_ranks is None else ["hsdp"]
    )
    strategies = [name for name in strategies if name not in wanted.setting.geometry.left_out]
    if not wanted.has_deepspeed:
        strategies = [name for name in strategies if name not in _OF_DEEPSPEED]
    for strategy in strategies:
        offloads = STRATEGIES[strategy].offloads if wanted.setting.machine.is_gpu else ("none",)
        for offload in offloads if "offload" in open_keys else (train.offload,):
            changes = {"strategy": strategy, "offload": offload, "shard_ranks": shard_ranks}
            yield from _with_activations_away(
                settled(train.model_copy(update={**free, **changes}), has_triton), wanted
            )


def _with_activations_away(lean: Train, wanted: Wanted) -> Iterator[Train]:
    """Yield `lean`, and if allowed, and only that fits the GPU, with activations on the host.

    No layer keeps the attention's results, unless `kept_attention_layers` is given.
    """
    setting = wanted.setting
    machine = wanted.setting.machine
    lean = setting.leaner(lean)
    yield lean
    if wanted.train.offload_activations == AUTO and machine.is_gpu and can_keep_on_host(lean):
        away = lean.model_copy(update={"offload_activations": True})
        is_needed = not fits_on_gpu(memory_of(setting.case(lean)), machine)
        if is_needed and fits_on_gpu(memory_of(setting.case(away)), machine):
            yield away


def what_would_fit(wanted: Wanted) -> list[str]:
    """Return what to change if nothing fits, as sentences: settings, and the smallest cluster."""
    settings = _freed(wanted) if wanted.train.strategy == AUTO else _remedies(wanted)
    sentences = [
        f"this would fit: {text}"
        for text in (
            *_with_less_offloaded(wanted),
            *settings,
            *_with_less_kept(wanted),
            *_in_4_bits(wanted),
            *_in_parts(wanted),
        )
    ]
    if cluster := smallest_cluster(wanted):
        sentences.append(f"the smallest cluster that would do: {cluster}")
    if wanted.train.strategy != AUTO and not sentences:
        sentences += _with_another_strategy(wanted)
    if sentences:
        return sentences
    block = (
        f"no number of GPUs would do: one block of {wanted.setting.workload.block_tokens} "
        "tokens needs more memory"
    )
    if "context_ranks" in free_keys(wanted.train, wanted.held):
        return [f"{block} than all GPUs that can share it have; lower shard.block_tokens"]
    remedy = (
        "lower shard.block_tokens, or raise train.context_ranks, so that more GPUs share a block"
    )
    return [f"{block} than a GPU has; {remedy}"]


def _with_another_strategy(wanted: Wanted) -> Iterator[str]:
    """Yield what `strategy: auto` would need if a strategy cannot train the model on any GPUs."""
    kept = () if wanted.train.context_ranks == AUTO else ("context_ranks",)
    free = replace(
        wanted, train=wanted.train.model_copy(update={"strategy": AUTO}), held=(*wanted.held, *kept)
    )
    ways = leanest(free)
    machine = wanted.setting.machine
    if ways and fits(ways[0][1], machine):
        yield f"this would fit: train.strategy: auto{_on_host(ways[0][1], machine)}"
    elif cluster := smallest_cluster(free):
        yield f"with train.strategy: auto, the smallest cluster that would do: {cluster}"


def _remedies(wanted: Wanted) -> Iterator[str]:
    """Yield other values of given keys, and the host memory that suffices without them.

    Keys that the plan may choose already have their leanest value.
    """
    machine = wanted.setting.machine
    setting = wanted.setting
    device_bytes = machine.gpu_memory_bytes or 0
    block_tokens = setting.workload.block_tokens
    lean = {"recompute": "full"} if wanted.train.recompute == AUTO else {}
    found: list[Remedy] = []
    for count in setting.rank_counts(wanted.train, wanted.held):
        train = setting.leaner(wanted.train.model_copy(update={**lean, "context_ranks": count}))
        load = Load(setting.geometry, train, setting.ranks, block_tokens, setting.batch_blocks)
        found = found or remedies(load, device_bytes, ratio=1.0, has_deepspeed=wanted.has_deepspeed)
    found = [replace(remedy, is_least=_may_need_more(wanted, remedy.changes)) for remedy in found]
    alone = _more_host_memory(wanted)

    def lacks_host(remedy: Remedy) -> bool:
        return lacks_host_memory(remedy.memory, machine)

    first = list(
        takewhile(lambda remedy: not lacks_host(remedy) and not remedy.is_other_training, found)
    )
    yield from (f"{remedy}{_on_host(remedy.memory, machine)}" for remedy in first)
    if alone is not None:
        yield host_memory(alone)
    for remedy in found[len(first) :]:
        needed_bytes = host_bytes_of_node(remedy.memory, machine)
        if not lacks_host(remedy):
            yield f"{remedy}{_on_host(remedy.memory, machine)}"
        elif alone is None or _in_gb(needed_bytes) < _in_gb(alone):
            yield f"{remedy} and {host_memory(needed_bytes)}"


def _may_need_more(wanted: Wanted, changes: dict[str, Any]) -> bool:
    """Return whether the plan still chooses keys that need memory after these changes."""
    changed = wanted.train.model_copy(update=changes)
    keys = ("recompute", "reshard") if is_sharded(changed) else ("recompute",)
    is_open = any(getattr(changed, key) == AUTO for key in keys)
    return is_open or wanted.setting.keeps_auto(changed)


def _with_less_offloaded(wanted: Wanted) -> Iterator[str]:
    """Yield less offloading than configured, if the host lacks memory that the GPUs have."""
    train = wanted.train
    machine = wanted.setting.machine
    ways = leanest(wanted)
    if not machine.is_gpu or not ways or not lacks_host_memory(ways[0][1], machine):
        return
    # else the key is to be left out
    less = OFFLOAD[: OFFLOAD.index(train.offload)] if train.strategy != AUTO else ()
    kept = [False] if train.offload_activations is True else []
    for away, offload in product([train.offload_activations, *kept], [*less, train.offload]):
        changes = {"offload": offload, "offload_activations": away}
        changes = {key: value for key, value in changes.items() if value != getattr(train, key)}
        way = (
            leanest(replace(wanted, train=train.model_copy(update=changes)))[:1] if changes else []
        )
        for _, memory in way:
            if fits(memory, machine):
                remedy = Remedy(
                    changes, memory, memory.total_bytes, 0.0, _may_need_more(wanted, changes)
                )
                yield f"{remedy}{_on_host(memory, machine)}"
                return


def _freed(wanted: Wanted) -> Iterator[str]:
    alone = _more_host_memory(wanted)
    for key in wanted.held:
        if (
            key != "context_ranks"
            and replace(wanted, held=[other for other in wanted.held if other != key]).fits
        ):
            yield f"{in_file(key)} left out, so that the plan chooses it"
    for changes, note in _other_trainings(wanted.train):
        other = replace(wanted, train=wanted.train.model_copy(update=changes))
        if other.train == wanted.train:
            continue
        if other.fits:
            yield f"{_listed(changes)}  ({note}){_least_on_host(other)}"
            continue
        more = _more_host_memory(other)
        if more is not None and (alone is None or _in_gb(more) < _in_gb(alone)):
            yield f"{_listed(changes)}  ({note}) and {host_memory(more)}"
    if alone is not None:
        yield host_memory(alone)


def _other_trainings(train: Train) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield changes that train something else, each with a note: other optimizers, or adapters."""
    for name in STAND_INS:
        yield {"optimizer": name}, "another optimizer, so another run"
    yield _to_adapters(train), "trains adapters instead"


def _to_adapters(train: Train) -> dict[str, Any]:
    """Return the changes that train adapters, by another optimizer if this one cannot."""
    changes = {} if train.method == "lora" else {"method": "lora"}
    if ADAPTERS in OPTIMIZERS[train.optimizer].refuses:
        changes["optimizer"] = DEFAULT
    return changes


def _listed(changes: dict[str, Any]) -> str:
    return ", ".join(f"train.{key}: {value}" for key, value in changes.items())


def _in_4_bits(wanted: Wanted) -> Iterator[str]:
    """Yield adapters on a 4-bit base if the GPUs have memory for these but not for unquantized."""
    changes = _to_adapters(wanted.train)
    train = wanted.train.model_copy(update=changes)
    setting = wanted.setting

    def fits_without_host(train: Train) -> bool:
        ways = leanest(replace(wanted, train=train))
        return any(fits(memory, setting.machine) and not memory.host_bytes for _, memory in ways)

    if setting.geometry.expert_layers or not setting.machine.is_gpu or fits_without_host(train):
        return
    if fits_without_host(
        train.model_copy(update={"lora": train.lora.model_copy(update={"base": "nf4"})})
    ):
        keys = _listed(changes | {"lora.base": "nf4"})
        yield f"{keys}  (keeps the frozen base in 4 bits)"


def _in_parts(wanted: Wanted) -> Iterator[str]:
    """Yield the fewest ranks that fit by sharing each block, where they can and the config says."""
    if "context_ranks" in free_keys(wanted.train, wanted.held):
        return
    train = wanted.train.model_copy(update={"context_ranks": AUTO})
    ways = leanest(
        replace(wanted, train=train, held=[key for key in wanted.held if key != "context_ranks"])
    )
    if ways and fits(ways[0][1], wanted.setting.machine):
        yield f"train.context_ranks: {ways[0][0].context_ranks}  (as many ranks share each block)"


def _with_less_kept(wanted: Wanted) -> Iterator[str]:
    """Yield `kept_attention_layers: auto` if that fits, where the config gives a number."""
    train = wanted.train.model_copy(update={"kept_attention_layers": AUTO})
    if train != wanted.train and replace(wanted, train=train).fits:
        yield "train.kept_attention_layers: auto  (more layers compute their attention again)"


def _more_host_memory(wanted: Wanted) -> int | None:
    """Return the least host memory of a node, in bytes, for these GPUs; None if none suffices."""
    roomy = wanted.on(replace(wanted.setting.machine, host_memory_bytes=_ANY_BYTES))
    machine = roomy.setting.machine
    # More ranks to a block need less host memory for its activations.
    held = (*wanted.held, "context_ranks")
    each = [
        replace(roomy, train=wanted.train.model_copy(update={"context_ranks": count}), held=held)
        for count in roomy.setting.rank_counts(wanted.train, wanted.held)
    ]
    ways = [memory for given in each for _, memory in leanest(given) if fits(memory, machine)]
    return min((host_bytes_of_node(memory, machine) for memory in ways), default=None)


def host_memory(needed_bytes: int) -> str:
    """Return the config key that asks for this much host memory."""
    return f"cluster.memory_gb: {_in_gb(needed_bytes)}, if the nodes have as much"


def _in_gb(needed_bytes: int) -> int:
    return math.ceil(needed_bytes / from_gigabytes(1))


def host_limit_in_words(machine: Machine) -> str:
    """Return how much host memory a node has, and where that is known from."""
    limit = gigabytes(machine.host_limit_bytes or 0)
    return (
        f"{limit} are assumed, as cluster.memory_gb is not set"
        if machine.is_host_assumed
        else f"cluster.memory_gb gives {limit}"
    )


def _on_host(memory: Memory, machine: Machine) -> str:
    """Return the host memory that a node needs, if assumed and used for offloading, else ''."""
    is_assumed = machine.is_host_assumed and memory.host_bytes > 0
    needed_bytes = host_bytes_of_node(memory, machine)
    return f", with {gigabytes(needed_bytes)} of host memory on each node" if is_assumed else ""


def _least_on_host(wanted: Wanted) -> str:
    machine = wanted.setting.machine
    ways = [memory for _, memory in leanest(wanted) if fits(memory, machine)]
    return _on_host(min(ways, key=lambda memory: host_bytes_of_node(memory, machine)), machine)


def smallest_cluster(wanted: Wanted) -> str | None:
    """Return the smallest clusters that would fit, in words; None if there are none.

    These are the fewest GPUs of this kind, no fewer than now, and as many GPUs as now of the
    smallest larger kind.
    """
    machine = wanted.setting.machine
    sentences = []
    same = next((shape for shape in _shapes(wanted) if wanted.on(shape).fits), None)
    if same is not None:
        nodes = f"cluster.nodes {same.nodes} with " if same.nodes > 1 else ""
        is_link_known = (
            machine.nodes > 1 or machine.rates["between_bytes_s"].source in _BETWEEN_NODES
        )
        more = (
            ""
            if same.nodes == 1 or is_link_known
            else " (which needs cluster.internode_gbit_s too)"
        )
        more += _least_on_host(wanted.on(same))
        blocks = wanted.blocks_at_once(same)
        size = same.ranks_per_node
        if blocks > wanted.setting.batch_blocks:
            tokens = blocks * wanted.setting.workload.block_tokens
            more += f" and train.global_batch_tokens {tokens}, which changes the training"
        ranks = (
            f"cluster.gpus_per_node {size} of {machine.name}"
            if machine.is_gpu
            else f"cluster.cpu_ranks {size}"
        )
        if (count := leanest(wanted.on(same))[0][0].ranks_per_block) > wanted.train.ranks_per_block:
            ranks += f", {count} {TO_A_BLOCK}"
        sentences.append(f"{nodes}{ranks}{more}")
    kinds = [
        gpu
        for name in gpu_names()
        if (gpu := find_gpu(name)) and gpu.computes_in(wanted.train.precision)
    ]
    more_memory = [
        gpu
        for gpu in kinds
        if machine.gpu_memory_bytes and gpu.memory_bytes > machine.gpu_memory_bytes
    ]
    for gpu in sorted(more_memory, key=lambda gpu: gpu.memory_bytes):
        larger = wanted.on(replace(machine, name=gpu.name, gpu_memory_bytes=gpu.memory_bytes))
        if larger.fits:
            shape = (
                f"{units.count(machine.nodes, 'nodes')} of "
                f"{units.count(machine.ranks_per_node, 'GPUs')}"
            )
            sentences.append(
                f"the configured {shape}, with {gpu.name} of "
                f"{gib(gpu.memory_bytes)}{_least_on_host(larger)}"
            )
            break
    return ", or ".join(sentences) or None


def _shapes(wanted: Wanted) -> Iterator[Machine]:
    """Yield clusters of these GPUs, fewest first, that can share the batch or need a larger one.

    Among equally many GPUs, one node comes first, then nodes of the present size, then fewer nodes.
    Nodes that use fewer of their GPUs than now, so that each GPU has more host memory, are tried
    only if no others would do.
    """
    machine = wanted.setting.machine
    batch_blocks = wanted.setting.batch_blocks
    now = machine.ranks_per_node
    least = {size: _least_nodes(wanted, size) for size in {*range(now, MOST_PER_NODE + 1), now}}
    if min(least.values()) > MOST_NODES:
        least = {size: _least_nodes(wanted, size) for size in range(1, now)}
    least = {size: nodes for size, nodes in least.items() if nodes <= MOST_NODES}
    first = min((size * nodes for size, nodes in least.items()), default=1)
    for total in range(first, MOST_NODES * max(least, default=0) + 1):
        for size in sorted(least, key=lambda size: (size != total, size != now, -size)):
            if total % size == 0 and least[size] <= total // size <= MOST_NODES:
                shape = replace(machine, nodes=total // size, ranks_per_node=size)
                blocks = wanted.blocks_at_once(shape)
                if blocks > batch_blocks or batch_blocks % blocks == 0:
                    yield shape


def _least_nodes(wanted: Wanted, per_node: int) -> int:
    """Return a lower bound for the nodes of this size that fit and have no fewer ranks than now.

    Return MOST_NODES + 1 if none fits. The number is found by bisection for each number of ranks to
    a block, over the numbers of nodes whose ranks it divides and whose ranks make whole replicas of
    hsdp. The bisection assumes that of these more nodes never need more memory of a rank. A single
    rank is an exception, since it exchanges nothing. That does no harm, because the present size is
    known to be too small.
    """
    machine = wanted.setting.machine
    # With hsdp, all of these are hsdp; ranks of a replica, of which there have to be two at least.
    is_hsdp = "hsdp" in {train.strategy for train in _lean_settings(wanted, 1)}
    of_replica = (wanted.train.shard_ranks or per_node) if is_hsdp else 1
    now = math.ceil(max(machine.ranks, 2 * of_replica if is_hsdp else 1) / per_node)
    least = MOST_NODES + 1
    for count, given in _of_each_count(wanted, per_node).items():

        def is_enough(nodes: int, given: Wanted = given) -> bool:
            return given.on(replace(machine, nodes=nodes, ranks_per_node=per_node)).fits

        together = math.lcm(count, of_replica)
        whole = together // math.gcd(together, per_node)
        sizes = range(math.ceil(now / whole) * whole, least, whole)
        if sizes and is_enough(sizes[-1]):
            least = sizes[bisect_left(sizes, True, key=is_enough)]
    return least


def _of_each_count(wanted: Wanted, per_node: int) -> dict[int, Wanted]:
    """Return the same training for each number of ranks to a block that such nodes may have."""
    setting = wanted.setting
    train = wanted.train
    if "context_ranks" not in free_keys(train, wanted.held):
        return {train.ranks_per_block: wanted}
    counts = allowed_counts(setting.geometry, train, per_node, setting.workload.block_tokens)
    held = (*wanted.held, "context_ranks")
    return {
        count: replace(wanted, train=train.model_copy(update={"context_ranks": count}), held=held)
        for count in counts
    }
