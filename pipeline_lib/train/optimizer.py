"""The optimizer over the trained parameters: its groups, its moments, its learning rate.

Weight decay is on matrices only, and LoRA+ has a higher learning rate for the B matrices of
adapters. config/optimizers.py has a row for each optimizer, which names its moments.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pipeline_lib.config.optimizers import OPTIMIZERS, Rule
from pipeline_lib.config.train import Train
from pipeline_lib.train.adamw import make_adamw, update_group
from pipeline_lib.train.adamw_8bit import make_8bit
from pipeline_lib.train.state import own_part


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name; a tied one appears once."""
    return {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }


def make_optimizer(parameters: Mapping[str, nn.Parameter], train: Train) -> torch.optim.Optimizer:
    """Return the optimizer that `train` names over the groups of `parameter_groups`.

    Raises ConfigError if it is not installed.
    """
    groups = parameter_groups(parameters, train)
    if train.optimizer == "adamw_8bit":
        return make_8bit(groups, train)
    if train.optimizer == "muon":
        # it uses private names of torch, which a later one may lack: for Muon's trainings alone
        from pipeline_lib.train.muon import Muon

        return Muon(groups, train)
    return make_adamw(groups, train)


def update(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Make one update with gradients times `factor`, on each rank's part of them."""
    with torch.no_grad():
        if factor != 1.0:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            gradients = [own_part(p.grad) for p in parameters if p.grad is not None]
            torch._foreach_mul_(gradients, factor)
        if isinstance(optimizer, torch.optim.AdamW):
            for group in optimizer.param_groups:
                update_group(group, optimizer.state)
        else:
            optimizer.step()


def zero_moments(optimizer: torch.optim.Optimizer) -> None:
    """Give every parameter without optimizer state what it would have at its first update."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                moments = {
                    name: torch.zeros_like(parameter.detach()) for name in group["rule"].moments
                }
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                optimizer.state[parameter] = {"step": step, **moments}


def parameter_groups(parameters: Mapping[str, nn.Parameter], train: Train) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer, none of them empty.

    Weight decay applies to matrices only. `lr_ratio` is the learning rate of a group over that of
    the step, and `rule` is what the optimizer's row says of its parameters.
    """
    row = OPTIMIZERS[train.optimizer]
    groups: dict[tuple[float, float, Rule], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decay = train.weight_decay if parameter.ndim >= 2 else 0.0
        ratio = train.lora.lr_ratio if ".lora_B." in name else 1.0
        rule = row.rule_of(name, tuple(parameter.shape))
        groups.setdefault((decay, ratio, rule), []).append(parameter)
    return [
        {"params": members, "weight_decay": decay, "lr_ratio": ratio, "rule": rule}
        for (decay, ratio, rule), members in groups.items()
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next update to `lr`, times `lr_ratio` in each group."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # torchao's
            group["lr"].fill_(lr * group["lr_ratio"])
        else:
            group["lr"] = lr * group["lr_ratio"]
