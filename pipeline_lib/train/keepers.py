"""Which rank writes which tensor of a state that several ranks hold."""

from collections.abc import Iterator, Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline_lib.train.dist import World


def balanced(sizes: Mapping[str, int], holders: int) -> dict[str, int]:
    """Assign each name to one of `holders` (from 0), evenly by size, the same on every rank.

    All keep about as much. The largest goes first, and each to the holder that has least so far.
    """
    kept = [0] * holders
    found: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        found[name] = min(range(holders), key=lambda holder: kept[holder])
        kept[found[name]] += sizes[name]
    return found


def keepers_of(sizes: Mapping[str, int], holders: int) -> dict[str, int]:
    """Assign each tensor of a state to one of `holders` as `balanced` does, kind by kind.

    The assignment of one of a kind does not depend on others. So a checkpoint has its weights in
    the same files as a result.
    """
    of_kinds: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        kind = name.partition(".")[0]
        of_kinds.setdefault(kind, {})[name] = size
    found: dict[str, int] = {}
    for of_one in of_kinds.values():
        found |= balanced(of_one, holders)
    return found


def share_of(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return the tensors that this rank writes: its share of whole ones, its shards of others.

    The whole ones are those that every rank holds whole. If replicas hold the same shard, one of
    them writes it.
    """
    places = {name: holders_of(tensor, world) for name, tensor in tensors.items()}
    mine: dict[str, Tensor] = {}
    for holders in {holders for holders, _ in places.values()}:
        sizes = {name: tensors[name].numel() for name in tensors if places[name][0] == holders}
        keepers = keepers_of(sizes, holders)
        mine |= {name: tensors[name] for name in sizes if keepers[name] == places[name][1]}
    return mine


def grouped(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Yield the names of `sizes` in order, in groups of up to `most` or of one larger one."""
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > most:
            yield names
            names = []
            total = 0
        names.append(name)
        total += size
    yield names


def holders_of(tensor: Tensor, world: World) -> tuple[int, int]:
    """Return how many ranks hold the same part of `tensor`, and this rank's index among them."""
    if not isinstance(tensor, DTensor):
        return world.size, world.rank
    holders = 1
    own = 0
    mesh = tensor.device_mesh
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            holders = holders * mesh.size(dimension)
            own = own * mesh.size(dimension) + mesh.get_local_rank(dimension)
    return holders, own
