"""The DeepSpeed ZeRO strategy.

Stage 1 shards the optimizer state over all ranks, stage 2 also the gradients, stage 3 also the
weights.

Forward and backward use weights in the precision of the computation; each rank has its part of the
fp32 masters, on which the update is made. Gradients are accumulated in fp32, and reduced in that or
in bf16 (`zero_config`). Stage 2 first divides them by the number of ranks in the precision of the
computation, which is exact for a power of two.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from copy import deepcopy
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_lib.config.deepspeed_json import read_deepspeed_json
from pipeline_lib.config.optimizers import OPTIMIZERS
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import Diverged, TrainingError
from pipeline_lib.core.run_folder import WEIGHTS
from pipeline_lib.model.build import DTYPES, prepare_layers
from pipeline_lib.model.weights import FlatPart, gather, held_flat, scatter
from pipeline_lib.train.deepspeed_config import stage_of, zero_config
from pipeline_lib.train.deepspeed_state import Sharded, import_deepspeed, own_flat_part, partition
from pipeline_lib.train.dist import World
from pipeline_lib.train.keepers import balanced, grouped, keepers_of
from pipeline_lib.train.loss_scale import OVERFLOW
from pipeline_lib.train.optimizer import make_optimizer, set_learning_rate, trainable
from pipeline_lib.train.staging import Copy, new_copies
from pipeline_lib.train.state import LOSS_SCALE, state_kinds
from pipeline_lib.train.strategy import Strategy

READ_AT_ONCE_BYTES = 2 * 10**9  # read from a checkpoint at a time, on each rank's host
_SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class Zero(Strategy):
    """The ZeRO strategy, at the stage that `train.strategy` names."""

    def __init__(self, world: World, train: Train, accumulation: int) -> None:
        """Read the user's DeepSpeed config, if any.

        Raises ConfigError if it cannot be merged over ours.
        """
        self.world = world
        self.train = train
        given = train.deepspeed_json
        chosen = dict[str, Any]()
        if given is not None:
            chosen = read_deepspeed_json(given, train.strategy, train.offload)
        self.config = zero_config(train, world.size, accumulation, chosen)
        self.parameters: dict[str, nn.Parameter] = {}
        self.optimizer: torch.optim.Optimizer
        self._engine: Any
        self._sharded: Sharded
        # then hooks hide the gradients from the optimizer, whose step updates nothing
        self._is_discarding = False
        self._hidden_gradients: list[tuple[Tensor, Tensor | None]] = []

    def spread(self, model: nn.Module, load: Callable[[nn.Module], None]) -> nn.Module:
        """Load `model` in compute precision, whole or in parts, and masters from the same files.

        Returns DeepSpeed's engine.
        """
        deepspeed = import_deepspeed(self.world.device)
        prepare_layers(model, self.train)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPES[self.train.precision])
        if stage_of(self.train) == 3:
            # while parameters have their shapes
            self.optimizer = make_optimizer(trainable(model), self.train)
            partition(deepspeed, model, self.config, self.world.device)
            partitioned: list[Any] = list(model.parameters())
            with held_flat({one: own_flat_part(one.ds_tensor, one) for one in partitioned}):
                load(model)
        else:
            load(model)
            self.optimizer = make_optimizer(trainable(model), self.train)
        self.parameters = trainable(model)
        self.optimizer.register_step_pre_hook(
            lambda *_: self._hide_gradients() if self._is_discarding else None
        )
        self.optimizer.register_step_post_hook(lambda *_: self._give_gradients_back())
        with redirect_stdout(StringIO()):  # DeepSpeed prints its memory use
            self._engine, *_ = deepspeed.initialize(
                model=model, optimizer=self.optimizer, config=deepcopy(self.config)
            )
        moments = OPTIMIZERS[self.train.optimizer].moments
        self._sharded = Sharded(self._engine, self.optimizer, moments)
        self._load_masters = partial(self._fill_masters, model, load)
        if self.train.precision != "fp32" and self.train.method != "lora":
            self._load_masters()  # DeepSpeed makes them from rounded weights
        return self._engine  # type: ignore[no-any-return]

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Load the masters again, and set moments to zero."""
        for part in self._parts(OPTIMIZERS[self.train.optimizer].moments).values():
            part.values.zero_()
        self._load_masters()

    def _fill_masters(self, model: nn.Module, load: Callable[[nn.Module], None]) -> None:
        """Load the masters; adapters are rounded to compute precision, as DeepSpeed does."""
        trained = {id(parameter) for parameter in self.parameters.values()}
        parts = {}
        for parameter in model.parameters():
            if id(parameter) in trained:
                parts[parameter] = self._sharded.part(parameter, WEIGHTS)
            else:
                parts[parameter] = FlatPart(
                    torch.empty(0), 0, tuple(getattr(parameter, "ds_shape", parameter.shape))
                )
        with held_flat(parts):
            load(model)
        if self.train.method == "lora":
            for part in parts.values():
                part.values.copy_(part.values.to(DTYPES[self.train.precision]))
        self._sharded.take_masters(0)

    def accumulating(self, is_last: bool) -> AbstractContextManager[Any]:
        """Tell DeepSpeed whether this micro-batch is the last of the step."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Run DeepSpeed's backward pass; the loss already accounts for all micro-batches."""
        self._engine.backward(loss, scale_wrt_gas=False)

    def grad_norm(self) -> Tensor:
        """Return the L2 norm over all trained parameters; infinity if a gradient is not finite."""
        return torch.tensor(
            self._sharded.grad_norm(), dtype=torch.float64, device=self.world.device
        )

    def update(self, lr: float, grad_norm: float) -> None:
        """Clip and update. Raises TrainingError if DeepSpeed skips the update."""
        set_learning_rate(self.optimizer, lr)
        self._engine.step()
        if not self._engine.was_step_applied():
            raise TrainingError(
                "DeepSpeed skipped an update whose gradient norm is finite; run the command again"
            )

    def discard(self, grad_norm: float | None = None) -> None:
        """Run DeepSpeed's step with an optimizer that updates nothing.

        In fp16 the loss scale follows; raises Diverged if the gradients overflowed at the least
        loss scale.
        """
        scaler = self._sharded.loss_scaler
        if scaler is not None and scaler.cur_scale <= scaler.min_scale and grad_norm == math.inf:
            raise Diverged(OVERFLOW)
        self._is_discarding = True
        try:
            self._engine.step()
        finally:
            self._is_discarding = False
        self._sharded.forget_gradients()

    def _hide_gradients(self) -> None:
        flats = [flat for group in self.optimizer.param_groups for flat in group["params"]]
        self._hidden_gradients = [(flat, flat.grad) for flat in flats]
        for flat in flats:
            flat.grad = None

    def _give_gradients_back(self) -> None:
        """Restore the hidden gradients; those of an offloaded optimizer are persistent buffers."""
        for flat, gradient in self._hidden_gradients:
            flat.grad = gradient
        self._hidden_gradients = []

    def _parts(self, kinds: Collection[str] | None = None) -> dict[str, FlatPart]:
        """Return this rank's part of every tensor of the state, in the same order on all ranks."""
        parts = {}
        for kind in state_kinds(self.train) if kinds is None else kinds:
            for name, parameter in self.parameters.items():
                parts[f"{kind}.{name}"] = self._sharded.part(parameter, kind)
        return parts

    def state_sizes(self, kinds: Collection[str] | None = None) -> dict[str, int]:
        """Return the elements of each whole tensor of a checkpoint."""
        return _sizes_of(self._parts(kinds))

    def snapshot(
        self, names: Collection[str] | None = None, copied: Copy = new_copies
    ) -> dict[str, Tensor]:
        """Gather whole tensors one by one; copy those this rank keeps, about as many as others."""
        parts = self._parts()
        chosen = list(parts) if names is None else list(names)
        owners = keepers_of(_sizes_of({name: parts[name] for name in chosen}), self.world.size)

        def gathered() -> Iterator[tuple[str, Tensor]]:
            for name in chosen:
                whole = gather(parts[name], self.world.device, owners[name])
                if owners[name] == self.world.rank:
                    yield name, whole

        return copied(gathered())

    def restore(self, read: Callable[[Mapping[str, Tensor]], None], updates: int) -> None:
        """Read each tensor on one rank, a few at a time, and scatter it to the parts' ranks."""
        parts = self._parts()
        sizes = _sizes_of(parts)
        for names in grouped(sizes, READ_AT_ONCE_BYTES * self.world.size // 4):  # bytes in fp32
            owners = balanced({name: sizes[name] for name in names}, self.world.size)
            own = [name for name in names if owners[name] == self.world.rank]
            mine = {name: torch.empty(parts[name].shape) for name in own}
            read(mine)
            for name in names:
                scatter(parts[name], mine.pop(name, None), self.world.device, owners[name])
        self._sharded.take_masters(updates)

    def own_state(self) -> dict[str, Tensor]:
        """Return the state of the fp16 loss scaler, if there is one."""
        scaler = self._sharded.loss_scaler
        if scaler is None:
            return {}
        return {
            LOSS_SCALE: torch.tensor([float(getattr(scaler, field)) for field in _SCALER_FIELDS])
        }

    def load_own_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the fp16 loss scaler from `state`, if it holds one."""
        scaler = self._sharded.loss_scaler
        if scaler is None or LOSS_SCALE not in state:
            return
        scale, *counts = state[LOSS_SCALE].tolist()
        scaler.cur_scale = scale
        if len(counts) == len(_SCALER_FIELDS) - 1:  # otherwise one of torch's strategies saved it
            for field, count in zip(_SCALER_FIELDS[1:], counts, strict=True):
                setattr(scaler, field, int(count))


def _sizes_of(parts: Mapping[str, FlatPart]) -> dict[str, int]:
    """Return the elements of each whole tensor that `parts` are of."""
    return {name: math.prod(part.shape) for name, part in parts.items()}
