"""What would fit: changes of the config or the machine with which a training has enough memory.

A change is tried by asking the same question again, as in plan/counterfactuals.py. Changes of the
config come first, of these those that train the same; then more host memory, and larger clusters.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline_lib.arch.layers import can_keep_attention, keeps_on_host
from pipeline_lib.config.optimizers import ADAPTERS, DEFAULT, OPTIMIZERS
from pipeline_lib.config.train import AUTO, Train, in_file
from pipeline_lib.core import units
from pipeline_lib.core.units import from_gigabytes, gib, gigabytes
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.choose import WayNeeds, best_way, fits_somehow, leanest
from pipeline_lib.plan.context import allowed_counts
from pipeline_lib.plan.counterfactuals import Counterfactual
from pipeline_lib.plan.gpus import find_gpu, gpu_names
from pipeline_lib.plan.legal import rank_counts
from pipeline_lib.plan.machine import Machine
from pipeline_lib.plan.predict import host_bytes_of_node
from pipeline_lib.plan.ways import Mask, Ways
from pipeline_lib.plan.workload import free_keys
from pipeline_lib.records.plan import TO_A_BLOCK, Memory

MOST_PER_NODE, MOST_NODES = 8, 512
ANY_BYTES = 2**62  # of host memory: as much as it takes
AT_MOST = 3  # changes that train the same
# A change that includes another is told if it trains so many times as fast.
_WORTH_MORE = 2.0
# sources of a rate that is known rather than assumed
_BETWEEN_NODES = ("cluster.internode_gbit_s", "measured")
# Keys that say how the same is trained, in the order in which a change names them.
_PLACEMENT = (
    "strategy",
    "shard_ranks",
    "context_ranks",
    "micro_batch_blocks",
    "recompute",
    "kept_attention_layers",
    "offload",
    "offload_activations",
    "reshard",
    "compile",
)
_BASE = "lora.base"
# What else may be trained, the mildest first, and what that changes.
_TRAININGS: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({"method": "lora"}, "trains adapters instead"),
    ({"method": "lora", _BASE: "nf4"}, "trains adapters on a frozen base in 4 bits"),
    *(
        ({"optimizer": name}, "another optimizer, so another run")
        for name, row in OPTIMIZERS.items()
        if row.is_stand_in
    ),
)


def what_would_fit(case: Case) -> list[str]:
    """Return what to change if nothing fits, as sentences; there is at least one."""
    sentences = [f"this would fit: {_in_words(remedy)}" for remedy in remedies_of(case)]
    if cluster := smallest_cluster(case):
        sentences.append(f"the smallest cluster that would do: {cluster}")
    if sentences:
        return sentences
    if case.train.strategy != AUTO and (cluster := smallest_cluster(_with_any_strategy(case))):
        return [f"with train.strategy: auto, the smallest cluster that would do: {cluster}"]
    block = (
        f"no number of GPUs would do: one block of {case.workload.block_tokens} tokens needs more "
        "memory"
    )
    if "context_ranks" in free_keys(case.train, case.fixed):
        return [f"{block} than all GPUs that can share it have; lower shard.block_tokens"]
    remedy = (
        "lower shard.block_tokens, or raise train.context_ranks, so that more GPUs share a block"
    )
    return [f"{block} than a GPU has; {remedy}"]


def _with_any_strategy(case: Case) -> Case:
    """Return the case with `strategy: auto`, which keeps a given number of ranks to a block."""
    kept = () if case.train.context_ranks == AUTO else ("context_ranks",)
    auto = case.by(case.train.model_copy(update={"strategy": AUTO}))
    return replace(auto, fixed=(*case.fixed, *kept))


@dataclass(frozen=True, kw_only=True)
class Remedy(Counterfactual):
    """A counterfactual that fits: new values of keys of `train`, and the host memory of a node.

    A key with None is left out; `memory_gb` is None if the nodes have enough. `cost_s` is what the
    choice compares (WayNeeds).
    """

    keys: Mapping[str, Any]
    memory_gb: int | None
    cost_s: float

    def includes(self, other: "Remedy") -> bool:
        """Return whether it sets all keys that `other` sets, if to other values."""
        own_gb = self.memory_gb or 0
        other_gb = other.memory_gb or 0
        return own_gb >= other_gb and self.keys.keys() >= other.keys.keys()

    def with_memory(self, needed_bytes: int) -> str:
        """Return it with the memory that a rank then needs, and with what else is trained."""
        effect = f"; {self.effect}" if self.effect else ""
        rank = "GPU" if self.case.machine.is_gpu else "rank"
        return f"{self.what}  ({gib(needed_bytes)} a {rank}{effect})"


def _written(keys: Mapping[str, Any], memory_gb: int | None) -> str:
    """Return a change as it is written in a config."""
    values = []
    for key, value in keys.items():
        as_written = str(value).lower() if isinstance(value, bool) else value
        if value is not None:
            values.append(f"{in_file(key)}: {as_written}")
    left_out = [in_file(key) for key, value in keys.items() if value is None]
    texts = [", ".join(values)] if values else []
    if left_out:
        them = "it" if len(left_out) == 1 else "them"
        texts.append(f"{' and '.join(left_out)} left out, so that the plan chooses {them}")
    if memory_gb is not None:
        texts.append(f"cluster.memory_gb: {memory_gb}, if the nodes have as much")
    return " and ".join(texts)


def _in_words(remedy: Remedy) -> str:
    """Return the remedy with the memory of what the plan then chooses, and what else is trained."""
    way = best_way(remedy.case)
    machine = remedy.case.machine
    return f"{remedy.with_memory(way.memory.total_bytes)}{_on_host(way.memory, machine)}"


def remedies_of(case: Case) -> list[Remedy]:
    """Return the changes of `train` and of the host's memory with which the training fits.

    Up to AT_MOST train the same, and one each of those that train something else. Those of the
    config alone come first. One that includes another is there only if it gains much.
    """
    found = _fitting(case, {}, "")
    for keys, other, effect in other_trainings(case):
        for remedy in _fitting(other, keys, effect)[:1]:
            if _is_worth_more(remedy, found):
                found.append(remedy)
    return sorted(found, key=lambda remedy: remedy.memory_gb is not None)


def _is_worth_more(remedy: Remedy, others: Sequence[Remedy]) -> bool:
    """Return whether it includes none of the others, or is much faster with the host memory there is."""
    least_s = remedy.cost_s * _WORTH_MORE if remedy.memory_gb is None else math.inf
    return not any(remedy.includes(other) and other.cost_s < least_s for other in others)


def other_trainings(case: Case) -> Iterator[tuple[Mapping[str, Any], Case, str]]:
    """Yield the keys, the case and the effect of each other training that the model allows."""
    train = case.train
    for wanted, effect in _TRAININGS:
        keys = {key: value for key, value in wanted.items() if _value(train, key) != value}
        if "method" in keys and ADAPTERS in OPTIMIZERS[train.optimizer].refuses:
            keys["optimizer"] = DEFAULT
        lora = train.lora.model_copy(update={"base": keys.get(_BASE, train.lora.base)})
        plain = {key: value for key, value in keys.items() if key != _BASE}
        other = train.model_copy(update={**plain, "lora": lora})
        problems = case.geometry.problems(other, case.workload.block_tokens)
        if keys and next(problems, None) is None:
            yield keys, case.by(other), effect


def _value(train: Train, key: str) -> Any:
    return train.lora.base if key == _BASE else getattr(train, key)


# Other ways to train the same. The table of ways has them all, once every key is left open: a
# change is what a way has other values of than the config.


def opened(case: Case) -> Case:
    """Return the case with all that says how the same is trained left to the plan."""
    keys = {**dict.fromkeys(_PLACEMENT, AUTO), "shard_ranks": None, "micro_batch_blocks": 1}
    fixed = [key for key in case.fixed if key not in _PLACEMENT]
    return replace(case.by(case.train.model_copy(update=keys)), fixed=fixed)


def _fitting(case: Case, keys: Mapping[str, Any], effect: str) -> list[Remedy]:
    """Return up to AT_MOST changes of placement with which `case`, changed by `keys`, fits.

    Those of the fewest keys come first, of these the fastest. Of the same keys it is the change
    that the plan would choose. More host memory counts as a key.
    """
    roomy = replace(case.machine, host_memory_bytes=ANY_BYTES)
    needs = WayNeeds.of(replace(opened(case), machine=roomy))
    given = _given_keys(case)
    lacks_host = ~needs.fits_on_host(case.machine)
    differing = np.array([*(_differs(needs.ways, case, key) for key in given), lacks_host])
    # the keys that each way changes, as the bits of a number
    changed = (1 << np.arange(len(differing))) @ differing
    best = [needs.best(changed == one) for one in np.unique(changed[needs.fits])]
    rows = [row for row in best if row is not None]
    rows.sort(key=lambda row: (int(changed[row]).bit_count(), needs.cost_s[row]))
    found: list[Remedy] = []
    for row in rows:
        placed = _placed(needs.ways.train(row), case, given, differing[:, row])
        then = _changed(case, placed)
        memory_gb = None
        if lacks_host[row]:
            memory_gb = _least_host_gb(replace(then, machine=roomy))
            enough = replace(case.machine, host_memory_bytes=from_gigabytes(memory_gb))
            then = replace(then, machine=enough)
        remedy = Remedy(
            what=_written({**keys, **placed}, memory_gb),
            case=then,
            effect=effect,
            keys={**keys, **placed},
            memory_gb=memory_gb,
            cost_s=float(needs.cost_s[row]),
        )
        if _is_worth_more(remedy, found) and fits_somehow(remedy.case):
            found.append(remedy)
    return found[:AT_MOST]


def leanest_remedy(case: Case, keys: Mapping[str, Any], effect: str) -> Remedy | None:
    """Return the change of placement that needs least memory, beside `keys`, even if nothing fits.

    It is None if no way to train is legal.
    """
    needs = WayNeeds.of(opened(case))
    if not len(needs.ways):
        return None
    row = needs.leanest(needs.every())
    given = _given_keys(case)
    differing = np.array([_differs(needs.ways, case, key)[row] for key in given])
    placed = _placed(needs.ways.train(row), case, given, differing)
    return Remedy(
        what=_written({**keys, **placed}, None),
        case=_changed(case, placed),
        effect=effect,
        keys={**keys, **placed},
        memory_gb=None,
        cost_s=math.inf,
    )


def _given_keys(case: Case) -> list[str]:
    """Return the keys of _PLACEMENT that the plan has to keep."""
    free = free_keys(case.train, case.fixed)
    return [key for key in _PLACEMENT if key not in free and getattr(case.train, key) != AUTO]


def _differs(ways: Ways, case: Case, key: str) -> Mask:
    """Return which ways have another value of a key than the config; one without effect is none."""
    train = case.train
    now = getattr(train, key)
    if key == "micro_batch_blocks":
        return np.asarray(ways.micro_batch_blocks != now)
    if key == "kept_attention_layers":
        tokens = case.workload.block_tokens
        can_keep = ways.which(lambda way: can_keep_attention(way, tokens), "recompute")
        return np.asarray(can_keep & (ways.kept_layers != now))
    if key == "shard_ranks" and train.strategy == "hsdp" and now is None:
        now = case.ranks.per_node
    if key == "offload_activations":
        now = keeps_on_host(train)
    return ways.which(lambda way: getattr(way, key) != now, key)


def _placed(way: Train, case: Case, given: Sequence[str], differing: Mask) -> dict[str, Any]:
    """Return the given keys that differ, with the values of a way.

    With `strategy: auto` they are to be left out: their value is None.
    """
    keys = [key for key, differs in zip(given, differing, strict=False) if differs]
    if case.train.strategy == AUTO:
        return dict.fromkeys(keys)
    return {key: getattr(way, key) for key in keys}


def _changed(case: Case, keys: Mapping[str, Any]) -> Case:
    """Return the case with these values of keys of `train`."""
    values = {
        key: Train.model_fields[key].default if value is None else value
        for key, value in keys.items()
    }
    fixed = [key for key in case.fixed if key not in keys]
    return replace(case.by(case.train.model_copy(update=values)), fixed=fixed)


# Host memory.


def host_memory(needed_bytes: int) -> str:
    """Return the config key that asks for this much host memory."""
    return f"cluster.memory_gb: {_in_gb(needed_bytes)}, if the nodes have as much"


def _in_gb(needed_bytes: float) -> int:
    return math.ceil(needed_bytes / from_gigabytes(1))


def host_limit_in_words(machine: Machine) -> str:
    """Return how much host memory a node has, and where that is known from."""
    limit = gigabytes(machine.host_limit_bytes or 0)
    if machine.is_host_assumed:
        return f"{limit} are assumed, as cluster.memory_gb is not set"
    return f"cluster.memory_gb gives {limit}"


def _on_host(memory: Memory, machine: Machine) -> str:
    """Return the host memory that a node needs, if assumed and used for offloading, else ''."""
    is_assumed = machine.is_host_assumed and memory.host_bytes > 0
    needed_bytes = host_bytes_of_node(memory, machine)
    return f", with {gigabytes(needed_bytes)} of host memory on each node" if is_assumed else ""


def _least_on_host(case: Case) -> str:
    """Return `_on_host` of the way that fits with the least host memory; there has to be one."""
    needs = WayNeeds.of(case, is_lean=True)
    row = int(needs.fits.nonzero()[0][needs.host_bytes[needs.fits].argmin()])
    return _on_host(needs.way(row)[1], case.machine)


def _least_host_gb(case: Case) -> int:
    """Return the least host memory of a node, in GB, with which a way fits; 0 if none does."""
    needs = WayNeeds.of(case, is_lean=True)
    return _in_gb(min(needs.host_bytes[needs.fits], default=0.0))


# Larger clusters.


def on(case: Case, machine: Machine) -> Case:
    """Return the training on another machine, with at least one micro-batch for each rank."""
    blocks = max(case.batch_blocks, blocks_at_once(case, machine))
    return replace(case, machine=machine, batch_blocks=blocks)


def blocks_at_once(case: Case, machine: Machine) -> int:
    """Return the fewest blocks that `machine` processes at once, with few ranks to each."""
    count = rank_counts(replace(case, machine=machine))[0]
    is_free = "micro_batch_blocks" in free_keys(case.train, case.fixed)
    return max(1, machine.ranks // count) * (1 if is_free else case.train.micro_batch_blocks)


def smallest_cluster(case: Case) -> str | None:
    """Return the smallest clusters that would fit, in words; None if there are none.

    These are the fewest GPUs of this kind, no fewer than now, and as many GPUs as now of the
    smallest larger kind.
    """
    machine = case.machine
    sentences = []
    same = next((shape for shape in _shapes(case) if fits_somehow(on(case, shape))), None)
    if same is not None:
        sentences.append(_more_of_these(case, same))
    kinds = [gpu for name in gpu_names() if (gpu := find_gpu(name))]
    larger = [
        gpu
        for gpu in kinds
        if machine.gpu_memory_bytes
        and gpu.memory_bytes > machine.gpu_memory_bytes
        and gpu.computes_in(case.train.precision)
    ]
    for gpu in sorted(larger, key=lambda gpu: gpu.memory_bytes):
        other = on(case, replace(machine, name=gpu.name, gpu_memory_bytes=gpu.memory_bytes))
        if fits_somehow(other):
            shape = (
                f"{units.count(machine.nodes, 'nodes')} of "
                f"{units.count(machine.ranks_per_node, 'GPUs')}"
            )
            with_host = _least_on_host(other)
            size = gib(gpu.memory_bytes)
            sentences.append(f"the configured {shape}, with {gpu.name} of {size}{with_host}")
            break
    return ", or ".join(sentences) or None


def _more_of_these(case: Case, shape: Machine) -> str:
    """Return the cluster of that shape in words, with the keys that it needs beside its size."""
    machine = case.machine
    nodes = f"cluster.nodes {shape.nodes} with " if shape.nodes > 1 else ""
    is_link_known = machine.nodes > 1 or machine.rates["between_bytes_s"].source in _BETWEEN_NODES
    more = ""
    if shape.nodes > 1 and not is_link_known:
        more = " (which needs cluster.internode_gbit_s too)"
    more += _least_on_host(on(case, shape))
    blocks = blocks_at_once(case, shape)
    if blocks > case.batch_blocks:
        tokens = blocks * case.workload.block_tokens
        more += f" and train.global_batch_tokens {tokens}, which changes the training"
    size = shape.ranks_per_node
    ranks = f"cluster.cpu_ranks {size}"
    if machine.is_gpu:
        ranks = f"cluster.gpus_per_node {size} of {machine.name}"
    way = leanest(on(case, shape))
    if way is not None and way[0].ranks_per_block > case.train.ranks_per_block:
        ranks += f", {way[0].ranks_per_block} {TO_A_BLOCK}"
    return f"{nodes}{ranks}{more}"


def _shapes(case: Case) -> Iterator[Machine]:
    """Yield clusters of these GPUs, fewest first, that can share the batch or need a larger one.

    Among equally many GPUs, one node comes first, then nodes of the present size, then fewer nodes.
    Nodes that use fewer of their GPUs than now, so that each GPU has more host memory, are tried
    only if no others would do.
    """
    machine = case.machine
    now = machine.ranks_per_node
    least = {size: _least_nodes(case, size) for size in {*range(now, MOST_PER_NODE + 1), now}}
    if min(least.values()) > MOST_NODES:
        least = {size: _least_nodes(case, size) for size in range(1, now)}
    least = {size: nodes for size, nodes in least.items() if nodes <= MOST_NODES}
    first = min((size * nodes for size, nodes in least.items()), default=1)
    for total in range(first, MOST_NODES * max(least, default=0) + 1):
        for size in sorted(least, key=lambda size: (size != total, size != now, -size)):
            if total % size == 0 and least[size] <= total // size <= MOST_NODES:
                shape = replace(machine, nodes=total // size, ranks_per_node=size)
                blocks = blocks_at_once(case, shape)
                if blocks > case.batch_blocks or case.batch_blocks % blocks == 0:
                    yield shape


def _least_nodes(case: Case, per_node: int) -> int:
    """Return a lower bound for the nodes of this size that fit and have no fewer ranks than now.

    Return MOST_NODES + 1 if none fits. The number is found by bisection for each number of ranks to
    a block, over the numbers of nodes whose ranks it divides and whose ranks make whole replicas of
    hsdp. The bisection assumes that of these more nodes never need more memory of a rank. A single
    rank is an exception, since it exchanges nothing. That does no harm, because the present size is
    known to be too small.
    """
    machine = case.machine
    # Ranks of a replica, of which there have to be two at least.
    is_hsdp = case.train.strategy == "hsdp" or case.train.shard_ranks is not None
    of_replica = (case.train.shard_ranks or per_node) if is_hsdp else 1
    now = math.ceil(max(machine.ranks, 2 * of_replica if is_hsdp else 1) / per_node)
    least = MOST_NODES + 1
    for count, given in _of_each_count(case, per_node).items():

        def is_enough(nodes: int, given: Case = given) -> bool:
            shape = replace(machine, nodes=nodes, ranks_per_node=per_node)
            return fits_somehow(on(given, shape))

        together = math.lcm(count, of_replica)
        whole = together // math.gcd(together, per_node)
        sizes = range(math.ceil(now / whole) * whole, least, whole)
        if sizes and is_enough(sizes[-1]):
            least = sizes[bisect_left(sizes, True, key=is_enough)]
    return least


def _of_each_count(case: Case, per_node: int) -> dict[int, Case]:
    """Return the same training for each number of ranks to a block that such nodes may have."""
    train = case.train
    if "context_ranks" not in free_keys(train, case.fixed):
        return {train.ranks_per_block: case}
    counts = allowed_counts(case.geometry, train, per_node, case.workload.block_tokens)
    fixed = (*case.fixed, "context_ranks")
    found = {}
    for count in counts:
        given = case.by(train.model_copy(update={"context_ranks": count}))
        found[count] = replace(given, fixed=fixed)
    return found
