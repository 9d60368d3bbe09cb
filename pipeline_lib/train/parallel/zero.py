"""DeepSpeed's ZeRO: moments (1), gradients too (2), weights too (3) spread over all ranks.

Weights are computed with in the arithmetic's precision; each rank has its part of the masters in fp32, where the
update is made. Gradients are reduced and added up in fp32, with one exception: stage 2 divides them by the number of
ranks in the arithmetic's precision first, which is exact for a power of two.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from copy import deepcopy
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_lib.base.errors import Diverged, TrainingError
from pipeline_lib.config.deepspeed_json import read_deepspeed_json
from pipeline_lib.config.schema import Train
from pipeline_lib.train.checkpoint.staging import Copy, new_copies
from pipeline_lib.train.dist import World
from pipeline_lib.train.flat import FlatPart, gather, held_flat, scatter
from pipeline_lib.train.layers import prepare_layers
from pipeline_lib.train.model import DTYPES
from pipeline_lib.train.optimizer import make_optimizer, set_learning_rate, trainable
from pipeline_lib.train.parallel.shares import balanced
from pipeline_lib.train.parallel.zero_config import stage_of, zero_config
from pipeline_lib.train.parallel.zero_engine import Sharded, compute_parts, import_deepspeed, partition
from pipeline_lib.train.state import LOSS_SCALE, STATE_KINDS, WEIGHTS

READ_AT_ONCE_BYTES = 2 * 10**9  # of a checkpoint, on each rank's host
_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class Zero:
    """Stage 1, 2 or 3, as `train.strategy` says."""

    def __init__(self, world: World, train: Train, accumulation: int) -> None:
        """Serve `world`. Raises ConfigError if the user's DeepSpeed config is not one that can be merged over ours."""
        self.world = world
        self.train = train
        chosen = read_deepspeed_json(Path(train.deepspeed_json), train.offload) if train.deepspeed_json else {}
        self.config = zero_config(train, world.size, accumulation, chosen)
        self.parameters: dict[str, nn.Parameter] = {}
        self.optimizer: torch.optim.Optimizer
        self._engine: Any
        self._sharded: Sharded
        self._is_held = False
        self._held_gradients: list[tuple[Tensor, Tensor | None]] = []

    def spread(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Fill `model` in the arithmetic's precision, whole or in parts, and the masters from the same files."""
        deepspeed = import_deepspeed(self.world.device)
        prepare_layers(model, self.train)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPES[self.train.precision])
        if stage_of(self.train) == 3:
            self.optimizer = make_optimizer(trainable(model), self.train)  # while parameters have their shapes
            partition(deepspeed, model, self.config, self.world.device)
            with held_flat(compute_parts(model.parameters())):
                load(model)
        else:
            load(model)
            self.optimizer = make_optimizer(trainable(model), self.train)
        self.parameters = trainable(model)
        self._hold_when_told()
        with redirect_stdout(StringIO()):  # it prints how much memory is in use
            self._engine, *_ = deepspeed.initialize(model=model, optimizer=self.optimizer, config=deepcopy(self.config))
        self._sharded = Sharded(self._engine, self.optimizer)
        self._make_masters_exact(model, load)
        return self._engine  # type: ignore[no-any-return]

    def _make_masters_exact(self, model: nn.Module, load: Callable[[nn.Module], None]) -> None:
        """Masters are made of rounded weights; read them again. Adapters are drawn rounded, and need it not."""
        if self.train.precision == "fp32" or self.train.method == "lora":
            return
        trained = {id(parameter) for parameter in self.parameters.values()}
        parts = {}
        for parameter in model.parameters():
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            is_trained = id(parameter) in trained
            parts[parameter] = (
                self._sharded.part(parameter, WEIGHTS) if is_trained else FlatPart(torch.empty(0), 0, shape)
            )
        with held_flat(parts):
            load(model)
        self._sharded.take_masters(0)

    def autocast(self) -> AbstractContextManager[Any]:
        """Nothing: weights are in the arithmetic's precision."""
        return nullcontext()

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """Tell DeepSpeed whether this micro-batch completes the step."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """DeepSpeed's; the number of micro-batches is in the loss already."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def grad_norm(self) -> Tensor:
        """The norm over all trained parameters; infinite where a gradient is not finite."""
        return torch.tensor(self._sharded.grad_norm(), dtype=torch.float64, device=self.world.device)

    def update(self, lr: float, grad_norm: float) -> None:
        """Clip and update. Raises TrainingError if DeepSpeed finds the gradients not finite after all."""
        set_learning_rate(self.optimizer, lr)
        self._engine.step()
        if not self._engine.was_step_applied():
            raise TrainingError("DeepSpeed skipped an update whose gradient norm is finite; run the command again")

    def discard(self, grad_norm: float | None = None) -> None:
        """Let DeepSpeed make its step, in which the optimizer updates nothing.

        In fp16 its loss scale follows; raises Diverged if that has nowhere left to fall.
        """
        scaler = self._sharded.loss_scaler
        if scaler is not None and scaler.cur_scale <= scaler.min_scale and grad_norm == math.inf:
            raise Diverged("gradients overflow fp16 at the least loss scale; train with precision: bf16")
        self._is_held = True
        try:
            self._engine.step()
        finally:
            self._is_held = False
        self._sharded.forget_gradients()

    def _hold_when_told(self) -> None:
        """Make steps of the optimizer that pass over every parameter, as over one without a gradient."""
        self.optimizer.register_step_pre_hook(lambda *_: self._take_gradients() if self._is_held else None)
        self.optimizer.register_step_post_hook(lambda *_: self._give_gradients_back())

    def _take_gradients(self) -> None:
        flats = [flat for group in self.optimizer.param_groups for flat in group["params"]]
        self._held_gradients = [(flat, flat.grad) for flat in flats]
        for flat in flats:
            flat.grad = None

    def _give_gradients_back(self) -> None:
        """Where the optimizer is offloaded they are buffers that stay."""
        for flat, gradient in self._held_gradients:
            flat.grad = gradient
        self._held_gradients = []

    def _parts(self, kinds: tuple[str, ...]) -> Iterator[tuple[str, FlatPart]]:
        """This rank's part of every tensor of the state, in the same order on all ranks."""
        for kind in kinds:
            for name, parameter in self.parameters.items():
                yield f"{kind}.{name}", self._sharded.part(parameter, kind)

    def snapshot(self, kinds: tuple[str, ...] = STATE_KINDS, copied: Copy = new_copies) -> dict[str, Tensor]:
        """Whole tensors, gathered one at a time, each kept by one rank, and all keep about as much."""
        return copied(self._gathered(kinds))

    def _gathered(self, kinds: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
        parts = dict(self._parts(kinds))
        owners = balanced({name: _numel(part) for name, part in parts.items()}, self.world.size)
        for name, part in parts.items():
            whole = gather(part, self.world.device, owners[name])
            if owners[name] == self.world.rank:
                yield name, whole

    def restore(self, read: Callable[[Mapping[str, Tensor]], None], updates: int) -> None:
        """Each tensor is read by one rank, a few at a time, and sent to those that keep a part of it."""
        for parts in _groups(dict(self._parts(STATE_KINDS)), READ_AT_ONCE_BYTES * self.world.size):
            owners = balanced({name: _numel(part) for name, part in parts.items()}, self.world.size)
            mine = {name: torch.empty(part.shape) for name, part in parts.items() if owners[name] == self.world.rank}
            read(mine)
            for name, part in parts.items():
                scatter(part, mine.pop(name, None), self.world.device, owners[name])
        self._sharded.take_masters(updates)

    def own_state(self) -> dict[str, Tensor]:
        """Where the loss scale of fp16 is."""
        scaler = self._sharded.loss_scaler
        if scaler is None:
            return {}
        return {LOSS_SCALE: torch.tensor([float(getattr(scaler, field)) for field in _SCALER_FIELDS])}

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Let the loss scale continue there."""
        scaler = self._sharded.loss_scaler
        if scaler is None or LOSS_SCALE not in state:
            return
        scale, *counts = state[LOSS_SCALE].tolist()
        scaler.cur_scale = scale
        if len(counts) == len(_SCALER_FIELDS) - 1:  # else torch's own strategies left it
            for field, count in zip(_SCALER_FIELDS[1:], counts, strict=True):
                setattr(scaler, field, int(count))


def _numel(part: FlatPart) -> int:
    return torch.Size(part.shape).numel()


def _groups(parts: Mapping[str, FlatPart], most_bytes: int) -> Iterator[dict[str, FlatPart]]:
    """`parts` in groups of whole fp32 tensors that take up to `most_bytes`, or of one."""
    group: dict[str, FlatPart] = {}
    size = 0
    for name, part in parts.items():
        if group and size + 4 * _numel(part) > most_bytes:
            yield group
            group, size = {}, 0
        group[name] = part
        size += 4 * _numel(part)
    yield group
