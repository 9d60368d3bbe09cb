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
from pipeline_lib.plan.prediction import fits, host_bytes_of_node, lacks_host_memory
from pipeline_lib.plan.remedies import is_legal, remedies
from pipeline_lib.plan.units import from_gigabytes, gib, gigabytes

MOST_PER_NODE, MOST_NODES = 8, 512
_ANY_BYTES = 2**62
_DEFAULT = Train()
_TRAINS_SOMETHING_ELSE = (
    ("optimizer", "adamw_8bit", "another optimizer, so another run"),
    ("method", "lora", "trains adapters instead"),
)


@dataclass(frozen=True)
class Wanted:
    """What is to be trained: `strategy: auto` leaves open what is not `held`, any other leaves nothing."""

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
        is_free = self.train.strategy == "auto" and "micro_batch_blocks" not in self.held
        return 1 if is_free else self.train.micro_batch_blocks

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

    The one that needs least comes first, of those for which the host's memory is enough, if it is for any.
    """
    setting, ways = wanted.setting, []
    machine = setting.machine
    for train in _lean_settings(wanted):
        if is_legal(train, setting.ranks):
            accumulation = max(1, setting.batch_blocks // (setting.ranks.total * train.micro_batch_blocks))
            block_tokens = setting.workload.block_tokens
            ways.append((train, predict(setting.geometry, train, setting.ranks, block_tokens, accumulation)))
    return sorted(ways, key=lambda way: (lacks_host_memory(way[1], machine), way[1].total_bytes))


def _lean_settings(wanted: Wanted) -> Iterator[Train]:
    train, held = wanted.train, wanted.held
    if train.strategy != "auto":
        yield train
        return
    lean = {"micro_batch_blocks": 1, "recompute": "full"}
    free = {key: value for key, value in lean.items() if key not in held}
    shard_ranks = train.shard_ranks if "shard_ranks" in held else None
    # hsdp needs more than fsdp, always; who says how many ranks shard wants nothing else.
    strategies = [name for name in OFFLOADS if name not in ("auto", "hsdp")] if shard_ranks is None else ["hsdp"]
    for strategy in filter(wanted.can_run, strategies):
        for offload in (train.offload,) if "offload" in held else OFFLOADS[strategy]:
            changes = {"strategy": strategy, "offload": offload, "shard_ranks": shard_ranks}
            yield train.model_copy(update={**free, **changes})


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
    """Other values of keys that are given."""
    machine, setting = wanted.setting.machine, wanted.setting
    device_bytes, block_tokens = machine.gpu_memory_bytes or 0, setting.workload.block_tokens
    for remedy in remedies(setting.geometry, wanted.train, setting.ranks, block_tokens, device_bytes, 1.0):
        if not wanted.can_run(remedy.changes.get("strategy", "")):
            continue
        host_bytes = host_bytes_of_node(remedy.memory, machine)
        is_too_much = lacks_host_memory(remedy.memory, machine)
        yield f"{remedy}{f' and {host_memory(host_bytes)}' if is_too_much else _on_host(host_bytes, machine)}"


def _freed(wanted: Wanted) -> Iterator[str]:
    """What `auto` could do without a key that it has to keep, or with what trains something else."""
    for key in wanted.held:
        if replace(wanted, held=[other for other in wanted.held if other != key]).fits:
            yield f"train.{key} left out, so that the plan chooses it"
    for key, value, note in _TRAINS_SOMETHING_ELSE:
        changed = wanted.train.model_copy(update={key: value})
        if changed != wanted.train and replace(wanted, train=changed).fits:
            yield f"train.{key}: {value}  ({note})"
    machine = wanted.setting.machine
    roomy = replace(machine, host_memory_bytes=_ANY_BYTES)
    ways = [memory for _, memory in leanest(wanted.on(roomy)) if fits(memory, roomy)]
    if ways:
        yield host_memory(min(host_bytes_of_node(memory, machine) for memory in ways))


def host_memory(needed_bytes: int) -> str:
    """The key that asks for so much host memory."""
    return f"cluster.memory_gb: {math.ceil(needed_bytes / from_gigabytes(1))}, if the nodes have as much"


def _on_host(needed_bytes: int, machine: Machine) -> str:
    """What a node's host has to have for it, where nobody says what it has."""
    is_unknown = machine.host_memory_bytes is None and machine.is_gpu and needed_bytes > 0
    return f", with {gigabytes(needed_bytes)} of host memory on each node" if is_unknown else ""


def _least_on_host(wanted: Wanted) -> str:
    """The same for the way that needs least of it, of those that fit."""
    machine = wanted.setting.machine
    ways = [memory for _, memory in leanest(wanted) if fits(memory, machine)]
    return _on_host(min(host_bytes_of_node(memory, machine) for memory in ways), machine)


def smallest_cluster(wanted: Wanted) -> str | None:
    """The fewest GPUs of this kind that would do, and the least of the larger kinds of which as many would.

    None where neither does.
    """
    machine, said = wanted.setting.machine, []
    same = next((shape for shape in _shapes(wanted) if wanted.on(shape).fits), None)
    if same is not None:
        nodes = f"cluster.nodes {same.nodes} with " if same.nodes > 1 else ""
        more = _least_on_host(wanted.on(same)) + _batch_for(wanted, same)
        said.append(f"{nodes}cluster.gpus_per_node {same.ranks_per_node} of {machine.name}{more}")
    for gpu in _larger_gpus(machine.gpu_memory_bytes or 0):
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


def _larger_gpus(than_bytes: int) -> list[Gpu]:
    """The kinds that have more memory, the smallest first."""
    known = [gpu for name in gpu_names() if (gpu := find_gpu(name)) is not None and gpu.has_bf16]
    return sorted((gpu for gpu in known if gpu.memory_bytes > than_bytes), key=lambda gpu: gpu.memory_bytes)


def _shapes(wanted: Wanted) -> Iterator[Machine]:
    """Clusters of these GPUs that can share the batch, or need a larger one: the fewest GPUs first, on few nodes."""
    machine, batch_blocks = wanted.setting.machine, wanted.setting.batch_blocks
    per_node = sorted({*range(1, MOST_PER_NODE + 1), machine.ranks_per_node}, reverse=True)
    for total in range(_least_ranks(wanted), MOST_NODES * per_node[0] + 1):
        blocks = total * wanted.blocks_at_once
        if blocks > batch_blocks or batch_blocks % blocks == 0:
            for size in per_node:
                if total % size == 0 and total // size <= MOST_NODES:
                    yield replace(machine, nodes=total // size, ranks_per_node=size)


def _least_ranks(wanted: Wanted) -> int:
    """A number of ranks below which nothing fits, found in a few trials.

    Of all clusters with so many ranks the one with a rank on each node lets a rank offload most; and more ranks never
    need more, but for the second, with which the exchange begins, and for replicas, which not all numbers make.
    """
    has_replicas = "hsdp" in {train.strategy for train in _lean_settings(wanted)}
    if has_replicas or wanted.on(replace(wanted.setting.machine, nodes=1, ranks_per_node=1)).fits:
        return 1
    sizes = range(2, MOST_NODES * MOST_PER_NODE + 1)
    machine = wanted.setting.machine
    place = bisect_left(sizes, True, key=lambda size: wanted.on(replace(machine, nodes=size, ranks_per_node=1)).fits)
    return sizes.start + place
