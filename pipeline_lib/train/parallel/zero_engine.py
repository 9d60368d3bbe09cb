"""What is asked of DeepSpeed 0.19 behind its public face: where it keeps this rank's part of weights and moments.

Everything that depends on how it names its own things is here. It comes in three shapes: one optimizer for stages
1 and 2, another for stage 1 in bf16, and that of stage 3.
"""

import importlib
import logging
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_lib.base.errors import TrainingError
from pipeline_lib.train.flat import FlatPart
from pipeline_lib.train.state import MOMENTS, WEIGHTS


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
