"""Fully sharded data parallel (FSDP2), and hybrid sharding (HSDP).

With FSDP2, each rank keeps 1/N of weights, gradients and moments. HSDP is FSDP2 within groups of
ranks, such as nodes, each of which holds one replica.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from pipeline_lib.config.checks import TORCH_CASTS_INTEGERS, shards_integers
from pipeline_lib.core.errors import TrainingError
from pipeline_lib.model.build import DTYPES, decoder_layers, prepare_layers
from pipeline_lib.model.weights import without_adapters
from pipeline_lib.train.dist import mean_over_ranks
from pipeline_lib.train.mesh import state_mesh
from pipeline_lib.train.native import Native
from pipeline_lib.train.state import own_part


class Fsdp(Native):
    """FSDP2: layers are gathered just before use; every micro-batch reduces gradients, in fp32.

    With `gradient_compression: bf16` they are reduced in bf16, and still added up over
    micro-batches in fp32.

    Gradients kept until the last micro-batch would be whole on every rank.
    """

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass; offloaded gradients of earlier micro-batches are added after it.

        FSDP2 copies a gradient to page-locked memory during the backward pass, if the parameter has
        none yet. Otherwise it waits for each copy, which goes to new pageable memory: 40 times as
        slow (benchmarks/RESULTS.md). CPUs would not need that; they do the same, so that tests
        without GPUs take this way too.
        """
        if self.train.offload == "none":
            super().backward(loss)
            return
        earlier = {
            parameter: parameter.grad
            for parameter in self.parameters.values()
            if parameter.grad is not None
        }
        self.drop_gradients()
        super().backward(loss)
        for parameter, gradient in earlier.items():
            if parameter.grad is None:  # this micro-batch did not use it
                parameter.grad = gradient
            else:
                own_part(parameter.grad).add_(own_part(gradient))

    def grad_norm(self) -> Tensor:
        """Return the gradient norm; that of offloaded ones is computed on the device one by one.

        On the host torch computes it at 10 GB/s, with 4 threads and with 16
        (benchmarks/RESULTS.md).
        """
        if self.train.offload == "none" or self.world.device.type == "cpu":
            return super().grad_norm()
        return self.norm_on_device()

    def norm_on_device(self) -> Tensor:
        """Return the gradient norm, computed on the device: tensors in fp32, the sum in float64."""
        device = self.world.device
        squared = torch.zeros((), dtype=torch.float64, device=device)
        for gradient in self.gradients():
            norm = torch.linalg.vector_norm(own_part(gradient).to(device, non_blocking=True))
            squared += norm.double().square()
        dist.all_reduce(squared, group=self._mesh.get_group("shard"))
        return squared.sqrt() / self._scale

    def spread(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Shard `unit_layers` decoder layers at a time, embedding and head apart, the rest as root.

        The model has no memory until it is sharded, so neither host nor device ever holds the whole
        of it. If embedding and head share their weight, both stay in the root's group. Otherwise
        the head is gathered and reduced while layers compute. Raises TrainingError if this torch
        cannot shard a base in 4 bits.
        """
        if self.train.lora.base == "nf4" and not shards_integers():
            raise TrainingError(
                f"train.lora.base: nf4 with train.strategy: {self.train.strategy} "
                f"{TORCH_CASTS_INTEGERS}"
            )
        prepare_layers(model, self.train)
        reduced = torch.bfloat16 if self.train.gradient_compression == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[self.train.precision], reduce_dtype=reduced
        )
        offload = OffloadPolicy()
        if self.train.offload != "none":  # without GPUs, shards are in host memory in any case
            offload = CPUOffloadPolicy(pin_memory=self.world.device.type == "cuda")
        self._mesh = state_mesh(self.world, self.train)
        shard = partial(fully_shard, mesh=self._mesh, mp_policy=policy, offload_policy=offload)
        layers = decoder_layers(model)
        at_once = self.train.unit_layers
        for start in range(0, len(layers), at_once):
            shard(
                layers[start : start + at_once],
                reshard_after_forward=self.train.reshard is not False,
            )
        plain = without_adapters(model)
        ends = [plain.get_input_embeddings(), plain.get_output_embeddings()]
        if ends[0].weight is not ends[1].weight:
            for end in ends:
                shard(end, reshard_after_forward=False)
        shard(model)
        if self.train.offload != "none":  # the others get their memory from `load`
            model._apply(  # type: ignore[no-untyped-call]
                lambda tensor: torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor
            )
        self._load = partial(load, model)
        self._load()
        self.own(model)
        self._wrapped = cast(FSDPModule, model)
        return model

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """With `reshard: false`, keep layers gathered until the last micro-batch."""
        if self.train.reshard is False:
            self._wrapped.set_reshard_after_backward(is_last)
        return nullcontext()

    def restore(self, read: Callable[[Mapping[str, Tensor]], None], updates: int) -> None:
        """Restore into the shards, after freeing what a validation gathered for the root."""
        let_go(cast(nn.Module, self._wrapped))
        super().restore(read, updates)


def let_go(model: nn.Module) -> None:
    """Free all that FSDP has gathered of `model`; do nothing if it is distributed otherwise."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


class Hsdp(Fsdp):
    """Hybrid sharding: layers are gathered within replicas, which exchange only gradient shards.

    Consecutive ranks share a replica. Gradients are reduced in fp32: within a replica after every
    micro-batch, across replicas after the last.
    """

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """Reduce gradients across replicas after the last micro-batch only."""
        self._wrapped.set_requires_all_reduce(is_last)
        return super().accumulating(is_last)

    def grad_norm(self) -> Tensor:
        """Return the norm, made equal on all ranks: replicas may add it up in different orders.

        Otherwise replicas would clip by factors that differ in the last bit, and would stay
        different. Norms are in fp32 and their mean in float64, so the mean of equal norms is
        exactly that norm, for any number of ranks.
        """
        return mean_over_ranks(super().grad_norm())
