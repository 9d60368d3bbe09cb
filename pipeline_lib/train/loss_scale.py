"""The dynamic loss scale, which lifts gradients into the range of fp16."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline_lib.core.errors import Diverged

FIRST = 2.0**16  # as of torch's GradScaler
GROWS_AFTER = 2000
OVERFLOW = "gradients overflow fp16 at the least loss scale; train with precision: bf16"


@dataclass
class LossScale:
    """A power-of-two loss scale: halved by a norm that is not finite, else raised at times.

    It is doubled after `GROWS_AFTER` finite norms.
    """

    value: float = FIRST
    finite_steps: int = 0

    def follow(self, norm: float) -> None:
        """Adjust the scale for the next step by this step's gradient norm.

        Raises Diverged if it overflows at 1.
        """
        if not math.isfinite(norm):
            if self.value <= 1.0:
                raise Diverged(OVERFLOW)
            self.value = self.value / 2
            self.finite_steps = 0
            return
        self.finite_steps += 1
        if self.finite_steps == GROWS_AFTER:
            self.value = self.value * 2
            self.finite_steps = 0

    def state(self) -> Tensor:
        """Return [2] float64: the scale, and the number of finite steps since it last changed."""
        return torch.tensor([self.value, self.finite_steps], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Restore what `state` returned, or another strategy's scale, first in its state."""
        self.value = float(state[0])
        self.finite_steps = int(state[1]) if len(state) == 2 else 0
