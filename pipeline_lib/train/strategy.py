"""What the training loop asks of a way to spread a model over ranks, and what strategies share."""

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline_lib.config.schema import Train
from pipeline_lib.core.errors import Diverged
from pipeline_lib.train.dist import World
from pipeline_lib.train.staging import Copy, new_copies
from pipeline_lib.train.state import STATE_KINDS

# Who writes what of a state that several ranks hold alike.


def balanced(sizes: Mapping[str, int], holders: int) -> dict[str, int]:
    """Which of `holders` (from 0) keeps each name, so that all keep about as much; the same wherever it is asked.

    The largest goes first, and each to the holder that has least so far.
    """
    kept = [0] * holders
    found: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        found[name] = min(range(holders), key=lambda holder: kept[holder])
        kept[found[name]] += sizes[name]
    return found


def share_of(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """What this rank writes of `tensors`: its share of those that every rank holds whole, its shards of the others.

    Of shards that replicas hold too, one replica writes them.
    """
    held = {name: _holders(tensor, world) for name, tensor in tensors.items()}
    mine: dict[str, Tensor] = {}
    for holders in {holders for holders, _ in held.values()}:
        sizes = {name: tensors[name].numel() for name in tensors if held[name][0] == holders}
        keepers = balanced(sizes, holders)
        mine |= {name: tensors[name] for name in sizes if keepers[name] == held[name][1]}
    return mine


def parts_of(tensor: Tensor) -> int:
    """How many parts `tensor` is in, one of which this rank holds."""
    if not isinstance(tensor, DTensor):
        return 1
    mesh = tensor.device_mesh
    return math.prod(mesh.size(d) for d, placement in enumerate(tensor.placements) if not placement.is_replicate())


def _holders(tensor: Tensor, world: World) -> tuple[int, int]:
    """How many ranks hold the same part of `tensor` as this one, and which of them it is."""
    if not isinstance(tensor, DTensor):
        return world.size, world.rank
    holders, own = 1, 0
    mesh = tensor.device_mesh
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            holders, own = holders * mesh.size(dimension), own * mesh.size(dimension) + mesh.get_local_rank(dimension)
    return holders, own


# The factor that lifts the gradients of fp16 into its range; it finds itself.

FIRST = 2.0**16
GROWS_AFTER = 2000


class LossScale:
    """A power of two: halved by a norm that is not finite, doubled after `GROWS_AFTER` finite ones in a row."""

    def __init__(self) -> None:
        """Begin as torch's GradScaler does."""
        self.value = FIRST
        self.finite_steps = 0

    def follow(self, norm: float) -> None:
        """Choose the factor of the next step by this step's gradient norm. Raises Diverged at 1 already."""
        if not math.isfinite(norm):
            if self.value <= 1.0:
                raise Diverged("gradients overflow fp16 at the least loss scale; train with precision: bf16")
            self.value, self.finite_steps = self.value / 2, 0
            return
        self.finite_steps += 1
        if self.finite_steps == GROWS_AFTER:
            self.value, self.finite_steps = self.value * 2, 0

    def state(self) -> Tensor:
        """[2] float64: the factor, and how many finite steps it has seen."""
        return torch.tensor([self.value, self.finite_steps], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Continue from what `state` gave, or from another strategy's factor, which comes first in its state."""
        self.value, self.finite_steps = float(state[0]), int(state[1]) if len(state) == 2 else 0


# What the training loop asks of a way to spread a model over ranks.


class Strategy(Protocol):
    """Spreads a plain model over the ranks of a world, and updates it.

    Gradients are averaged over ranks; the loop scales its loss so that the average is the token-exact mean. All ranks
    make the same calls in the same order.
    """

    def __init__(self, world: World, train: Train, accumulation: int) -> None:
        """Serve `world`; an optimizer step has `accumulation` micro-batches on each rank."""

    def spread(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Spread `model`, given on the meta device, let `load` fill what this rank keeps, and make the optimizer.

        Returns the module to call. Parameter names of `model` stay.
        """

    def autocast(self) -> AbstractContextManager[None]:
        """Surrounds every forward pass: the arithmetic's precision, where spreading does not set it."""

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Surrounds forward and backward of one micro-batch; after the last of a step gradients are averages."""

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` to those of the step."""

    def grad_norm(self) -> Tensor:
        """L2 norm of the step's averaged gradients: a float64 scalar on the rank's device, the same on every rank.

        Follows the last micro-batch. Torch's own strategies do not wait for the device.
        """

    def update(self, lr: float, grad_norm: float) -> None:
        """Clip the gradients, of that norm, to `max_grad_norm`, make one update at `lr`, and drop them."""

    def discard(self, grad_norm: float | None = None) -> None:
        """Drop the step's gradients; weights and moments keep every bit.

        Without their norm, which a step that counts knows, the loss scale of fp16 stays as it is.
        """

    def snapshot(self, kinds: tuple[str, ...] = STATE_KINDS, copied: Copy = new_copies) -> dict[str, Tensor]:
        """Copies in host memory of what this rank writes to a checkpoint: `weights.NAME`, `exp_avg.NAME`, ... in fp32.

        A tensor is whole on one rank, or a DTensor on several. `kinds` are those wanted, `copied` makes the copies.
        """

    def restore(self, read: Callable[[Mapping[str, Tensor]], None], updates: int) -> None:
        """Let `read` fill tensors by those names, and take them as weights and moments after `updates` updates."""

    def own_state(self) -> dict[str, Tensor]:
        """Copies in host memory of what this rank alone needs to continue bitwise: residuals, a loss scale."""

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `own_state` gave, on the same rank of as many; else it begins anew."""
