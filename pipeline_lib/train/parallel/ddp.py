"""Data parallel: every rank holds the whole model, and gradients are averaged in buckets during backward."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pipeline_lib.train.parallel.native import Native

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Ddp(Native):
    """Weights, gradients and moments whole on every rank: fastest where they fit."""

    def spread(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Load the whole model to the device and average its gradients over ranks."""
        load(model)
        device = self.world.device
        device_ids = [device.index] if device.type == "cuda" else None
        self._wrapped = DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)
        self.own(model)
        return self._wrapped

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """No exchange before the last micro-batch."""
        return nullcontext() if is_last else self._wrapped.no_sync()

    def autocast(self) -> AbstractContextManager[Any]:
        """Mixed precision by autocast: fp32 weights are rounded for each product."""
        precision = self.train.precision
        return torch.autocast(self.world.device.type, DTYPES[precision], enabled=precision != "fp32")
