"""The learning rate: a pure function of the step."""

import math

from pipeline_lib.config.schema import Train


def learning_rate(train: Train, step: int, steps: int) -> float:
    """The rate for the update that makes `step` (from 1) of `steps`.

    Rises linearly over the warm-up, then falls to `min_lr_fraction` of the peak; `wsd` does so over the last
    `decay_fraction` of the steps, and `constant` not at all.
    """
    warmup_steps = _warmup_steps(train, steps)
    if step <= warmup_steps:
        return train.lr * step / warmup_steps
    if train.lr_schedule == "constant":
        return train.lr
    decay_steps = math.ceil(train.decay_fraction * steps) if train.lr_schedule == "wsd" else steps
    first = max(warmup_steps, steps - decay_steps)  # the last step at the peak
    progress = max(0, step - first) / max(1, steps - first)
    remaining = (1 + math.cos(math.pi * progress)) / 2 if train.lr_schedule == "cosine" else 1 - progress
    return train.lr * (train.min_lr_fraction + (1 - train.min_lr_fraction) * remaining)


def _warmup_steps(train: Train, steps: int) -> int:
    return math.ceil(train.warmup_fraction * steps) if train.warmup_steps is None else train.warmup_steps
