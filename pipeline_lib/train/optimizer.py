"""AdamW over the trained parameters, with 32-bit or 8-bit moments."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.text import how_to_install
from pipeline_lib.train.state import MOMENTS, own_part

# AdamW with 8-bit moments, by torchao: 2 bytes per trained parameter instead of 8. An
# approximation.
#
# A moment has 8-bit codes and a scale for each block of 256. Checkpoints hold the dequantized
# values, in fp32: read back on the same ranks they become the same values again, bit for bit; on
# others, blocks have other boundaries, and values are rounded anew. A moment of fewer than 4,096
# elements on a rank, or not of whole blocks, is in fp32.


def _make_8bit(groups: list[dict[str, Any]], train: Train) -> torch.optim.Optimizer:
    """Return torchao's AdamW over `groups`, with zero moments.

    Raises ConfigError if torchao is not installed.
    """
    try:
        from torchao.optim import AdamW8bit  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError as error:
        text = "train.optimizer: adamw_8bit needs the library torchao, which is not installed"
        raise ConfigError("train", [f"{text}: {how_to_install('optim8bit')}"]) from error
    optimizer: Any = AdamW8bit(
        groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.adam_eps
    )
    parameters = [parameter for group in groups for parameter in group["params"]]
    if all(parameter.device.type == "cpu" for parameter in parameters):
        compiled = optimizer.step

        def step(*arguments: Any) -> Any:
            # Compiling the update for every shape on a CPU would take a C++ compiler and minutes.
            with torch.compiler.set_stance("force_eager"):
                return compiled(*arguments)

        optimizer.step = step
    for parameter in parameters:  # as torchao does at the first update
        buffers = {
            moment: optimizer._new_buffer(parameter, moment == "exp_avg") for moment in MOMENTS
        }
        optimizer.state[parameter] = {"step": torch.zeros(()), **buffers}
    return optimizer  # type: ignore[no-any-return]


def is_8bit(tensor: Tensor) -> bool:
    """Return whether `tensor`, or the local part of a DTensor, is stored as 8-bit codes."""
    return hasattr(own_part(tensor), "dequantize") and hasattr(own_part(tensor), "codes")


def values_of(moment: Tensor) -> Tensor:
    """Return 8-bit `moment` dequantized, in fp32 and new memory; a DTensor if `moment` is one."""
    codes: Any = own_part(moment)
    values: Tensor = codes.dequantize().float()
    if not isinstance(moment, DTensor):
        return values
    placed: Tensor = DTensor.from_local(
        values,
        moment.device_mesh,
        moment.placements,
        run_check=False,
        shape=moment.shape,
        stride=moment.stride(),
    )
    return placed


def take_values(moment: Tensor, values: Tensor) -> None:
    """Set 8-bit `moment` to `values`: exactly, if `values_of` returned them for its blocks."""
    from torchao.optim import quant_utils  # type: ignore[import-not-found,import-untyped,unused-ignore]

    state: Any = own_part(moment)
    blocks = own_part(values).reshape(-1, state.block_size)
    largest = blocks.abs().amax(-1).clip(1e-12)
    # A block's scale is its largest value, or in a signed moment that divided by the most negative
    # code, not -1.
    candidates = [largest]
    least_code = float(-state.qmap[0])
    if least_code > 0:
        by_code = largest / least_code
        up = torch.full_like(largest, torch.inf)
        down = torch.zeros_like(largest)
        candidates += [by_code, torch.nextafter(by_code, up), torch.nextafter(by_code, down)]
    codes = torch.empty_like(blocks, dtype=state.codes.dtype)
    scale = largest.clone()
    is_open = torch.ones_like(largest, dtype=torch.bool)
    for candidate in candidates:
        found = quant_utils.quantize_8bit_with_qmap(blocks / candidate[:, None], state.qmap).to(
            codes.dtype
        )
        is_exact = (state.qmap[found.int()] * candidate[:, None] == blocks).all(-1)
        chosen = is_open & is_exact if candidate is not largest else is_open
        codes[chosen], scale[chosen] = found[chosen], candidate[chosen]
        is_open &= ~is_exact
    state.codes.copy_(codes.view_as(state.codes))
    state.scale.copy_(scale)


# The optimizer: weight decay on matrices only, and LoRA+'s higher learning rate for the B matrices
# of adapters.


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name; a tied one appears once."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def make_optimizer(parameters: Mapping[str, nn.Parameter], train: Train) -> torch.optim.Optimizer:
    """Return AdamW over the groups of `parameter_groups`.

    Raises ConfigError if `train` names one not installed.
    """
    groups = parameter_groups(parameters, train)
    if train.optimizer == "adamw_8bit":
        return _make_8bit(groups, train)
    return torch.optim.AdamW(
        groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.adam_eps, fused=True
    )


def update(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Make one update with gradients times `factor`, on each rank's part of them.

    The result is that of AdamW's own `step`, bit for bit, which asks DTensor about every shard
    first: 10 ms for 400 parameters, during which a GPU is idle.
    """
    with torch.no_grad():
        members = [
            [p for p in group["params"] if p.grad is not None] for group in optimizer.param_groups
        ]
        gradients = [[own_part(p.grad) for p in group] for group in members]
        if factor != 1.0:
            torch._foreach_mul_([gradient for group in gradients for gradient in group], factor)
        if not isinstance(optimizer, torch.optim.AdamW):
            optimizer.step()
            return
        for number, group in enumerate(optimizer.param_groups):
            states = [optimizer.state[parameter] for parameter in members[number]]
            adamw(
                [own_part(parameter) for parameter in members[number]],
                gradients[number],
                [own_part(state["exp_avg"]) for state in states],
                [own_part(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                amsgrad=False,
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def zero_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter without optimizer state what it would have at its first update."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                moments = {moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS}
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                optimizer.state[parameter] = {"step": step, **moments}


def parameter_groups(parameters: Mapping[str, nn.Parameter], train: Train) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer, none of them empty.

    Weight decay applies to matrices only. `lr_ratio` is the learning rate of a group over that of
    the step.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decay = train.weight_decay if parameter.ndim >= 2 else 0.0
        ratio = train.lora.lr_ratio if ".lora_B." in name else 1.0
        groups.setdefault((decay, ratio), []).append(parameter)
    return [
        {"params": members, "weight_decay": decay, "lr_ratio": ratio}
        for (decay, ratio), members in groups.items()
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next update to `lr`, times `lr_ratio` in each group."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # torchao's
            group["lr"].fill_(lr * group["lr_ratio"])
        else:
            group["lr"] = lr * group["lr_ratio"]
