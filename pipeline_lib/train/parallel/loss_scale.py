"""The factor that lifts the gradients of fp16 into its range; it finds itself."""

import math

import torch
from torch import Tensor

from pipeline_lib.base.errors import Diverged

FIRST = 2.0**16
GROWS_AFTER = 2000


class LossScale:
    """A power of two: halved by a norm that is not finite, doubled after `GROWS_AFTER` finite ones in a row."""

    def __init__(self) -> None:
        """Begin as torch's GradScaler does."""
        self.value = FIRST
        self.finite_steps = 0

    def follow(self, norm: float) -> None:
        """Choose the factor of the next step by this step's gradient norm. Raises Diverged at 1 already."""
        if not math.isfinite(norm):
            if self.value <= 1.0:
                raise Diverged("gradients overflow fp16 at the least loss scale; train with precision: bf16")
            self.value, self.finite_steps = self.value / 2, 0
            return
        self.finite_steps += 1
        if self.finite_steps == GROWS_AFTER:
            self.value, self.finite_steps = self.value * 2, 0

    def state(self) -> Tensor:
        """[2] float64: the factor, and how many finite steps it has seen."""
        return torch.tensor([self.value, self.finite_steps], dtype=torch.float64)

    def load(self, state: Tensor) -> None:
        """Continue from what `state` gave, or from another strategy's factor, which comes first in its state."""
        self.value, self.finite_steps = float(state[0]), int(state[1]) if len(state) == 2 else 0
