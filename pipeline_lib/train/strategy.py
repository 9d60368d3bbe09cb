"""The interface between training loop and distribution strategy, and what strategies share."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import Diverged
from pipeline_lib.train.dist import World
from pipeline_lib.train.staging import Copy, new_copies

# Which rank writes which tensor of a state that several ranks hold.


def balanced(sizes: Mapping[str, int], holders: int) -> dict[str, int]:
    """Assign each name to one of `holders` (from 0), evenly by size, the same on every rank.

    All keep about as much. The largest goes first, and each to the holder that has least so far.
    """
    kept = [0] * holders
    found: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        found[name] = min(range(holders), key=lambda holder: kept[holder])
        kept[found[name]] += sizes[name]
    return found


def keepers_of(sizes: Mapping[str, int], holders: int) -> dict[str, int]:
    """Assign each tensor of a state to one of `holders` as `balanced` does, kind by kind.

    The assignment of one of a kind does not depend on others. So a checkpoint has its weights in
    the same files as a result.
    """
    of_kinds: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        kind = name.partition(".")[0]
        of_kinds.setdefault(kind, {})[name] = size
    found: dict[str, int] = {}
    for of_one in of_kinds.values():
        found |= balanced(of_one, holders)
    return found


def share_of(tensors: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    """Return the tensors that this rank writes: its share of whole ones, its shards of others.

    The whole ones are those that every rank holds whole. If replicas hold the same shard, one of
    them writes it.
    """
    places = {name: holders_of(tensor, world) for name, tensor in tensors.items()}
    mine: dict[str, Tensor] = {}
    for holders in {holders for holders, _ in places.values()}:
        sizes = {name: tensors[name].numel() for name in tensors if places[name][0] == holders}
        keepers = keepers_of(sizes, holders)
        mine |= {name: tensors[name] for name in sizes if keepers[name] == places[name][1]}
    return mine


def grouped(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Yield the names of `sizes` in order, in groups of up to `most` or of one larger one."""
    names: list[str] = []
    total = 0
    for name, size in sizes.items():
        if names and total + size > most:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names


def holders_of(tensor: Tensor, world: World) -> tuple[int, int]:
    """Return how many ranks hold the same part of `tensor`, and this rank's index among them."""
    if not isinstance(tensor, DTensor):
        return world.size, world.rank
    holders, own = 1, 0
    mesh = tensor.device_mesh
    for dimension, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            holders = holders * mesh.size(dimension)
            own = own * mesh.size(dimension) + mesh.get_local_rank(dimension)
    return holders, own


# The dynamic loss scale, which lifts gradients into the range of fp16.

FIRST = 2.0**16  # as of torch's GradScaler
GROWS_AFTER = 2000
OVERFLOW = "gradients overflow fp16 at the least loss scale; train with precision: bf16"


@dataclass
class LossScale:
    """A power-of-two loss scale: halved by a norm that is not finite, else raised at times.

    It is doubled after `GROWS_AFTER` finite norms.
    """

    value: float = FIRST
    finite_steps: int = 0

    def follow(self, norm: float) -> None:
        """Adjust the scale for the next step by this step's gradient norm.

        Raises Diverged if it overflows at 1.
        """
        if not math.isfinite(norm):
            if self.value <= 1.0:
                raise Diverged(OVERFLOW)
            self.value = self.value / 2
            self.finite_steps = 0
            return
        self.finite_steps += 1
        if self.finite_steps == GROWS_AFTER:
            self.value = self.value * 2
            self.finite_steps = 0

    def state(self) -> Tensor:
        """Return [2] float64: the scale, and the number of finite steps since it last changed."""
        return torch.tensor([self.value, self.finite_steps], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Restore what `state` returned, or another strategy's scale, first in its state."""
        self.value, self.finite_steps = float(state[0]), int(state[1]) if len(state) == 2 else 0


# The interface that every strategy implements.


class Strategy(Protocol):
    """A way to distribute a plain model over the ranks of a world, and to update it.

    Gradients are averaged over ranks; the loop scales its loss so that the average is the
    token-exact mean. All ranks make the same calls in the same order.
    """

    def __init__(self, world: World, train: Train, accumulation: int) -> None:
        """Set up for `world`; an optimizer step has `accumulation` micro-batches on each rank."""

    def spread(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Distribute `model`, on the meta device, let `load` fill it, and make the optimizer.

        `load` fills this rank's part. Returns the module to call. Parameter names of `model` stay
        the same.
        """

    def autocast(self) -> AbstractContextManager[None]:
        """Return the context of a forward pass: its precision, if the distribution sets none."""
        return nullcontext()

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of a micro-batch's forward and backward pass.

        After the last of a step, gradients are averages.
        """
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of `loss` to those of the step."""

    def grad_norm(self) -> Tensor:
        """Return the L2 norm of the step's averaged gradients, the same on all ranks.

        It is a float64 scalar on the rank's device. Call it after the last micro-batch. Torch's own
        strategies do not wait for the device.
        """

    def update(self, lr: float, grad_norm: float) -> None:
        """Clip gradients of norm `grad_norm` to `max_grad_norm`, update at `lr`, and drop them."""

    def discard(self, grad_norm: float | None = None) -> None:
        """Drop the step's gradients; weights and moments keep every bit.

        Without `grad_norm`, as in the warm-up, the fp16 loss scale stays as it is.
        """

    def state_sizes(self, kinds: Collection[str] | None = None) -> dict[str, int]:
        """Return the elements of a checkpoint's whole tensors, `weights.NAME`, `exp_avg.NAME`, ...

        They are those of `kinds` (default: all). The order is the same on all ranks.
        """

    def snapshot(
        self, names: Collection[str] | None = None, copied: Copy = new_copies
    ) -> dict[str, Tensor]:
        """Return fp32 host copies of what this rank writes of the tensors `names` (default: all).

        The default is all of a checkpoint. A tensor is whole on one rank, or a DTensor on several.
        `copied` makes the copies.
        """

    def restore(self, read: Callable[[Mapping[str, Tensor]], None], updates: int) -> None:
        """Let `read` fill those tensors, as weights and moments after `updates` updates."""

    def begin_anew(self) -> None:
        """Restore the weights and moments that `spread` left."""

    def own_state(self) -> dict[str, Tensor]:
        """Return host copies of what only this rank needs to continue bitwise.

        That is, for example, residuals or a loss scale.
        """

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `own_state` returned on this rank of as large a world; else start anew."""
