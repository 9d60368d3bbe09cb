"""Data parallel (DDP): each rank holds the whole model; backward averages gradients in buckets.

`gradient_compression` exchanges fewer bytes, and `local_sgd_steps` exchanges less often; both
change the result.
"""

import inspect
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipeline_lib.config.train import Train
from pipeline_lib.model.build import DTYPES
from pipeline_lib.train.compression import PowerSgd, round_to_bf16
from pipeline_lib.train.dist import LET_GO_S, World, mean_over_ranks
from pipeline_lib.train.native import Native
from pipeline_lib.train.staging import Copy, new_copies

# Buffers are constants and need no sync. torch 2.11 has only `broadcast_buffers`, and 2.13 warns
# about it.
_KNOWN = inspect.signature(DistributedDataParallel).parameters
_NO_BUFFERS: dict[str, Any] = {
    ("forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers"): False
}


class Ddp(Native):
    """Data parallel: weights, gradients and moments whole on all ranks; fastest if they fit."""

    def __init__(self, world: World, train: Train, accumulation: int) -> None:
        """Set up for `world`, with local SGD or gradient compression if `train` asks for it."""
        super().__init__(world, train, accumulation)
        self.is_local = train.local_sgd_steps > 1
        self.power = (
            PowerSgd(train.powersgd_rank) if train.gradient_compression == "powersgd" else None
        )
        self._is_laid = False  # whether DDP's buckets have their final order
        self._own_norm: Tensor  # this rank's gradient norm, with local SGD
        self._averaged_at = 0  # number of updates at the last averaging

    def spread(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Load the whole model to the device and wrap it in DDP; not wrapped with local SGD."""
        super().spread(model, load)
        if self.is_local:
            return model
        device = self.world.device
        # All ranks have read the same weights and drawn the same adapters, so nothing needs to be
        # broadcast at first.
        wrapped = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            init_sync=False,
            **_NO_BUFFERS,
        )
        if self.power is not None:
            wrapped.register_comm_hook(self.power, PowerSgd.exchange)
        elif self.train.gradient_compression == "bf16":
            wrapped.register_comm_hook(None, round_to_bf16)
        self._wrapped = wrapped
        return wrapped

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """Suppress the exchange of gradients before the last micro-batch."""
        return nullcontext() if is_last or self.is_local else self._wrapped.no_sync()

    def autocast(self) -> AbstractContextManager[Any]:
        """Return autocast for mixed precision: fp32 weights are rounded for each product."""
        precision = self.train.precision
        return torch.autocast(
            self.world.device.type, DTYPES[precision], enabled=precision != "fp32"
        )

    def grad_norm(self) -> Tensor:
        """Return the gradient norm; with local SGD the ranks' mean, while each clips by its own."""
        norm = super().grad_norm()
        if not self.is_local:
            return norm
        self._own_norm = norm
        return mean_over_ranks(norm.clone())

    def update(self, lr: float, grad_norm: float) -> None:
        """Clip, update, and average the models of the ranks when local SGD is due to."""
        super().update(lr, float(self._own_norm) if self.is_local else grad_norm)
        if self.updates % self.train.local_sgd_steps == 0:
            self._average()

    def discard(self, grad_norm: float | None = None) -> None:
        """Drop the gradients and PowerSGD's state, whose residuals may contain a bad gradient."""
        super().discard(
            float(self._own_norm) if self.is_local and grad_norm is not None else grad_norm
        )
        if self.power is not None:
            self.power.reset()

    def drop_gradients(self) -> None:
        """Zero the gradients in place, in DDP's buckets: else micro-batches would allocate more.

        The first time, free the gradients and rebuild the buckets in the order in which gradients
        arrived. DDP would rebuild them itself in the next forward pass, when the old buckets are
        still there while activations fill the memory.
        """
        self.optimizer.zero_grad(set_to_none=self.is_local or not self._is_laid)
        if not self.is_local and not self._is_laid:
            if self.world.device.type == "cuda":
                time.sleep(LET_GO_S)  # until NCCL's watchdog releases the exchanged tensors
            self._wrapped.reducer._rebuild_buckets()
            self._is_laid = True

    def snapshot(
        self, names: Collection[str] | None = None, copied: Copy = new_copies
    ) -> dict[str, Tensor]:
        """Average the models if they differ, then copy this rank's share to host memory."""
        self._average()
        return super().snapshot(names, copied)

    def restore(self, read: Callable[[Mapping[str, Tensor]], None], updates: int) -> None:
        """Restore the same state on every rank, so that no averaging is due."""
        super().restore(read, updates)
        self._averaged_at = updates

    def _average(self) -> None:
        def average(tensors: dict[str, Tensor]) -> None:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors.values()]:
                work.wait()
            torch._foreach_div_(list(tensors.values()), self.world.size)

        if self.is_local and self._averaged_at != self.updates:
            self.rewrite(average)
            self._averaged_at = self.updates

    def own_state(self) -> dict[str, Tensor]:
        """Return PowerSGD's residuals and factors, and the loss scale."""
        return super().own_state() | (self.power.state() if self.power is not None else {})

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `own_state` returned."""
        super().load_own_state(state)
        if self.power is not None and state:
            self.power.load(state, self.world.device)
