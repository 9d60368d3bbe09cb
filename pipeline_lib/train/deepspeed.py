"""DeepSpeed's ZeRO: moments (1), gradients too (2), weights too (3) spread over all ranks."""

import importlib
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from copy import deepcopy
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_lib.config.checks import read_deepspeed_json
from pipeline_lib.config.schema import Train
from pipeline_lib.core.errors import Diverged, TrainingError
from pipeline_lib.model.build import DTYPES, prepare_layers
from pipeline_lib.model.weights import FlatPart, gather, held_flat, scatter
from pipeline_lib.train.dist import World
from pipeline_lib.train.optimizer import make_optimizer, set_learning_rate, trainable
from pipeline_lib.train.staging import Copy, new_copies
from pipeline_lib.train.state import LOSS_SCALE, MOMENTS, STATE_KINDS, WEIGHTS
from pipeline_lib.train.strategy import balanced

# DeepSpeed's config, made from ours.

# Elements exchanged at a time: 256 MiB in fp32. DeepSpeed's own 5e8 would take 2 GB, and twice that to overlap.
BUCKET_ELEMENTS = 2**26
_CPU = {"device": "cpu", "pin_memory": True}


def zero_config(train: Train, world_size: int, accumulation: int, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What DeepSpeed is told: keys that follow from `train`, then those that a user's JSON has `chosen`.

    Gradients are reduced and added up in fp32. The optimizer is ours also where it is offloaded, so that nothing is
    compiled when training starts.
    """
    stage = stage_of(train)
    zero: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": stage > 1,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
    }
    if train.offload != "none":
        zero["offload_optimizer"] = dict(_CPU)
    if train.offload == "optimizer+params":
        zero["offload_param"] = dict(_CPU)
    ours: dict[str, Any] = {
        "train_batch_size": train.micro_batch_blocks * accumulation * world_size,
        "train_micro_batch_size_per_gpu": train.micro_batch_blocks,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": train.max_grad_norm,
        "communication_data_type": "fp32",
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
    """1, 2 or 3: how much is spread, optimizer, gradients too, weights too."""
    return int(train.strategy.removeprefix("zero"))


def merged(ours: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """`ours` with the values of `chosen` in their places, objects key by key."""
    result = dict(ours)
    for key, value in chosen.items():
        held = result.get(key)
        result[key] = merged(held, value) if isinstance(held, dict) and isinstance(value, dict) else value
    return result


# What is asked of DeepSpeed 0.19 behind its public face: where it keeps this rank's part of weights and moments.
#
# Everything that depends on how it names its own things is here. It comes in three shapes: one optimizer for stages
# 1 and 2, another for stage 1 in bf16, and that of stage 3.


def import_deepspeed(device: torch.device) -> ModuleType:
    """DeepSpeed, told to say nothing but errors, to work on `device` and in the process group that there is.

    Raises TrainingError if it is not installed.
    """
    with _without_warnings():
        try:
            deepspeed = importlib.import_module("deepspeed")
        except ImportError as error:
            raise TrainingError(
                f"train.strategy: zero1, zero2 and zero3 need DeepSpeed ({error}); install the extra `deepspeed`, "
                "DS_BUILD_OPS=0 pip install --no-build-isolation '.[deepspeed]', or set strategy: fsdp"
            ) from error
        accelerators = importlib.import_module("deepspeed.accelerator")
        if device.type == "cpu" and accelerators.get_accelerator().device_name() != "cpu":
            cpu = importlib.import_module("deepspeed.accelerator.cpu_accelerator")
            accelerators.set_accelerator(cpu.CPU_Accelerator())
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # it uses some
    # An exchange through shared memory that it would compile at once, and use in inference alone.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)  # takes the process group that is there
    return deepspeed


@contextmanager
def _without_warnings() -> Iterator[None]:
    """DeepSpeed warns while it is imported, before it can be told not to."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def partition(deepspeed: ModuleType, model: nn.Module, config: dict[str, Any], device: torch.device) -> None:
    """Give each parameter of `model`, on the meta device, memory for this rank's part alone; it has no values yet.

    A parameter stays the object that it is, so that one that two modules share stays one.
    """
    init = deepspeed.zero.Init(config_dict_or_path=config)
    # Else every product would keep its gathered weight for the backward pass.
    if init.mem_efficient_linear:
        init._enable_mem_efficient_linear()
    for parameter in list(model.parameters()):
        whole = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, whole)  # type: ignore[no-untyped-call]
        held: Any = parameter
        init._convert_to_deepspeed_param(held)
        held.partition()


def compute_parts(parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, FlatPart]:
    """This rank's parts of partitioned parameters as they are computed with."""
    found = {}
    for parameter in parameters:
        held: Any = parameter
        found[parameter] = _cut(held.ds_tensor, held.ds_zero_partition_rank, tuple(held.ds_shape))
    return found


def _cut(values: Tensor, rank: int, shape: tuple[int, ...]) -> FlatPart:
    """The part of a tensor in equal parts, without what fills up the last ones."""
    start = min(rank * values.numel(), math.prod(shape))
    return FlatPart(values.view(-1)[: math.prod(shape) - start], start, shape)


class Sharded:
    """DeepSpeed's optimizer of any stage: this rank's parts, and the norm of the gradients."""

    def __init__(self, engine: Any, client: torch.optim.Optimizer) -> None:
        """Give every part of `client`'s parameters its moments, which are zero."""
        self._optimizer = engine.optimizer
        self._is_partitioned = engine.zero_optimization_partition_weights()
        self._client = client
        for flat in self._flats():
            client.state[flat] = {
                "step": torch.zeros((), dtype=torch.float32, device=flat.device),
                **{moment: torch.zeros_like(flat.detach()) for moment in MOMENTS},
            }
        if not self._is_partitioned:
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _flats(self) -> list[Tensor]:
        """What the client's optimizer updates: masters in fp32, a few parameters in each."""
        if self._is_partitioned:
            return list(self._optimizer.fp32_partitioned_groups_flat)
        return [flat for group in self._client.param_groups for flat in group["params"]]

    def part(self, parameter: nn.Parameter, kind: str) -> FlatPart:
        """This rank's part of the master weight or of a moment, fp32, sharing its memory."""
        key = None if kind == WEIGHTS else kind
        held: Any = parameter
        if self._is_partitioned:
            values, _ = self._optimizer._get_fp32_opt_state_partition(held, False, optim_state_key=key)
            return _cut(values.detach(), held.ds_zero_partition_rank, tuple(held.ds_shape))
        mapping = held._hp_mapping
        if mapping is None:
            return FlatPart(torch.empty(0), 0, tuple(parameter.shape))
        return FlatPart(
            mapping.get_hp_fragment(key).detach(), mapping.lp_fragment_address.start, tuple(parameter.shape)
        )

    @torch.no_grad()
    def take_masters(self, updates: int) -> None:
        """Compute with the masters as they are now, after `updates` updates."""
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
        """L2 norm of the averaged gradients, without the loss scale; infinite if one of them is not finite."""
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

        DeepSpeed itself keeps them where the optimizer is offloaded and they were not finite, and would add to them.
        """
        if not self._is_partitioned and hasattr(self._optimizer, "averaged_gradients"):
            for number in self._optimizer.averaged_gradients:
                self._optimizer.averaged_gradients[number] = None

    @property
    def loss_scaler(self) -> Any | None:
        """DeepSpeed's loss scaler, where it has one that moves: in fp16."""
        scaler = getattr(self._optimizer, "loss_scaler", None)
        return scaler if scaler is not None and scaler.dynamic else None


# DeepSpeed's ZeRO: moments (1), gradients too (2), weights too (3) spread over all ranks.
#
# Weights are computed with in the arithmetic's precision; each rank has its part of the masters in fp32, where the
# update is made. Gradients are reduced and added up in fp32, with one exception: stage 2 divides them by the number of
# ranks in the arithmetic's precision first, which is exact for a power of two.

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
