"""What the training loop asks of a way to spread a model over ranks."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn

from pipeline_lib.train.dist import World


class Strategy(Protocol):
    """Wraps a plain model and answers for its gradients.

    Gradients are averaged over ranks; the loop scales its loss so that the average is the token-exact mean.
    """

    def __init__(self, world: World, precision: str) -> None:
        """Serve `world`, with arithmetic in `precision` (`bf16` or `fp32`)."""

    def wrap(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Spread `model`, given on the meta device, and let `load` fill what this rank keeps of it.

        Returns the module to call. Parameter names of `model` stay.
        """

    def accumulating(self, wrapped: nn.Module, is_last: bool) -> AbstractContextManager[None]:
        """Surrounds one micro-batch; after the last of a step every rank has the average of all gradients."""

    def autocast(self) -> AbstractContextManager[None]:
        """Surrounds every forward pass: the arithmetic's precision, where wrapping does not set it."""
