"""AdamW over what is trained: decay on matrices only."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pipeline_lib.config.schema import Train


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name; a tied one appears once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def make_optimizer(parameters: Mapping[str, nn.Parameter], train: Train) -> torch.optim.Optimizer:
    """AdamW over the groups of `parameter_groups`."""
    return torch.optim.AdamW(
        parameter_groups(parameters, train), lr=train.lr, betas=(train.beta1, train.beta2), fused=True
    )


def parameter_groups(parameters: Mapping[str, nn.Parameter], train: Train) -> list[dict[str, Any]]:
    """Groups for an optimizer, none of them empty; decay is applied to matrices only."""
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    others = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Let the next update be made at `lr`."""
    for group in optimizer.param_groups:
        group["lr"] = lr
