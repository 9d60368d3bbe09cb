"""What torch's own strategies share: an AdamW over the parameters as they are spread, and its state by name."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline_lib.config.schema import Train
from pipeline_lib.train.dist import World
from pipeline_lib.train.optimizer import make_optimizer, set_learning_rate, trainable
from pipeline_lib.train.state import MOMENTS, STATE_KINDS, WEIGHTS


class Native:
    """The part of a strategy that does not depend on how parameters are spread."""

    def __init__(self, world: World, train: Train, accumulation: int) -> None:
        """Serve `world`."""
        self.world = world
        self.train = train
        self.parameters: dict[str, nn.Parameter] = {}
        self.optimizer: torch.optim.Optimizer
        self._norm: Tensor

    def own(self, model: nn.Module) -> None:
        """Make the optimizer of `model`, which has been spread and filled; moments are zero."""
        self.parameters = trainable(model)
        self.optimizer = make_optimizer(self.parameters, self.train)
        for parameter in self.parameters.values():
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS},
            }

    def autocast(self) -> AbstractContextManager[Any]:
        """Nothing: where parameters are cast when they are gathered."""
        return nullcontext()

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """Nothing: gradients are reduced after every micro-batch."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Torch's own."""
        loss.backward()  # type: ignore[no-untyped-call]

    def grad_norm(self) -> float:
        """The norm over all trained parameters, kept for `update`."""
        gradients = [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        self._norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return float(self._norm)

    def update(self, lr: float) -> None:
        """Clip, update, drop the gradients."""
        nn.utils.clip_grads_with_norm_(self.parameters.values(), self.train.max_grad_norm, self._norm)
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.discard()

    def discard(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self, kinds: tuple[str, ...] = STATE_KINDS) -> dict[str, Tensor]:
        """The state as it is in use, by its names in a checkpoint."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            held = {WEIGHTS: parameter.detach(), **self.optimizer.state[parameter]}
            found |= {f"{kind}.{name}": held[kind] for kind in kinds}
        return found

    def snapshot(self, kinds: tuple[str, ...] = STATE_KINDS) -> dict[str, Tensor]:
        """Copies of the state."""
        return {name: tensor.clone() for name, tensor in self.tensors(kinds).items()}

    def restore(self, read: Callable[[Mapping[str, Tensor]], None], updates: int) -> None:
        """Read into the state in place; Adam's bias correction counts the updates."""
        read(self.tensors())
        for parameter in self.parameters.values():
            self.optimizer.state[parameter]["step"].fill_(float(updates))

    def own_state(self) -> dict[str, Tensor]:
        """Nothing."""
        return {}

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to take back."""
