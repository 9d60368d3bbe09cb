"""What a training cost: how long its attempts held their devices, and how much of that became the model."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline_lib.plan.units import HOUR_S
from pipeline_lib.publish.planned import Plan
from pipeline_lib.publish.results import Step, Training

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Spent:
    """Hours of `device` ("GPU" or "CPU core"), of `devices` at a time at most, over `held_s` seconds of all attempts.

    `used_fraction` of the hours went into steps that are in the model; the rest started, saved, validated, or was done
    in vain. Killed without a word, an attempt held its devices for longer than its events tell: the fraction is None
    where they tell less than the steps took.
    """

    device: str
    devices: int
    held_s: float
    hours: float
    used_fraction: float | None


def spent(plan: Plan, training: Training, steps: Sequence[Step], events: Sequence[Event]) -> Spent | None:
    """From the events of each attempt; without any, the time of the steps alone. None if that is not known either."""
    per_rank = 1 if plan.cluster.is_gpu else plan.cluster.cpus_per_rank or 1
    usual = (training.world_size or plan.cluster.ranks or 1) * per_rank
    ranks = {
        event["attempt"]: event["world_size"]
        for event in events
        if event.get("event") == "run.start" and isinstance(event.get("world_size"), int) and "attempt" in event
    }
    held = {attempt: end - begin for attempt, (begin, end) in _spans(events).items()}
    steps_s = [(ranks.get(step.attempt or 1, usual // per_rank), step.step_s or 0.0) for step in steps]
    used = sum(count * per_rank * taken for count, taken in steps_s)
    if not any(held.values()):
        seconds = training.train_s
        return None if not seconds else Spent(_device(plan), usual, seconds, usual * seconds / HOUR_S, None)
    devices = {attempt: ranks[attempt] * per_rank if attempt in ranks else usual for attempt in held}
    total = sum(devices[attempt] * seconds for attempt, seconds in held.items())
    return Spent(
        device=_device(plan),
        devices=max(devices.values()),
        held_s=sum(held.values()),
        hours=total / HOUR_S,
        used_fraction=used / total if 0 < used <= total else None,
    )


def _spans(events: Sequence[Event]) -> dict[int, tuple[float, float]]:
    """When each attempt was first and last heard of, in seconds."""
    found: dict[int, tuple[float, float]] = {}
    for event in events:
        attempt, at = event.get("attempt"), event.get("at")
        if isinstance(attempt, int) and isinstance(at, (int, float)) and math.isfinite(at):
            begin, end = found.get(attempt, (at, at))
            found[attempt] = min(begin, at), max(end, at)
    return found


def _device(plan: Plan) -> str:
    return "GPU" if plan.cluster.is_gpu else "CPU core"
