"""Where DeepSpeed 0.19 keeps this rank's part of weights and moments: its private attributes.

All code that depends on DeepSpeed's internal names is here. There are three layouts: one optimizer
for stages 1 and 2, another for stage 1 in bf16, and that of stage 3.
"""

import importlib
import logging
import math
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_lib.core.errors import TrainingError
from pipeline_lib.core.run_folder import WEIGHTS
from pipeline_lib.core.text import how_to_install
from pipeline_lib.model.weights import FlatPart


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


def partition(
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


def own_flat_part(values: Tensor, partitioned: Any) -> FlatPart:
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
            return own_flat_part(values.detach(), held)
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
