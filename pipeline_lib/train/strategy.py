"""The interface between the training loop and a distribution strategy."""

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import Tensor, nn

from pipeline_lib.config.train import Train
from pipeline_lib.train.dist import World
from pipeline_lib.train.staging import Copy, new_copies


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
