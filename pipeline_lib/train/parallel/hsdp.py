"""Hybrid sharding: FSDP2 among a few ranks, such as those of a node, and replicas of that beside each other."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeline_lib.train.dist import mean_over_ranks
from pipeline_lib.train.parallel.fsdp import Fsdp


class Hsdp(Fsdp):
    """Layers are gathered among the ranks of one replica; replicas exchange no more than their parts of the gradients.

    Ranks that follow each other share a replica. Gradients are reduced in fp32: within a replica after every
    micro-batch, across replicas after the last.
    """

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """Replicas meet after the last micro-batch only."""
        self._wrapped.set_requires_all_reduce(is_last)
        return super().accumulating(is_last)

    def grad_norm(self) -> Tensor:
        """The norm, of one value on all ranks: each replica adds it up by itself, maybe in another order.

        Else replicas would clip by factors that differ in the last bit, and nothing would bring them together again.
        Norms are in fp32 and their mean in float64: of equal ones it is that very number, for any number of ranks.
        """
        return mean_over_ranks(super().grad_norm())

    def mesh(self) -> DeviceMesh:
        """Replicas of `shard_ranks` ranks each, else of the ranks of a node."""
        shard_ranks = self.train.shard_ranks or self.world.local_size
        shape = (self.world.size // shard_ranks, shard_ranks)
        return init_device_mesh(self.world.device.type, shape, mesh_dim_names=("replicate", "shard"))
