"""Whether a run fits at all, and what would have to change if it does not: settings, or a larger cluster.

Goes by memory alone, which is quick: every call of snakemake asks it.
"""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from pipeline_lib.config.cross_check import OFFLOADS
from pipeline_lib.config.schema import Train
from pipeline_lib.plan.choice import Setting
from pipeline_lib.plan.gpus import Gpu, find_gpu, gpu_names
from pipeline_lib.plan.machine import Machine
from pipeline_lib.plan.memory import Memory, predict
from pipeline_lib.plan.prediction import fits
from pipeline_lib.plan.remedies import is_legal, remedies
from pipeline_lib.plan.units import from_gigabytes, gib

MOST_PER_NODE, MOST_NODES = 8, 512
_ANY_BYTES = 2**62
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
        """The same on another machine, with a batch that has at least a block for each rank."""
        blocks = max(self.setting.batch_blocks, machine.ranks)
        return replace(self, setting=replace(self.setting, machine=machine, batch_blocks=blocks))

    @property
    def fits(self) -> bool:
        """Whether one of the ways to train does."""
        return any(fits(memory, self.setting.machine) for _, memory in leanest(self))


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


def lacks_host_memory(memory: Memory, machine: Machine) -> bool:
    """Whether what a node's ranks offload is more than the memory of its host."""
    return memory.host_bytes * machine.ranks_per_node > machine.host_memory_bytes


def _lean_settings(wanted: Wanted) -> Iterator[Train]:
    train, held = wanted.train, wanted.held
    if train.strategy != "auto":
        yield train
        return
    lean = {"micro_batch_blocks": 1, "recompute": "full"}
    free = {key: value for key, value in lean.items() if key not in held}
    for strategy, offloads in OFFLOADS.items():
        # hsdp needs more than fsdp, always.
        if strategy in ("auto", "hsdp") or (strategy.startswith("zero") and not wanted.has_deepspeed):
            continue
        for offload in (train.offload,) if "offload" in held else offloads:
            yield train.model_copy(update={**free, "strategy": strategy, "offload": offload, "shard_ranks": None})


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
        host_bytes = remedy.memory.host_bytes * machine.ranks_per_node
        yield f"{remedy}{f' and {host_memory(host_bytes)}' if lacks_host_memory(remedy.memory, machine) else ''}"


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
        yield host_memory(min(memory.host_bytes for memory in ways) * machine.ranks_per_node)


def host_memory(needed_bytes: int) -> str:
    """The key that asks for so much host memory."""
    return f"cluster.memory_gb: {math.ceil(needed_bytes / from_gigabytes(1))}, if the nodes have as much"


def smallest_cluster(wanted: Wanted) -> str | None:
    """The fewest GPUs of this kind that would do, and the least of the larger kinds of which as many would.

    None where neither does.
    """
    machine, said = wanted.setting.machine, []
    same = next((larger for larger in _larger(machine) if wanted.on(larger).fits), None)
    if same is not None:
        nodes = f"cluster.nodes {same.nodes} with " if same.nodes > 1 else ""
        said.append(f"{nodes}cluster.gpus_per_node {same.ranks_per_node} of {kind_of(machine)}")
    for gpu in _larger_gpus(machine.gpu_memory_bytes or 0):
        if wanted.on(replace(machine, gpu_memory_bytes=gpu.memory_bytes)).fits:
            said.append(f"as many {gpu.name} of {gib(gpu.memory_bytes)} as now")
            break
    return ", or ".join(said) or None


def kind_of(machine: Machine) -> str:
    """What the machine's ranks run on, without their number."""
    return machine.name.rpartition(" x ")[2]


def _larger_gpus(than_bytes: int) -> list[Gpu]:
    """The kinds that have more memory, the smallest first."""
    known = [gpu for name in gpu_names() if (gpu := find_gpu(name)) is not None and gpu.has_bf16]
    return sorted((gpu for gpu in known if gpu.memory_bytes > than_bytes), key=lambda gpu: gpu.memory_bytes)


def _larger(machine: Machine) -> Iterator[Machine]:
    """Powers of two times what there is, first within the node."""
    while 2 * machine.ranks_per_node <= MOST_PER_NODE:
        machine = replace(machine, ranks_per_node=2 * machine.ranks_per_node)
        yield machine
    while 2 * machine.nodes <= MOST_NODES:
        machine = replace(machine, nodes=2 * machine.nodes)
        yield machine
