"""What a checkpoint has to bring back: trained weights, Adam's moments, the step. Data order needs no state."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_lib.config.schema import Train
from pipeline_lib.train.model import trainable

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class TrainState:
    """The model's trained parameters and their optimizer after `step` optimizer steps, with a metrics row for each."""

    parameters: dict[str, nn.Parameter]
    optimizer: torch.optim.AdamW
    step: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def tensors(self) -> dict[str, Tensor]:
        """Everything of size, by names that depend on no strategy: `weights.NAME`, `exp_avg.NAME`, ..."""
        found: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            found[f"weights.{name}"] = parameter.detach()
            for moment in MOMENTS:
                found[f"{moment}.{name}"] = self.optimizer.state[parameter][moment]
        return found

    def weights(self) -> dict[str, Tensor]:
        """The trained parameters alone, by their own names."""
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def set_step(self, step: int) -> None:
        """Say that `step` updates have been made, also to Adam, whose bias correction counts them."""
        self.step = step
        for parameter in self.parameters.values():
            self.optimizer.state[parameter]["step"].fill_(float(step))


def new_state(model: nn.Module, train: Train) -> TrainState:
    """The state before the first step, moments zero. Decay is applied to matrices only."""
    parameters = trainable(model)
    matrices = [parameter for parameter in parameters.values() if parameter.ndim >= 2]
    others = [parameter for parameter in parameters.values() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=train.lr, betas=(train.beta1, train.beta2), fused=True
    )
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{moment: torch.zeros_like(parameter.detach()) for moment in MOMENTS},
        }
    return TrainState(parameters, optimizer)
