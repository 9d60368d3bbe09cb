"""The axes along which ranks share the work of a run, and their process groups.

`replicate` are the copies of the trained state, `shard` the ranks that share a copy, and `context`
the ranks that share a block. Consecutive ranks share a block, and consecutive groups of them a
copy. Each rank of a block has its own shard, so `shard` counts them too.
"""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline_lib.config.train import Train
from pipeline_lib.model.batch import BatchShare
from pipeline_lib.model.context import Part
from pipeline_lib.train.dist import World


def state_mesh(world: World, train: Train) -> DeviceMesh:
    """Return the ranks over which FSDP2 shards the state: all, or with `hsdp` each copy's.

    A copy is a node by default.
    """
    if train.strategy == "fsdp":
        return _mesh(world, shard=world.size)
    shard = train.shard_ranks or world.local_size
    return _mesh(world, replicate=world.size // shard, shard=shard)


def batch_share_of(world: World, train: Train) -> BatchShare:
    """Return what this rank computes of a step's blocks. All ranks of `world` have to call it."""
    parts = train.ranks_per_block
    groups = world.size // parts
    if parts == 1:
        return BatchShare(world.rank, groups)
    mesh = _mesh(world, block=groups, context=parts)
    number = mesh.get_local_rank("context")
    process_group = mesh.get_group("context")
    return BatchShare(
        mesh.get_local_rank("block"), groups, Part(number, parts, process_group.group_name)
    )


def _mesh(world: World, **axes: int) -> DeviceMesh:
    """Arrange all ranks along `axes`, of the given sizes; along the last, ranks are consecutive."""
    return init_device_mesh(world.device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))
