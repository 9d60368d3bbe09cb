"""Fully sharded data parallel (FSDP2): each rank keeps 1/N of weights, gradients and moments."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pipeline_lib.train.dist import World


class Fsdp:
    """Layers are gathered just before they are used; gradients are reduced in fp32."""

    def __init__(self, world: World, precision: str) -> None:
        """Serve `world`; gathered weights are bf16 where `precision` says so, the shards stay fp32."""
        self._world = world
        self._precision = precision

    def wrap(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Shard every decoder layer, then what is left (embedding, final norm, head) with the root.

        The model has no memory until it is sharded, so neither host nor device ever holds the whole of it.
        Embedding and head stay in one group since they may share their weight.
        """
        compute_dtype = torch.bfloat16 if self._precision == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        mesh = init_device_mesh(self._world.device.type, (self._world.size,), mesh_dim_names=("shard",))
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        load(model)
        return model

    def accumulating(self, wrapped: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """Gradients are reduced after every micro-batch: kept until the last, they would be whole on every rank."""
        return nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        """Nothing: the policy casts the gathered weights."""
        return nullcontext()


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks of a transformers decoder, also beneath adapters."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and name.endswith("layers"):
            return list(module)
    return []
