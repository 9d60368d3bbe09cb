"""Whether a run fits at all, and what would have to change if it does not: settings, or a larger cluster.

Goes by memory alone, which is quick: every call of snakemake asks it.
"""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from pipeline_lib.config.cross_check import OFFLOADS
from pipeline_lib.config.schema import Train
from pipeline_lib.plan.choice import Setting
from pipeline_lib.plan.gpus import Gpu, find_gpu, gpu_names
from pipeline_lib.plan.machine import Machine
from pipeline_lib.plan.memory import Memory, predict
from pipeline_lib.plan.placement import free_keys, settled
from pipeline_lib.plan.prediction import fits, fits_on_gpu, host_bytes_of_node, lacks_host_memory
from pipeline_lib.plan.remedies import is_legal, remedies
from pipeline_lib.plan.units import from_gigabytes, gib, gigabytes

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
