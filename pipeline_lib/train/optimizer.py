"""AdamW over what is trained: decay on matrices only, and LoRA+'s higher rate for the B matrices of adapters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from pipeline_lib.config.schema import Train
from pipeline_lib.train.optimizer_8bit import make_8bit
from pipeline_lib.train.state import MOMENTS, own_part


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; a tied one appears once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def make_optimizer(parameters: Mapping[str, nn.Parameter], train: Train) -> torch.optim.Optimizer:
    """AdamW over the groups of `parameter_groups`. Raises ConfigError if `train` names one that is not installed."""
    groups = parameter_groups(parameters, train)
    if train.optimizer == "adamw_8bit":
        return make_8bit(groups, train)
    return torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), fused=True)


def update(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """One update with gradients times `factor`, on what each rank has of them.

    AdamW's own `step` comes to the same bits, but asks DTensor about every shard first: 10 ms for 400 parameters, in
    which a GPU has nothing to do.
    """
    with torch.no_grad():
        gradients = [
            own_part(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        if factor != 1.0:
            torch._foreach_mul_(gradients, factor)
        if not isinstance(optimizer, torch.optim.AdamW):
            optimizer.step()
            return
        for group in optimizer.param_groups:
            _update_group(optimizer, group)


def _update_group(optimizer: torch.optim.AdamW, group: dict[str, Any]) -> None:
    members = [parameter for parameter in group["params"] if parameter.grad is not None]
    states = [optimizer.state[parameter] for parameter in members]
    adamw(
        [own_part(parameter) for parameter in members],
        [own_part(parameter.grad) for parameter in members],
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
    """Give every parameter the state that it would have at its first update, unless it has one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                moments = {moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS}
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                optimizer.state[parameter] = {"step": step, **moments}


def parameter_groups(parameters: Mapping[str, nn.Parameter], train: Train) -> list[dict[str, Any]]:
    """Groups for an optimizer, none of them empty.

    Decay is applied to matrices only. `lr_ratio` is the rate of a group over that of the step.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decay = train.weight_decay if parameter.ndim >= 2 else 0.0
        ratio = train.lora.lr_ratio if ".lora_B." in name else 1.0
        groups.setdefault((decay, ratio), []).append(parameter)
    return [{"params": members, "weight_decay": decay, "lr_ratio": ratio} for (decay, ratio), members in groups.items()]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Let the next update be made at `lr`, and by groups of `parameter_groups` at their part of it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # torchao's
            group["lr"].fill_(lr * group["lr_ratio"])
        else:
            group["lr"] = lr * group["lr_ratio"]
