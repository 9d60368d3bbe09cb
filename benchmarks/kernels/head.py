"""The head with its loss, forward and backward: ours, Liger's, and all logits at once."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.clock import Call
from benchmarks.kernels.report import Report, random
from pipeline_lib.model.batch import IGNORED
from pipeline_lib.model.loss import cross_entropy

SUPERVISED = (1.0, 0.5)
_Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def measure_head(report: Report) -> None:
    """Lines for trained and frozen heads; ways for the parts `head full 100%` and so on."""
    geometry = report.geometry
    for method, products in (("full", 3), ("lora", 2)):
        for supervised in SUPERVISED:
            rows = int(report.tokens * supervised)
            part = f"head {method} {supervised:.0%}"
            for name, (loss, is_chosen) in _losses().items():
                if supervised == 1.0 and not is_chosen:
                    continue
                seconds = report.measure(
                    "head",
                    f"{part}: {name}",
                    partial(_call, report, loss, method == "full", rows, is_chosen),
                    flops=2.0 * products * rows * geometry.hidden * geometry.vocab,
                    moved_bytes=2.0 * products * (rows + geometry.vocab) * geometry.hidden,
                    calls=1,
                )
                report.way(part, name, seconds)


def _losses() -> dict[str, tuple[_Loss, bool]]:
    """By name: the loss, and whether it is given only the tokens that have a target."""
    return {
        "ours": (lambda hidden, weight, targets: cross_entropy(hidden, weight, targets)[0], True),
        "Liger": (_liger, True),
        "Liger, over all tokens": (_liger, False),
        "all logits at once": (_plain, True),
    }


def _liger(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    liger: Any = importlib.import_module("liger_kernel.transformers")
    loss = liger.LigerFusedLinearCrossEntropyLoss(reduction="sum", ignore_index=IGNORED)
    return loss(weight, hidden, targets)  # type: ignore[no-any-return]


def _plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(
        (hidden @ weight.t()).float(), targets, reduction="sum", ignore_index=IGNORED
    )


def _call(report: Report, loss: _Loss, is_trained: bool, supervised: int, is_chosen: bool) -> Call:
    geometry, device = report.geometry, report.device
    rows = supervised if is_chosen else report.tokens
    hidden = random(rows, geometry.hidden, device=device, trained=True)
    weight = (0.02 * random(geometry.vocab, geometry.hidden, device=device)).requires_grad_(
        is_trained
    )
    targets = torch.randint(0, geometry.vocab, (rows,), device=device)
    if not is_chosen:
        targets[torch.randperm(rows, device=device)[supervised:]] = IGNORED
    wanted = [hidden, weight] if is_trained else [hidden]
    return lambda: torch.autograd.grad(loss(hidden, weight, targets), wanted)
