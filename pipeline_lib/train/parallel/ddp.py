"""Data parallel: every rank holds the whole model, and gradients are averaged in buckets during backward."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline_lib.train.dist import World


class Ddp:
    """Weights, gradients and moments whole on every rank: fastest where they fit."""

    def __init__(self, world: World, precision: str) -> None:
        """Serve `world`; fp32 weights are cast to bf16 for each product where `precision` says so."""
        self._world = world
        self._precision = precision

    def wrap(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Load the whole model to the device and average its gradients over ranks."""
        load(model)
        device = self._world.device
        device_ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)

    def accumulating(self, wrapped: nn.Module, is_last: bool) -> AbstractContextManager[Any]:
        """No exchange before the last micro-batch."""
        if is_last or not isinstance(wrapped, DistributedDataParallel):
            return nullcontext()
        return wrapped.no_sync()

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision by autocast."""
        return torch.autocast(self._world.device.type, torch.bfloat16, enabled=self._precision == "bf16")
