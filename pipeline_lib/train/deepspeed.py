"""The DeepSpeed ZeRO strategy: its config, access to DeepSpeed's internals, the strategy itself.

Stage 1 shards the optimizer state over all ranks, stage 2 also the gradients, stage 3 also the
weights.
"""

import importlib
import logging
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from copy import deepcopy
from functools import partial
from io import StringIO
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_lib.config.deepspeed_json import read_deepspeed_json
from pipeline_lib.config.optimizers import OPTIMIZERS
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import Diverged, TrainingError
from pipeline_lib.core.run_folder import WEIGHTS
from pipeline_lib.core.text import how_to_install
from pipeline_lib.model.build import DTYPES, prepare_layers
from pipeline_lib.model.weights import FlatPart, gather, held_flat, scatter
from pipeline_lib.plan.moments import ZERO_BUCKET
from pipeline_lib.train.dist import World
from pipeline_lib.train.keepers import balanced, grouped, keepers_of
from pipeline_lib.train.loss_scale import OVERFLOW
from pipeline_lib.train.optimizer import make_optimizer, set_learning_rate, trainable
from pipeline_lib.train.staging import Copy, new_copies
from pipeline_lib.train.state import LOSS_SCALE, state_kinds
from pipeline_lib.train.strategy import Strategy

# DeepSpeed's config, derived from `Train`.


def zero_config(
    train: Train, world_size: int, accumulation: int, chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """Return DeepSpeed's config: keys derived from `train`, overridden by the user's `chosen`.

    Gradients are accumulated in fp32, and reduced in fp32 or, with `gradient_compression: bf16`, in
    bf16. The optimizer is ours even where it is offloaded, so that nothing is compiled when
    training starts.
    """
    stage = stage_of(train)
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": stage > 1,
        "reduce_bucket_size": ZERO_BUCKET,
        "allgather_bucket_size": ZERO_BUCKET,
    }
    if train.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if train.offload == "optimizer+params":
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    ours: dict[str, Any] = {
        "train_batch_size": train.micro_batch_blocks * accumulation * world_size,
        "train_micro_batch_size_per_gpu": train.micro_batch_blocks,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": train.max_grad_norm,
        "communication_data_type": "bf16" if train.gradient_compression == "bf16" else "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": train.precision == "bf16"},
        "fp16": {"enabled": train.precision == "fp16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
        "timers": {"throughput": {"enabled": False}},
    }
    return merged(ours, chosen)


def stage_of(train: Train) -> int:
    """Return the ZeRO stage: 1, 2 or 3."""
    return int(train.strategy.removeprefix("zero"))


def merged(ours: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return `ours` overridden by `chosen`; nested objects are merged key by key."""
    result = dict(ours)
    for key, value in chosen.items():
        before = result.get(key)
        result[key] = (
            merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
        )
    return result


# Access to private attributes of DeepSpeed 0.19: where it keeps this rank's part of weights and
# moments.
#
# All code that depends on DeepSpeed's internal names is here. There are three layouts: one
# optimizer for stages 1 and 2, another for stage 1 in bf16, and that of stage 3.


def import_deepspeed(device: torch.device) -> ModuleType:
    """Import DeepSpeed, log only its errors, and set it up for `device` and the process group.

    Raises TrainingError if it is not installed.
    """
    before = logging.root.manager.disable
    # DeepSpeed logs some during its import, before its log level can be set
    logging.disable(logging.WARNING)
    try:
        deepspeed = importlib.import_module("deepspeed")
        accelerators = importlib.import_module("deepspeed.accelerator")
        if device.type == "cpu" and accelerators.get_accelerator().device_name() != "cpu":
            cpu = importlib.import_module("deepspeed.accelerator.cpu_accelerator")
            accelerators.set_accelerator(cpu.CPU_Accelerator())
    except ImportError as error:
        raise TrainingError(
            f"train.strategy: zero1, zero2 and zero3 need DeepSpeed ({error}); install the extra "
            f"`deepspeed`, {how_to_install('deepspeed')}, or set strategy: fsdp"
        ) from error
    finally:
        logging.disable(before)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed calls some
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # DeepSpeed would compile this exchange through shared memory at once, and use it in inference
    # only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)  # uses the existing process group
    return deepspeed


def _partition(
    deepspeed: ModuleType, model: nn.Module, config: dict[str, Any], device: torch.device
) -> None:
    """Allocate this rank's part of each parameter of the meta `model`; set no values.

    Parameters keep their identity, so one that two modules share stays shared.
    """
    init = deepspeed.zero.Init(config_dict_or_path=config)
    # Otherwise every matrix product would keep its gathered weight for the backward pass.
    if init.mem_efficient_linear:
        init._enable_mem_efficient_linear()
    for parameter in list(model.parameters()):
        whole = nn.Parameter(
            torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
        )
        torch.utils.swap_tensors(parameter, whole)  # type: ignore[no-untyped-call]
        held: Any = parameter
        init._convert_to_deepspeed_param(held)
        held.partition()


def _own_part(values: Tensor, partitioned: Any) -> FlatPart:
    """Return `values` as this rank's part of the parameter `partitioned`, without its padding."""
    shape = tuple(partitioned.ds_shape)
    start = min(partitioned.ds_zero_partition_rank * values.numel(), math.prod(shape))
    return FlatPart(values.view(-1)[: math.prod(shape) - start], start, shape)


class Sharded:
    """A uniform view of DeepSpeed's optimizer of any stage: own parts and the gradient norm."""

    def __init__(
        self, engine: Any, client: torch.optim.Optimizer, moments: tuple[str, ...]
    ) -> None:
        """Create zero `moments` for this rank's parts of what `client`, the wrapped one, updates."""
        self._optimizer = engine.optimizer
        self._is_partitioned = engine.zero_optimization_partition_weights()
        self._client = client
        for flat in self._flats():
            client.state[flat] = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                **{moment: torch.zeros_like(flat.detach()) for moment in moments},
            }
        if not self._is_partitioned:
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _flats(self) -> list[Tensor]:
        """Return what the client's optimizer updates: flat fp32 masters of a few parameters."""
        if self._is_partitioned:
            return list(self._optimizer.fp32_partitioned_groups_flat)
        return [flat for group in self._client.param_groups for flat in group["params"]]

    def part(self, parameter: nn.Parameter, kind: str) -> FlatPart:
        """Return this rank's part of the master weight or a moment, in fp32, sharing its memory."""
        key = None if kind == WEIGHTS else kind
        held: Any = parameter
        if self._is_partitioned:
            values, _ = self._optimizer._get_fp32_opt_state_partition(
                held, False, optim_state_key=key
            )
            return _own_part(values.detach(), held)
        mapping = held._hp_mapping
        if mapping is None:
            return FlatPart(torch.empty(0), 0, tuple(parameter.shape))
        start = mapping.lp_fragment_address.start
        return FlatPart(mapping.get_hp_fragment(key).detach(), start, tuple(parameter.shape))

    @torch.no_grad()
    def take_masters(self, updates: int) -> None:
        """Set the step count to `updates`, and refresh the forward weights from the masters."""
        for flat in self._flats():
            self._client.state[flat]["step"].fill_(float(updates))
        if not self._is_partitioned:
            self._optimizer.update_lp_params()
            return
        for number in range(len(self._optimizer.fp16_groups)):
            self._optimizer._reassign_or_swap_out_partitioned_parameters(number)
        self._optimizer._partition_all_parameters()
        if kept_whole := self._optimizer.persistent_parameters:
            kept_whole[0].all_gather(kept_whole)

    def grad_norm(self) -> float:
        """Return the averaged gradients' L2 norm, unscaled; infinity if one is not finite."""
        utils = importlib.import_module("deepspeed.runtime.utils")
        optimizer = self._optimizer
        if self._is_partitioned:
            norm = utils.combine_grad_norm_groups(optimizer._get_norm_groups())
        elif hasattr(optimizer, "scaled_global_norm"):
            norm = optimizer.scaled_global_norm()
        else:
            norm = utils.get_global_norm_of_tensors(optimizer.get_grads_for_norm()[0])
        if utils.is_invalid_grad_norm(norm):
            return math.inf
        return float(norm) / float(getattr(optimizer, "loss_scale", 1.0))

    def forget_gradients(self) -> None:
        """Drop what is left of the step's gradients.

        Where the optimizer is offloaded and they were not finite, DeepSpeed keeps them and would
        add to them.
        """
        if not self._is_partitioned and hasattr(self._optimizer, "averaged_gradients"):
            for number in self._optimizer.averaged_gradients:
                self._optimizer.averaged_gradients[number] = None

    @property
    def loss_scaler(self) -> Any | None:
        """DeepSpeed's dynamic loss scaler, which exists in fp16 only; else None."""
        scaler = getattr(self._optimizer, "loss_scaler", None)
        return scaler if scaler is not None and scaler.dynamic else None


# The strategy.
#
# Forward and backward use weights in the precision of the computation; each rank has its part of
# the fp32 masters, on which the update is made. Gradients are accumulated in fp32, and reduced in
# that or in bf16 (`zero_config`). Stage 2 first divides them by the number of ranks in the
# precision of the computation, which is exact for a power of two.

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
            _partition(deepspeed, model, self.config, self.world.device)
            partitioned: list[Any] = list(model.parameters())
            with held_flat(
                {parameter: _own_part(parameter.ds_tensor, parameter) for parameter in partitioned}
            ):
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
        return {
            f"{kind}.{name}": self._sharded.part(parameter, kind)
            for kind in (state_kinds(self.train) if kinds is None else kinds)
            for name, parameter in self.parameters.items()
        }

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
            mine = {
                name: torch.empty(parts[name].shape)
                for name in names
                if owners[name] == self.world.rank
            }
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
