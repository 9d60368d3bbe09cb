"""Tensors of files that stay on a GPU from their first read on, for what reads them several times.

The proof of a merge passes over two models three times.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from pipeline_lib.model.weights import Stored


@dataclass(frozen=True)
class KeptTensor(Stored):
    """A stored tensor whose values stay on `device` once they are read."""

    device: torch.device

    @cached_property
    def values(self) -> Tensor:
        """The whole tensor on `device`. Raises DataError, Unreadable."""
        values = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        super().copy_to(values, self.whole)
        return values

    def copy_to(self, target: Tensor, slices: tuple[slice, ...]) -> None:
        """Copy as `Stored.copy_to` does, from the values that are kept."""
        own = slices[len(slices) - len(self.shape) :]
        target.copy_(self.values[own].view(target.shape))


@dataclass(frozen=True)
class Kept:
    """The tensors that `device` keeps, with `size_bytes` in all; none if it is None."""

    device: torch.device | None = None
    size_bytes: int = 0
    _tensors: dict[tuple[Path, str], KeptTensor] = field(default_factory=dict)

    def tensor(self, stored: Stored) -> Stored:
        """Return `stored`, or the tensor that keeps its values, which is the same in each call."""
        if self.device is None:
            return stored
        fresh = KeptTensor(**vars(stored), device=self.device)
        return self._tensors.setdefault((stored.path, stored.name), fresh)

    def tensors(self, stored: Mapping[str, Stored]) -> dict[str, Stored]:
        """Return `tensor` of each of `stored`, by its name there."""
        return {name: self.tensor(each) for name, each in stored.items()}
