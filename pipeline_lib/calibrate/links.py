"""Bandwidth and latency of collectives within a node and between nodes."""

from collections.abc import Callable

import torch.distributed as dist

from pipeline_lib.calibrate.fits import link_of
from pipeline_lib.calibrate.rates import REPETITIONS
from pipeline_lib.core.errors import TrainingError
from pipeline_lib.doctor.exchange import Collective, collectives
from pipeline_lib.plan.traffic import Kind, leaving_share
from pipeline_lib.train.dist import World

LINK_PATIENCE_S = 0.1  # for each size of each collective


def group_of_node(world: World) -> dist.ProcessGroup | None:
    """Return the process group of this rank's node; None if there is only one node.

    Raises TrainingError if the world size is not a multiple of the node's number of ranks.
    """
    if world.size == world.local_size:
        return None
    if world.size % world.local_size:
        raise TrainingError(
            f"rank {world.rank}: its node has {world.local_size} of {world.size} ranks, so nodes "
            "differ; start as many ranks on each"
        )
    starts = range(0, world.size, world.local_size)
    groups = [dist.new_group(list(range(start, start + world.local_size))) for start in starts]
    found: dist.ProcessGroup = groups[world.rank // world.local_size]
    return found


def link_rates(world: World, of_node: dist.ProcessGroup | None) -> dict[str, list[float]]:
    """Return repetitions of `in_node_*` rates (several ranks a node) and `between_*` rates.

    The latter are measured if there are several nodes.
    """
    nodes = world.size // world.local_size
    links: list[tuple[str, dist.ProcessGroup | None, Callable[[Collective], float]]] = []
    if world.local_size > 1:
        links.append(("in_node", of_node, lambda one: one.bus_bytes))
    if nodes > 1:
        links.append(("between", None, lambda one: sent_by_node(one, nodes)))
    rates: dict[str, list[float]] = {}
    for name, group, sent_bytes in links:
        fits = []
        for _ in range(REPETITIONS):
            measured = collectives(
                world.device, group, LINK_PATIENCE_S, ("all_reduce", "all_gather")
            )
            fits.append(link_of([(sent_bytes(one), one.seconds) for one in measured]))
        rates[f"{name}_bytes_s"] = [bandwidth for bandwidth, _ in fits]
        rates[f"{name}_latency_s"] = [latency_s for _, latency_s in fits]
    return rates


def sent_by_node(one: Collective, nodes: int) -> float:
    """Return the bytes that a node sends to others, counted as in the plan, which uses the rate."""
    kind: Kind = "all-reduce" if one.kind == "all_reduce" else "all-gather"
    return one.rounds * one.size_bytes * leaving_share(kind, one.ranks, nodes)
