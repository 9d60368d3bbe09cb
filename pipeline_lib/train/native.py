"""What strategies on torch alone share: updates of distributed parameters, and state by name."""

from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline_lib.config.optimizers import OPTIMIZERS
from pipeline_lib.config.train import Train
from pipeline_lib.core.run_folder import WEIGHTS
from pipeline_lib.model.build import prepare_layers
from pipeline_lib.train.adamw_8bit import is_8bit, take_values, values_of
from pipeline_lib.train.dist import World
from pipeline_lib.train.keepers import grouped, holders_of, share_of
from pipeline_lib.train.loss_scale import LossScale
from pipeline_lib.train.optimizer import (
    make_optimizer,
    set_learning_rate,
    trainable,
    update,
    zero_moments,
)
from pipeline_lib.train.staging import Copy, new_copies
from pipeline_lib.train.state import LOSS_SCALE, state_kinds
from pipeline_lib.train.strategy import Strategy

VALUES_AT_ONCE_BYTES = 2 * 10**9  # fp32 values of a state with 8-bit moments, on each rank's device


class Native(Strategy):
    """The part of a strategy that does not depend on how parameters are distributed."""

    def __init__(self, world: World, train: Train, accumulation: int) -> None:
        """Set up for `world`; `own` makes the optimizer."""
        self.world = world
        self.train = train
        self.parameters: dict[str, nn.Parameter] = {}
        self.updates = 0
        self.optimizer: torch.optim.Optimizer
        self.loss_scale = LossScale() if train.precision == "fp16" else None

    def spread(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Load the whole `model` and make its optimizer."""
        prepare_layers(model, self.train)
        self._load = partial(load, model)
        self._load()
        self.own(model)
        return model

    def own(self, model: nn.Module) -> None:
        """Make the optimizer of `model`, already distributed and loaded, with zero moments."""
        self.parameters = trainable(model)
        self.optimizer = make_optimizer(self.parameters, self.train)
        zero_moments(self.optimizer)

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the loss, multiplied by the fp16 loss scale if there is one."""
        if self.loss_scale is not None:
            loss = loss * self.loss_scale.value
        loss.backward()  # type: ignore[no-untyped-call]

    def grad_norm(self) -> Tensor:
        """Return the L2 norm over all trained parameters; it is not finite if fp16 overflowed."""
        norm = nn.utils.get_total_norm(self.gradients())
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return whole.to(self.world.device, torch.float64) / self._scale  # a power of two

    def gradients(self) -> list[Tensor]:
        """Return the gradients of the parameters that have one."""
        return [
            parameter.grad for parameter in self.parameters.values() if parameter.grad is not None
        ]

    def update(self, lr: float, grad_norm: float) -> None:
        """Clip the gradients, make one update, and drop them."""
        # One factor for clipping and the loss scale, so that gradients are rounded once; as in
        # torch's clip_grad_norm_.
        factor = min(1.0, self.train.max_grad_norm / (grad_norm + 1e-6)) / self._scale
        set_learning_rate(self.optimizer, lr)
        update(self.optimizer, factor)
        self.updates += 1
        self._end_step(grad_norm)

    def discard(self, grad_norm: float | None = None) -> None:
        """Drop the gradients, and halve the loss scale if they overflowed."""
        self._end_step(grad_norm)

    def _end_step(self, grad_norm: float | None) -> None:
        if self.loss_scale is not None and grad_norm is not None:
            self.loss_scale.follow(grad_norm)
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Free the memory of the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def rewrite(self, change: Callable[[dict[str, Tensor]], None]) -> None:
        """Let `change` modify the fp32 state, by checkpoint name, at once or in groups.

        It is a few at a time with 8-bit moments. All dequantized values together would take as much
        memory as moments in fp32. Every rank makes the same calls of `change`.
        """
        stored = self._stored()
        if OPTIMIZERS[self.train.optimizer].has_fp32_moments:
            change(stored)
            return
        # Groups are the same on all ranks, though parts of a tensor may differ in size and only
        # some have 8 bits: reading is collective. A group's values are freed before the next
        # group's are made.
        of_rank = {
            name: 4 * tensor.numel() * holders_of(tensor, self.world)[0] // self.world.size
            for name, tensor in stored.items()
        }
        for names in grouped(of_rank, VALUES_AT_ONCE_BYTES):
            _rewrite({name: stored[name] for name in names}, change)

    def _stored(self, kinds: Collection[str] | None = None) -> dict[str, Tensor]:
        stored: dict[str, Tensor] = {}
        chosen = state_kinds(self.train) if kinds is None else kinds
        for name, parameter in self.parameters.items():
            by_kind = {WEIGHTS: parameter.detach(), **self.optimizer.state[parameter]}
            stored |= {f"{kind}.{name}": by_kind[kind] for kind in chosen if kind in by_kind}
        return stored

    def state_sizes(self, kinds: Collection[str] | None = None) -> dict[str, int]:
        """Return the elements of each whole tensor of a checkpoint."""
        return {name: tensor.numel() for name, tensor in self._stored(kinds).items()}

    def snapshot(
        self, names: Collection[str] | None = None, copied: Copy = new_copies
    ) -> dict[str, Tensor]:
        """Copy this rank's share to host memory; 8-bit moments are dequantized one at a time."""
        stored = self._stored()
        if names is not None:
            stored = {name: stored[name] for name in names}
        mine = share_of(stored, self.world)
        return copied(
            (name, values_of(tensor) if is_8bit(tensor) else tensor)
            for name, tensor in mine.items()
        )

    def restore(self, read: Callable[[Mapping[str, Tensor]], None], updates: int) -> None:
        """Let `read` fill the state; set the step count of Adam's bias correction to `updates`."""
        self.rewrite(read)
        self.updates = updates
        for parameter in self.parameters.values():
            self.optimizer.state[parameter]["step"].fill_(float(updates))

    def begin_anew(self) -> None:
        """Load the model again, and set moments to zero."""

        def clear(tensors: Mapping[str, Tensor]) -> None:
            for name, tensor in tensors.items():
                if not name.startswith(WEIGHTS):
                    tensor.zero_()

        self.restore(clear, updates=0)
        self._load()

    def own_state(self) -> dict[str, Tensor]:
        """Return the fp16 loss scale, if there is one."""
        return {} if self.loss_scale is None else {LOSS_SCALE: self.loss_scale.state()}

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the fp16 loss scale from `state`, if it holds one."""
        if self.loss_scale is not None and LOSS_SCALE in state:
            self.loss_scale.load(state[LOSS_SCALE])


def _rewrite(stored: Mapping[str, Tensor], change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = {
        name: values_of(tensor) if is_8bit(tensor) else tensor for name, tensor in stored.items()
    }
    change(tensors)
    for name, tensor in stored.items():
        if is_8bit(tensor):
            take_values(tensor, tensors.pop(name))
