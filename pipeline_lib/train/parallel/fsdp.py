"""Fully sharded data parallel (FSDP2): each rank keeps 1/N of weights, gradients and moments."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pipeline_lib.train.parallel.native import Native


class Fsdp(Native):
    """Layers are gathered just before they are used; gradients are reduced in fp32, after every micro-batch.

    Kept until the last one, they would be whole on every rank.
    """

    def spread(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Shard every decoder layer, then what is left (embedding, final norm, head) with the root.

        The model has no memory until it is sharded, so neither host nor device ever holds the whole of it.
        Embedding and head stay in one group since they may share their weight.
        """
        compute_dtype = torch.bfloat16 if self.train.precision == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        mesh = self.mesh()
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        load(model)
        self.own(model)
        return model

    def mesh(self) -> DeviceMesh:
        """The ranks that share one copy of the model: all."""
        return init_device_mesh(self.world.device.type, (self.world.size,), mesh_dim_names=("shard",))


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformers decoder, also beneath adapters."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.endswith("layers"):
            return list(module)
    return []
