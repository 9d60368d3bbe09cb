"""What the training loop asks of a way to spread a model over ranks."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from pipeline_lib.config.schema import Train
from pipeline_lib.train.checkpoint.staging import Copy, new_copies
from pipeline_lib.train.dist import World
from pipeline_lib.train.state import STATE_KINDS


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
