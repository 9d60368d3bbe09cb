"""What torch's own strategies share: an AdamW over the parameters as they are spread, and its state by name."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipeline_lib.config.schema import Train
from pipeline_lib.train.checkpoint.staging import Copy, new_copies
from pipeline_lib.train.dist import World
from pipeline_lib.train.optimizer import make_optimizer, set_learning_rate, trainable, update, zero_moments
from pipeline_lib.train.optimizer_8bit import is_8bit, take_values, values_of
from pipeline_lib.train.parallel.loss_scale import LossScale
from pipeline_lib.train.parallel.shares import parts_of, share_of
from pipeline_lib.train.state import LOSS_SCALE, STATE_KINDS, WEIGHTS

VALUES_AT_ONCE_BYTES = 2 * 10**9  # of a state whose moments have 8 bits, on each rank's device


class Native:
    """The part of a strategy that does not depend on how parameters are spread."""

    def __init__(self, world: World, train: Train, accumulation: int) -> None:
        """Serve `world`."""
        self.world = world
        self.train = train
        self.parameters: dict[str, nn.Parameter] = {}
        self.updates = 0
        self.optimizer: torch.optim.Optimizer
        self.loss_scale = LossScale() if train.precision == "fp16" else None

    def own(self, model: nn.Module) -> None:
        """Make the optimizer of `model`, which has been spread and filled; moments are zero."""
        self.parameters = trainable(model)
        self.optimizer = make_optimizer(self.parameters, self.train)
        zero_moments(self.optimizer)

    def autocast(self) -> AbstractContextManager[Any]:
        """Nothing: where parameters are cast when they are gathered."""
        return nullcontext()

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """Nothing: gradients are reduced after every micro-batch."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Torch's own, of the loss times the loss scale where there is one."""
        (loss if self.loss_scale is None else loss * self.loss_scale.value).backward()  # type: ignore[no-untyped-call]

    def grad_norm(self) -> Tensor:
        """The norm over all trained parameters; not finite where fp16 overflowed."""
        norm = nn.utils.get_total_norm(self.gradients())
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        return whole.to(self.world.device, torch.float64) / self._scale  # a power of two

    def gradients(self) -> list[Tensor]:
        """Of the parameters that have one."""
        return [parameter.grad for parameter in self.parameters.values() if parameter.grad is not None]

    def update(self, lr: float, grad_norm: float) -> None:
        """Clip, update, drop the gradients."""
        # In one factor, so that gradients are rounded once; as torch's clip_grad_norm_ does it.
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
        """Give their memory back."""
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def _scale(self) -> float:
        return 1.0 if self.loss_scale is None else self.loss_scale.value

    def tensors(self, kinds: tuple[str, ...] = STATE_KINDS) -> dict[str, Tensor]:
        """The state in fp32, by its names in a checkpoint: what is in use, but values of 8-bit moments."""
        return _in_fp32(self._held(kinds))

    def rewrite(self, change: Callable[[dict[str, Tensor]], None]) -> None:
        """Let `change` give `tensors()` other values: all at once, or a few where moments have 8 bits.

        The values of all of these would take as much as moments in fp32. Every rank makes the same calls of `change`.
        """
        held = self._held(STATE_KINDS)
        for group in _groups(held) if self.train.optimizer == "adamw_8bit" else [held]:
            _rewrite(group, change)

    def _held(self, kinds: tuple[str, ...]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            held = {WEIGHTS: parameter.detach(), **self.optimizer.state[parameter]}
            found |= {f"{kind}.{name}": held[kind] for kind in kinds}
        return found

    def snapshot(self, kinds: tuple[str, ...] = STATE_KINDS, copied: Copy = new_copies) -> dict[str, Tensor]:
        """Copies in host memory of this rank's share; values of 8-bit moments are made one at a time."""
        mine = share_of(self._held(kinds), self.world)
        return copied((name, values_of(held) if is_8bit(held) else held) for name, held in mine.items())

    def restore(self, read: Callable[[Mapping[str, Tensor]], None], updates: int) -> None:
        """Read into the state; Adam's bias correction counts the updates."""
        self.rewrite(read)
        self.updates = updates
        for parameter in self.parameters.values():
            self.optimizer.state[parameter]["step"].fill_(float(updates))

    def own_state(self) -> dict[str, Tensor]:
        """The loss scale of fp16."""
        return {} if self.loss_scale is None else {LOSS_SCALE: self.loss_scale.state()}

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Take the loss scale back."""
        if self.loss_scale is not None and LOSS_SCALE in state:
            self.loss_scale.load(state[LOSS_SCALE])


def _in_fp32(held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: values_of(tensor) if is_8bit(tensor) else tensor for name, tensor in held.items()}


def _rewrite(held: Mapping[str, Tensor], change: Callable[[dict[str, Tensor]], None]) -> None:
    """A function of its own, so that the values are gone before those of the next few are made."""
    tensors = _in_fp32(held)
    change(tensors)
    for name, tensor in held.items():
        if is_8bit(tensor):
            take_values(tensor, tensors.pop(name))


def _groups(held: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """`held` in groups whose fp32 values take up to `VALUES_AT_ONCE_BYTES` of a rank, or of one tensor.

    They are the same on all ranks, though a tensor's parts need not be, nor all be in 8 bits: reading is collective.
    """
    group: dict[str, Tensor] = {}
    size = 0
    for name, tensor in held.items():
        of_rank = 4 * tensor.numel() // parts_of(tensor)
        if group and size + of_rank > VALUES_AT_ONCE_BYTES:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += of_rank
    yield group
