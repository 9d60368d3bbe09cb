"""AdamW by torch's fused function, on each rank's part of the parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pipeline_lib.config.train import Train
from pipeline_lib.train.state import own_part


def make_adamw(groups: list[dict[str, Any]], train: Train) -> torch.optim.AdamW:
    """Return torch's AdamW over `groups`, without moments."""
    return torch.optim.AdamW(
        groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.adam_eps, fused=True
    )


def update_group(group: Mapping[str, Any], state: Mapping[Tensor, dict[str, Any]]) -> None:
    """Update the parameters of `group` that have gradients; `state` has the moments of each.

    The result is that of AdamW's own `step`, bit for bit, which asks DTensor about every shard
    first: 10 ms for 400 parameters, during which a GPU is idle.
    """
    members = [parameter for parameter in group["params"] if parameter.grad is not None]
    states = [state[parameter] for parameter in members]
    adamw(
        [own_part(parameter) for parameter in members],
        [own_part(parameter.grad) for parameter in members],
        [own_part(each["exp_avg"]) for each in states],
        [own_part(each["exp_avg_sq"]) for each in states],
        [],
        [each["step"] for each in states],
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
