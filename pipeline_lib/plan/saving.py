"""Whether the disk takes checkpoints as often as they are asked for."""

import math

from pipeline_lib.config.train import Train
from pipeline_lib.core.units import brief, count, gigabytes
from pipeline_lib.plan.machine import End

# With `save_every_steps: auto` a save starts at the earliest so long after the one before: a minute
# of work is soon done again, and then a save is being written for a tenth of the time, or is waited
# for during a twentieth.
_LEAST_APART_S = 60.0
_APART_OF_ASYNC, _APART = 10, 20  # times the duration of a save

# The part of the steps' speed that is lost while a checkpoint is written in the background: 4B on four
# H200 trained 85,200 tokens/s, and 60,300 meanwhile (November 2026).
_LOST_MEANWHILE = {End.BAD: 0.4, End.EXPECTED: 0.29, End.GOOD: 0.1}

NOTABLE_WAIT = 0.1  # of the time of the steps between two checkpoints
_LEAST_SAVE_S = 5.0  # shorter ones are no matter of the disk


def save_wait_s(train: Train, save_s: float, apart_s: float) -> float:
    """Return how long steps wait for a save of `save_s`, if the next is asked after `apart_s`.

    Without `save_async` they wait for all of it; with it, only where it is not done when the next
    one starts.
    """
    return max(0.0, save_s - apart_s) if train.save_async else save_s


def save_cost_s(train: Train, save_s: float, apart_s: float, end: End) -> float:
    """Return the seconds that a save costs the steps: what they wait, and what they lose meanwhile."""
    waited_s = save_wait_s(train, save_s, apart_s)
    if not train.save_async:
        return waited_s
    return waited_s + _LOST_MEANWHILE[end] * min(save_s, apart_s)


def auto_apart_s(train: Train, save_s: float) -> float:
    """Return the time between the starts of saves by `save_every_steps: auto`.

    Each save takes `save_s`.
    """
    return max(_LEAST_APART_S, save_s * (_APART_OF_ASYNC if train.save_async else _APART))


def slow_saves(
    train: Train, epoch_steps: int, size_bytes: int, save_s: float, step_s: float
) -> str:
    """Return what to say of checkpoints of `size_bytes` that take `save_s`.

    It is nothing if steps hardly wait. Each step takes `step_s`, and an epoch has `epoch_steps`.
    Some checkpoints are asked for by the guards.
    """
    intervals = train.save_intervals(epoch_steps)
    apart_steps = min(intervals.values())
    apart_s = apart_steps * step_s
    wait_s = save_wait_s(train, save_s, apart_s)
    if save_s < _LEAST_SAVE_S or wait_s <= NOTABLE_WAIT * apart_s:
        return ""
    enough_s = save_s if train.save_async else save_s / NOTABLE_WAIT
    enough_steps = math.ceil(enough_s / step_s)
    remedies = [
        f"{key}: {enough_steps}" for key, steps in intervals.items() if steps < enough_steps
    ]
    return (
        f"a checkpoint ({gigabytes(size_bytes)}) takes {brief(save_s)} to write, and one is asked "
        f"for every {count(apart_steps, 'steps')} ({brief(apart_s)}): the training waits "
        f"{brief(wait_s)} for each. It would hardly wait with {' and '.join(remedies)}, or on a "
        "faster disk"
    )
