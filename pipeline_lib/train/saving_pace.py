"""Whether the disk takes checkpoints as often as asked for; said once, at the first failure."""

import statistics
from collections import deque
from typing import Any

from pipeline_lib.config.train import Train
from pipeline_lib.core.events import EventName, Observer
from pipeline_lib.core.stage import Say
from pipeline_lib.plan.saving import slow_saves

_RECENT_STEPS = 20
_LEAST_STEPS = 3  # the first ones take longer


def warn_of_slow_saves(say: Say, train: Train, epoch_steps: int) -> Observer:
    """Return an observer that warns once if `train` waits for checkpoints, and how not to.

    An epoch has `epoch_steps`.
    """
    steps_s: deque[float] = deque(maxlen=_RECENT_STEPS)
    has_warned = False

    def observe(name: str, fields: dict[str, Any]) -> None:
        nonlocal has_warned
        if name == EventName.STEP_END:
            steps_s.append(fields["step_s"])
        if name != EventName.CHECKPOINT_SAVED or has_warned or len(steps_s) < _LEAST_STEPS:
            return
        step_s = statistics.median(steps_s)
        if text := slow_saves(train, epoch_steps, fields["bytes"], fields["duration_s"], step_s):
            has_warned = True
            say(f"warning: {text}")

    return observe
