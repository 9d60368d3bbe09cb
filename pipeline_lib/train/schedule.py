"""The learning rate: a pure function of the step."""

import math

from pipeline_lib.config.schema import Train


def learning_rate(train: Train, step: int, steps: int) -> float:
    """The rate for the update that makes `step` (from 1) of `steps`.

    Rises linearly over the first `warmup_fraction` of the steps, then falls to `min_lr_fraction` of the peak.
    """
    warmup_steps = math.ceil(train.warmup_fraction * steps)
    if step <= warmup_steps:
        return train.lr * step / warmup_steps
    progress = (step - warmup_steps) / max(1, steps - warmup_steps)
    if train.lr_schedule == "constant":
        return train.lr
    remaining = 1 - progress if train.lr_schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return train.lr * (train.min_lr_fraction + (1 - train.min_lr_fraction) * remaining)
