"""What a whole run would take, from its first two steps and its plan."""

import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.config.schema import Config
from pipeline_lib.plan.units import HOUR_S
from pipeline_lib.publish.planned import Figure, Plan
from pipeline_lib.publish.units import amount, count, rounded, size

_MINUTE_S = 60


@dataclass(frozen=True)
class Cost:
    """Of all steps: seconds, with saving and validation as far as they are known; bytes of one checkpoint.

    `around_s` is what each job takes before its first step and after its last one. `run_s` has no low end where the
    plan predicts no time.
    """

    config: Config
    steps: int
    run_s: Figure
    checkpoint_bytes: float | None
    around_s: float

    @staticmethod
    def of(config: Config, plan: Plan, step_s: float, around_s: float, events: Sequence[Mapping[str, Any]]) -> "Cost":
        """`step_s` is that of the faster of two first steps: those to come are expected to take no longer."""
        saved = [event for event in events if event.get("event") == "checkpoint.saved"]
        sizes = [float(event["bytes"]) for event in saved if "bytes" in event]
        steps, planned = plan.batch.steps or 0, plan.prediction.step_s
        if planned.value and planned.low and plan.prediction.run_s.value:
            beside_s = max(0.0, plan.prediction.run_s.value - steps * planned.value)
            each = (min(planned.low, step_s), min(planned.value, step_s), max(planned.value, step_s))
            low, value, high = (steps * one + beside_s for one in each)
        else:
            save_s = statistics.median([float(event.get("duration_s", 0.0)) for event in saved] or [0.0])
            low, value = None, steps * step_s + save_s * math.ceil(steps / config.train.save_every_steps)
            high = value
        run_s = Figure(value=value, low=low, high=high)
        return Cost(config, steps, run_s, statistics.median(sizes) if sizes else None, around_s)

    def rows(self, store: Path) -> list[tuple[str, str]]:
        """Steps, time, hours of devices, disk and jobs, each with what is to say of it."""
        cluster, value, low, high = self.config.cluster, self.run_s.value or 0.0, self.run_s.low, self.run_s.high or 0.0
        devices, kind = (cluster.ranks, "GPU") if cluster.device == "cuda" else (self._cores, "CPU core")
        hours = [rounded(one * devices / HOUR_S) for one in (value, low or value, high)]
        first = "the faster of these two steps, the first of their process"
        band = f"{amount(value, 's')} ({amount(low, 's')} to {amount(high, 's')}): from the plan, and from {first}"
        time = f"at most {amount(high, 's')}: from {first}" if low is None else band
        return [
            ("steps", count(self.steps)),
            ("time", time),
            (f"{kind}-hours", f"{hours[0]} ({hours[1]} to {hours[2]}) on {count(devices, f'{kind}s')}"),
            ("starting and ending", f"{amount(self.around_s, 's')} of each job"),
            ("disk for checkpoints", self._disk(store)),
            ("jobs", self._jobs(value, high)),
        ]

    @property
    def _cores(self) -> int:
        return self.config.cluster.ranks * self.config.cluster.cpus_per_rank

    def _disk(self, store: Path) -> str:
        if self.checkpoint_bytes is None:
            return "not known: no checkpoint was written"
        kept = self.config.train.keep_last + self.config.train.keep_best + 1
        needed, free = kept * self.checkpoint_bytes, shutil.disk_usage(store).free
        said = f"{size(needed)} for {kept} of {size(self.checkpoint_bytes)}; {size(free)} are free"
        return said if needed <= free else f"{said}: too little, lower train.keep_last or free some space"

    def _jobs(self, value_s: float, high_s: float) -> str:
        """How many jobs of a cluster, with the time limit that the config gives."""
        minutes, requeues = self.config.cluster.runtime_minutes, self.config.cluster.max_requeues
        if minutes is None:
            return "cluster.runtime_minutes is not given: a job asks for what the plan predicts"
        each_s = minutes * _MINUTE_S - self.around_s
        if each_s <= 0:
            return (
                f"cluster.runtime_minutes {minutes} is over before the first step: starting and ending take "
                f"{amount(self.around_s, 's')}; raise it"
            )
        jobs, most = (max(1, math.ceil(seconds / each_s)) for seconds in (value_s, high_s))
        said = f"{jobs if jobs == most else f'{jobs} to {most}'} of cluster.runtime_minutes {minutes}"
        over = f"; cluster.max_requeues {requeues} allows {requeues + 1}, raise it" if most > requeues + 1 else ""
        return f"{said}{over}"
