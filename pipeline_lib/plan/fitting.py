"""What has to change if no way to train fits: settings, or a larger cluster.

It considers memory alone, which is quick: every call of snakemake checks it.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from itertools import product, takewhile
from typing import Any

from pipeline_lib.arch.layers import can_keep_attention, is_sharded
from pipeline_lib.config.optimizers import ADAPTERS, DEFAULT, OPTIMIZERS
from pipeline_lib.config.train import AUTO, Train, in_file
from pipeline_lib.core import units
from pipeline_lib.core.units import from_gigabytes, gib, gigabytes
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.choose import WayNeeds, fits_somehow, leanest
from pipeline_lib.plan.context import allowed_counts
from pipeline_lib.plan.gpus import find_gpu, gpu_names
from pipeline_lib.plan.legal import OFFLOAD, rank_counts
from pipeline_lib.plan.machine import Machine
from pipeline_lib.plan.predict import fits, host_bytes_of_node, lacks_host_memory
from pipeline_lib.plan.remedies import STAND_INS, Load, Remedy, remedies
from pipeline_lib.plan.workload import free_keys
from pipeline_lib.records.plan import TO_A_BLOCK, Memory

MOST_PER_NODE, MOST_NODES = 8, 512
_ANY_BYTES = 2**62
# sources of a rate that is known rather than assumed
_BETWEEN_NODES = ("cluster.internode_gbit_s", "measured")


def what_would_fit(case: Case) -> list[str]:
    """Return what to change if nothing fits, as sentences: settings, and the smallest cluster."""
    found = [
        *_with_less_offloaded(case),
        *(_freed(case) if case.train.strategy == AUTO else _remedies(case)),
        *_with_less_kept(case),
        *_in_4_bits(case),
        *_in_parts(case),
    ]
    sentences = [f"this would fit: {text}" for text in found]
    if cluster := smallest_cluster(case):
        sentences.append(f"the smallest cluster that would do: {cluster}")
    if case.train.strategy != AUTO and not sentences:
        sentences += _with_another_strategy(case)
    if sentences:
        return sentences
    block = (
        f"no number of GPUs would do: one block of {case.workload.block_tokens} tokens needs more "
        "memory"
    )
    if "context_ranks" in free_keys(case.train, case.held):
        return [f"{block} than all GPUs that can share it have; lower shard.block_tokens"]
    remedy = (
        "lower shard.block_tokens, or raise train.context_ranks, so that more GPUs share a block"
    )
    return [f"{block} than a GPU has; {remedy}"]


def _with_another_strategy(case: Case) -> Iterator[str]:
    """Yield what `strategy: auto` would need if a strategy cannot train the model on any GPUs."""
    kept = () if case.train.context_ranks == AUTO else ("context_ranks",)
    free = replace(_with(case, strategy=AUTO), held=(*case.held, *kept))
    way = leanest(free)
    if way is not None and fits(way[1], case.machine):
        yield f"this would fit: train.strategy: auto{_on_host(way[1], case.machine)}"
    elif cluster := smallest_cluster(free):
        yield f"with train.strategy: auto, the smallest cluster that would do: {cluster}"


def _with(case: Case, **changes: Any) -> Case:
    """Return the case with other values of keys of `train`."""
    return case.by(case.train.model_copy(update=changes))


def _remedies(case: Case) -> Iterator[str]:
    """Yield other values of given keys, and the host memory that suffices without them.

    Keys that the plan may choose already have their leanest value.
    """
    machine = case.machine
    device_bytes = machine.gpu_memory_bytes or 0
    lean: dict[str, Any] = {"recompute": "full"} if case.train.recompute == AUTO else {}
    found: list[Remedy] = []
    for count in rank_counts(case):
        train = case.train.model_copy(update={**lean, "context_ranks": count})
        if _chooses_kept(case, train):
            train = train.model_copy(update={"kept_attention_layers": 0})
        load = Load(case.geometry, train, case.ranks, case.workload.block_tokens, case.batch_blocks)
        found = found or remedies(load, device_bytes, ratio=1.0, has_deepspeed=case.has_deepspeed)
    found = [replace(remedy, is_least=_may_need_more(case, remedy.changes)) for remedy in found]
    alone = _more_host_memory(case)

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


def _chooses_kept(case: Case, train: Train) -> bool:
    """Return whether the plan may choose how many layers keep attention's results."""
    can_keep = can_keep_attention(train, case.workload.block_tokens)
    return train.kept_attention_layers == AUTO and can_keep


def _may_need_more(case: Case, changes: dict[str, Any]) -> bool:
    """Return whether the plan still chooses keys that need memory after these changes."""
    changed = case.train.model_copy(update=changes)
    keys = ("recompute", "reshard") if is_sharded(changed) else ("recompute",)
    is_open = any(getattr(changed, key) == AUTO for key in keys)
    return is_open or _chooses_kept(case, changed)


def _with_less_offloaded(case: Case) -> Iterator[str]:
    """Yield less offloading than configured, if the host lacks memory that the GPUs have."""
    train = case.train
    machine = case.machine
    way = leanest(case)
    if not machine.is_gpu or way is None or not lacks_host_memory(way[1], machine):
        return
    # else the key is to be left out
    less = OFFLOAD[: OFFLOAD.index(train.offload)] if train.strategy != AUTO else ()
    places = [train.offload_activations]
    if train.offload_activations is True:
        places.append(False)
    for away, offload in product(places, [*less, train.offload]):
        changes = {"offload": offload, "offload_activations": away}
        changes = {key: value for key, value in changes.items() if value != getattr(train, key)}
        changed = leanest(_with(case, **changes)) if changes else None
        if changed is not None and fits(changed[1], machine):
            memory = changed[1]
            is_least = _may_need_more(case, changes)
            remedy = Remedy(changes, memory, memory.total_bytes, 0.0, is_least)
            yield f"{remedy}{_on_host(memory, machine)}"
            return


def _freed(case: Case) -> Iterator[str]:
    alone = _more_host_memory(case)
    for key in case.held:
        others = [other for other in case.held if other != key]
        if key != "context_ranks" and fits_somehow(replace(case, held=others)):
            yield f"{in_file(key)} left out, so that the plan chooses it"
    for changes, note in _other_trainings(case.train):
        other = _with(case, **changes)
        if other.train == case.train:
            continue
        if fits_somehow(other):
            yield f"{listed(changes)}  ({note}){_least_on_host(other)}"
            continue
        more = _more_host_memory(other)
        if more is not None and (alone is None or _in_gb(more) < _in_gb(alone)):
            yield f"{listed(changes)}  ({note}) and {host_memory(more)}"
    if alone is not None:
        yield host_memory(alone)


def _other_trainings(train: Train) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield changes that train something else, each with a note: other optimizers, or adapters."""
    for name in STAND_INS:
        yield {"optimizer": name}, "another optimizer, so another run"
    yield to_adapters(train), "trains adapters instead"


def to_adapters(train: Train) -> dict[str, Any]:
    """Return the changes that train adapters, by another optimizer if this one cannot."""
    changes = {} if train.method == "lora" else {"method": "lora"}
    if ADAPTERS in OPTIMIZERS[train.optimizer].refuses:
        changes["optimizer"] = DEFAULT
    return changes


def listed(changes: dict[str, Any]) -> str:
    """Return changes of `train` as they are written."""
    return ", ".join(f"train.{key}: {value}" for key, value in changes.items())


def _in_4_bits(case: Case) -> Iterator[str]:
    """Yield adapters on a 4-bit base if the GPUs have memory for these but not for unquantized."""
    changes = to_adapters(case.train)
    train = case.train.model_copy(update=changes)

    def fits_without_host(train: Train) -> bool:
        needs = WayNeeds.of(case.by(train), is_lean=True)
        return len(needs.ways) > 0 and bool((needs.fits & ~needs.put_on_host).any())

    if case.geometry.expert_layers or not case.machine.is_gpu or fits_without_host(train):
        return
    lora = train.lora.model_copy(update={"base": "nf4"})
    if fits_without_host(train.model_copy(update={"lora": lora})):
        keys = listed(changes | {"lora.base": "nf4"})
        yield f"{keys}  (keeps the frozen base in 4 bits)"


def _in_parts(case: Case) -> Iterator[str]:
    """Yield the fewest ranks that fit by sharing each block, where they can and the config says."""
    if "context_ranks" in free_keys(case.train, case.held):
        return
    held = [key for key in case.held if key != "context_ranks"]
    way = leanest(replace(_with(case, context_ranks=AUTO), held=held))
    if way is not None and fits(way[1], case.machine):
        yield f"train.context_ranks: {way[0].context_ranks}  (as many ranks share each block)"


def _with_less_kept(case: Case) -> Iterator[str]:
    """Yield `kept_attention_layers: auto` if that fits, where the config gives a number."""
    other = _with(case, kept_attention_layers=AUTO)
    if other.train != case.train and fits_somehow(other):
        yield "train.kept_attention_layers: auto  (more layers compute their attention again)"


def _more_host_memory(case: Case) -> int | None:
    """Return the least host memory of a node, in bytes, for these GPUs; None if none suffices."""
    return _least_host_bytes(on(case, replace(case.machine, host_memory_bytes=_ANY_BYTES)))


def _least_host_bytes(case: Case) -> int | None:
    """Return the least host memory of a node with which a way fits; None if none does."""
    needs = WayNeeds.of(case, is_lean=True)
    if not len(needs.ways) or not needs.fits.any():
        return None
    return math.ceil(float(needs.host_bytes[needs.fits].min()))


def host_memory(needed_bytes: int) -> str:
    """Return the config key that asks for this much host memory."""
    return f"cluster.memory_gb: {_in_gb(needed_bytes)}, if the nodes have as much"


def _in_gb(needed_bytes: int) -> int:
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


# Larger clusters.


def on(case: Case, machine: Machine) -> Case:
    """Return the training on another machine, with at least one micro-batch for each rank."""
    blocks = max(case.batch_blocks, blocks_at_once(case, machine))
    return replace(case, machine=machine, batch_blocks=blocks)


def blocks_at_once(case: Case, machine: Machine) -> int:
    """Return the fewest blocks that `machine` processes at once, with few ranks to each."""
    count = rank_counts(replace(case, machine=machine))[0]
    is_free = "micro_batch_blocks" in free_keys(case.train, case.held)
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
    if "context_ranks" not in free_keys(train, case.held):
        return {train.ranks_per_block: case}
    counts = allowed_counts(case.geometry, train, per_node, case.workload.block_tokens)
    held = (*case.held, "context_ranks")
    return {count: replace(_with(case, context_ranks=count), held=held) for count in counts}
