"""What the ranks exchange within a node, and nodes with each other: bandwidths and latencies."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from pipeline_lib.base.errors import TrainingError
from pipeline_lib.calibrate.fit import link_of
from pipeline_lib.doctor.exchange import Collective, collectives
from pipeline_lib.plan.traffic import Kind, leaving_share
from pipeline_lib.train.dist import World

REPETITIONS = 3
PATIENCE_S = 0.1  # for each size of each collective


def group_of_node(world: World) -> dist.ProcessGroup | None:
    """The ranks of this rank's node; None if these are all. Raises TrainingError for nodes of different sizes."""
    if world.size == world.local_size:
        return None
    if world.size % world.local_size:
        raise TrainingError(
            f"rank {world.rank}: its node has {world.local_size} of {world.size} ranks, so nodes differ; start as many "
            "ranks on each"
        )
    starts = range(0, world.size, world.local_size)
    groups = [dist.new_group(list(range(start, start + world.local_size))) for start in starts]
    found: dist.ProcessGroup = groups[world.rank // world.local_size]
    return found


def link_rates(world: World, of_node: dist.ProcessGroup | None) -> dict[str, list[float]]:
    """Repetitions of `in_node_*` where a node has several ranks, and of `between_*` where there are several nodes."""
    found: dict[str, list[float]] = {}
    nodes = world.size // world.local_size
    if world.local_size > 1:
        found |= _fitted("in_node", world.device, of_node, lambda one: one.bus_bytes)
    if nodes > 1:
        found |= _fitted("between", world.device, None, lambda one: sent_by_node(one, nodes))
    return found


def sent_by_node(one: Collective, nodes: int) -> float:
    """Bytes that a node sends to others, by the plan's own arithmetic, which the rate is for."""
    kind: Kind = "all-reduce" if one.kind == "all_reduce" else "all-gather"
    return one.rounds * one.size_bytes * leaving_share(kind, one.ranks, nodes)


def _fitted(
    name: str, device: torch.device, group: dist.ProcessGroup | None, sent_bytes: Callable[[Collective], float]
) -> dict[str, list[float]]:
    links = []
    for _ in range(REPETITIONS):
        found = collectives(device, group, PATIENCE_S)
        links.append(link_of([(sent_bytes(one), one.seconds) for one in found]))
    return {f"{name}_bytes_s": [link[0] for link in links], f"{name}_latency_s": [link[1] for link in links]}
