"""Cost of a training: how long attempts occupied devices, and which fraction made the model."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline_lib.core.run_record import RunRecord
from pipeline_lib.core.units import HOUR_S
from pipeline_lib.records.plan import PlanDocument
from pipeline_lib.records.training import Step


@dataclass(frozen=True)
class Spent:
    """Device hours of all attempts: `held_s` seconds on at most `devices` of `device` at a time.

    A device is a "GPU" or a "CPU core". `used_fraction` is the fraction of the hours spent in steps
    that are in the model. The rest is startup, saving, validation, and lost steps. A killed attempt
    occupied its devices for longer than its events show: the fraction is None where the events
    cover less time than the steps took.
    """

    device: str
    devices: int
    held_s: float
    hours: float
    used_fraction: float | None


def spent(
    plan: PlanDocument | None,
    steps: Sequence[Step],
    record: RunRecord,
    *,
    world_size: int | None,
    train_s: float | None,
) -> Spent | None:
    """Return the cost by each attempt's events or else by `train_s`.

    None if neither is known, or what the ranks run on.

    Attempts whose events do not say how many ranks they had count with `world_size`, or as many as
    are planned.
    """
    if plan is None:
        return None
    device = "GPU" if plan.cluster.is_gpu else "CPU core"
    per_rank = 1 if plan.cluster.is_gpu else plan.cluster.cpus_per_rank
    usual = (world_size or plan.cluster.ranks) * per_rank
    sizes = {attempt: event.get("world_size") for attempt, event in record.starts.items()}
    devices = {attempt: size * per_rank for attempt, size in sizes.items() if isinstance(size, int)}
    held_s = record.held_s
    if not any(held_s.values()):
        if not train_s:
            return None
        return Spent(device, usual, train_s, usual * train_s / HOUR_S, None)
    used = sum(devices.get(step.attempt, usual) * step.step_s for step in steps)
    total = sum(devices.get(attempt, usual) * seconds for attempt, seconds in held_s.items())
    return Spent(
        device=device,
        devices=max(devices.get(attempt, usual) for attempt in held_s),
        held_s=sum(held_s.values()),
        hours=total / HOUR_S,
        used_fraction=used / total if 0 < used <= total else None,
    )
