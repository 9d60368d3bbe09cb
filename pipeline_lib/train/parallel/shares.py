"""Who writes what of a state that several ranks hold alike."""

import math
from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline_lib.train.dist import World


def balanced(sizes: Mapping[str, int], holders: int) -> dict[str, int]:
    """Which of `holders` (from 0) keeps each name, so that all keep about as much; the same wherever it is asked.

    The largest goes first, and each to the holder that has least so far.
    """
    kept = [0] * holders
    found: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        found[name] = min(range(holders), key=lambda holder: kept[holder])
        kept[found[name]] += sizes[name]
    return found


def share_of(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """What this rank writes of `tensors`: its share of those that every rank holds whole, its shards of the others.

    Of shards that replicas hold too, one replica writes them.
    """
    held = {name: _holders(tensor, world) for name, tensor in tensors.items()}
    mine: dict[str, Tensor] = {}
    for holders in {holders for holders, _ in held.values()}:
        sizes = {name: tensors[name].numel() for name in tensors if held[name][0] == holders}
        keepers = balanced(sizes, holders)
        mine |= {name: tensors[name] for name in sizes if keepers[name] == held[name][1]}
    return mine


def parts_of(tensor: Tensor) -> int:
    """How many parts `tensor` is in, one of which this rank holds."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(d) for d, placement in enumerate(tensor.placements) if not placement.is_replicate())


def _holders(tensor: Tensor, world: World) -> tuple[int, int]:
    """How many ranks hold the same part of `tensor` as this one, and which of them it is."""
    if not isinstance(tensor, DTensor):
        return world.size, world.rank
    holders, own = 1, 0
    mesh = tensor.device_mesh
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            holders, own = holders * mesh.size(dimension), own * mesh.size(dimension) + mesh.get_local_rank(dimension)
    return holders, own
