"""Data parallel: every rank holds the whole model, and gradients are averaged in buckets during backward.

`gradient_compression` exchanges less, and `local_sgd_steps` more seldom; both change what is computed.
"""

import inspect
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline_lib.config.schema import Train
from pipeline_lib.train.checkpoint.staging import Copy, new_copies
from pipeline_lib.train.dist import LET_GO_S, World, mean_over_ranks
from pipeline_lib.train.layers import prepare_layers
from pipeline_lib.train.model import DTYPES
from pipeline_lib.train.parallel.compression import PowerSgd, exchange_factors, round_to_bf16
from pipeline_lib.train.parallel.native import Native
from pipeline_lib.train.state import STATE_KINDS

# Buffers are constants. torch 2.11 knows the first name, and 2.13 warns of it.
_KNOWN = inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS: dict[str, Any] = {
    ("forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers"): False
}


class Ddp(Native):
    """Weights, gradients and moments whole on every rank: fastest where they fit."""

    def __init__(self, world: World, train: Train, accumulation: int) -> None:
        """Serve `world`."""
        super().__init__(world, train, accumulation)
        self.is_local = train.local_sgd_steps > 1
        self.power = PowerSgd(train.powersgd_rank) if train.gradient_compression == "powersgd" else None
        self._is_laid = False  # whether DDP's buckets are as they will stay
        self._own_norm: Tensor  # of a rank that goes on by itself
        self._averaged_at = 0  # updates after which all ranks last held the same

    def spread(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Load the whole model to the device; average its gradients over ranks, unless these go on by themselves."""
        prepare_layers(model, self.train)
        load(model)
        self.own(model)
        if self.is_local:
            return model
        device = self.world.device
        # Every rank has read the same weights and drawn the same adapters: nothing is sent around at first.
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            init_sync=False,
            **_NO_BUFFERS,
        )
        if self.power is not None:
            wrapped.register_comm_hook(self.power, exchange_factors)
        elif self.train.gradient_compression == "bf16":
            wrapped.register_comm_hook(None, round_to_bf16)
        self._wrapped = wrapped
        return wrapped

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """No exchange before the last micro-batch."""
        return nullcontext() if is_last or self.is_local else self._wrapped.no_sync()

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision by autocast: fp32 weights are rounded for each product."""
        precision = self.train.precision
        return torch.autocast(self.world.device.type, DTYPES[precision], enabled=precision != "fp32")

    def grad_norm(self) -> Tensor:
        """The norm; of ranks that go on by themselves the mean, while each clips by its own."""
        norm = super().grad_norm()
        if not self.is_local:
            return norm
        self._own_norm = norm
        return mean_over_ranks(norm.clone())

    def update(self, lr: float, grad_norm: float) -> None:
        """Clip, update, and average the models if it is time to."""
        super().update(lr, float(self._own_norm) if self.is_local else grad_norm)
        if self.updates % self.train.local_sgd_steps == 0:
            self._average()

    def discard(self, grad_norm: float | None = None) -> None:
        """Drop the gradients, and with them what was left of earlier ones: a bad one may be in it."""
        super().discard(float(self._own_norm) if self.is_local and grad_norm is not None else grad_norm)
        if self.power is not None:
            self.power.reset()

    def drop_gradients(self) -> None:
        """Make them zero where they lie, in DDP's buckets: else micro-batches would fill memory beside these.

        The first time they go, and the buckets are laid in the order in which gradients came: DDP does that itself in
        the next forward pass, and then the old ones are still there while activations fill the memory.
        """
        if self.is_local:
            self.optimizer.zero_grad(set_to_none=True)
            return
        self.optimizer.zero_grad(set_to_none=not self._is_laid)
        if not self._is_laid:
            if self.world.device.type == "cuda":
                time.sleep(LET_GO_S)  # until NCCL's watchdog has let go of what was exchanged
            self._wrapped.reducer._rebuild_buckets()
            self._is_laid = True

    def snapshot(self, kinds: tuple[str, ...] = STATE_KINDS, copied: Copy = new_copies) -> dict[str, Tensor]:
        """Copies of this rank's share, of models that are averaged first if they differ."""
        self._average()
        return super().snapshot(kinds, copied)

    def restore(self, read: Callable[[Mapping[str, Tensor]], None], updates: int) -> None:
        """Read the same on every rank."""
        super().restore(read, updates)
        self._averaged_at = updates

    def _average(self) -> None:
        if not self.is_local or self._averaged_at == self.updates:
            return
        self.rewrite(self._average_values)
        self._averaged_at = self.updates

    def _average_values(self, tensors: dict[str, Tensor]) -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors.values()]:
            work.wait()
        torch._foreach_div_(list(tensors.values()), self.world.size)

    def own_state(self) -> dict[str, Tensor]:
        """PowerSGD's residuals and factors."""
        return super().own_state() | (self.power.state() if self.power is not None else {})

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Take them back."""
        super().load_own_state(state)
        if self.power is not None and state:
            self.power.load(state, self.world.device)
