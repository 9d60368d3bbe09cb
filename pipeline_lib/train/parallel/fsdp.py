"""Fully sharded data parallel (FSDP2): each rank keeps 1/N of weights, gradients and moments."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from pipeline_lib.train.layers import decoder_layers, prepare_layers
from pipeline_lib.train.model import DTYPES
from pipeline_lib.train.parallel.native import Native


class Fsdp(Native):
    """Layers are gathered just before they are used; gradients are reduced in fp32, after every micro-batch.

    Kept until the last one, they would be whole on every rank.
    """

    def spread(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Shard `unit_layers` decoder layers at a time, embedding and head by themselves, and what is left as the root.

        The model has no memory until it is sharded, so neither host nor device ever holds the whole of it.
        Embedding and head that share their weight stay in one group, the root's; else the head is gathered and reduced
        while layers compute.
        """
        prepare_layers(model, self.train)
        policy = MixedPrecisionPolicy(param_dtype=DTYPES[self.train.precision], reduce_dtype=torch.float32)
        offload = self._offload_policy()
        shard = partial(fully_shard, mesh=self.mesh(), mp_policy=policy, offload_policy=offload)
        layers, at_once = decoder_layers(model), self.train.unit_layers
        for start in range(0, len(layers), at_once):
            shard(layers[start : start + at_once], reshard_after_forward=self.train.reshard is not False)
        for end in _untied_ends(model):
            shard(end, reshard_after_forward=False)
        shard(model)
        if isinstance(offload, CPUOffloadPolicy):
            _give_host_memory(model)
        load(model)
        self.own(model)
        self._wrapped = cast(FSDPModule, model)
        return model

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """Layers that are kept after the forward pass are kept until the last micro-batch."""
        if self.train.reshard is False:
            self._wrapped.set_reshard_after_backward(is_last)
        return nullcontext()

    def restore(self, read: Callable[[Mapping[str, Tensor]], None], updates: int) -> None:
        """Read into the shards; what a validation left gathered of the root would go on being used as it was."""
        let_go(cast(nn.Module, self._wrapped))
        super().restore(read, updates)

    def mesh(self) -> DeviceMesh:
        """The ranks that share one copy of the model: all."""
        return init_device_mesh(self.world.device.type, (self.world.size,), mesh_dim_names=("shard",))

    def _offload_policy(self) -> OffloadPolicy:
        """Where the shards live between their uses; without GPUs that is host memory in any case."""
        if self.train.offload == "none":
            return OffloadPolicy()
        return CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda")


def let_go(model: nn.Module) -> None:
    """Give back all that FSDP has gathered of `model`, if it is spread by that."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _untied_ends(model: nn.Module) -> list[nn.Module]:
    """Embedding and head, unless they share their weight."""
    plain: Any = model.get_base_model() if isinstance(model, PeftModel) else model
    ends = [plain.get_input_embeddings(), plain.get_output_embeddings()]
    return ends if ends[0].weight is not ends[1].weight else []


def _give_host_memory(model: nn.Module) -> None:
    """Let the parameters of `model`, on the meta device, have memory of the host; all else stays where it is."""
    model._apply(  # type: ignore[no-untyped-call]
        lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
    )
