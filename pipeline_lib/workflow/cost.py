"""The cost of the whole run, estimated from its first two steps and its plan."""

import math
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.config.schema import Config
from pipeline_lib.core.events import EventName
from pipeline_lib.core.run_record import RunRecord
from pipeline_lib.core.units import HOUR_S, amount, count, rounded, size
from pipeline_lib.records.plan import PlanDocument


@dataclass(frozen=True)
class Cost:
    """The cost of all steps.

    `run_s`, from `low_s` to `high_s`, includes saving and validation as far as they are known; there
    is no low end where the plan predicts no time. `checkpoint_bytes` is the size of one checkpoint.
    `around_s` is the time of each job before its first step and after its last one.
    """

    config: Config
    steps: int
    run_s: float
    low_s: float | None
    high_s: float
    checkpoint_bytes: float | None
    around_s: float

    @staticmethod
    def of(
        config: Config, plan: PlanDocument, step_s: float, around_s: float, record: RunRecord
    ) -> "Cost":
        """Estimate the cost from `step_s`, the faster of two first steps.

        Later steps are assumed to be no slower.
        """
        saved = record.named(EventName.CHECKPOINT_SAVED)
        sizes = [float(event["bytes"]) for event in saved if "bytes" in event]
        steps = plan.run_steps
        way = plan.prediction
        low: float | None = None
        if way is not None and way.run_s is not None:
            planned = way.step_s
            beside_s = max(0.0, way.run_s.value - steps * planned.value)
            low = steps * min(planned.low, step_s) + beside_s
            value = steps * min(planned.value, step_s) + beside_s
            high = steps * max(planned.value, step_s) + beside_s
        else:
            save_s = statistics.median(
                [float(event.get("duration_s", 0.0)) for event in saved] or [0.0]
            )
            saves = config.train.saves(steps, plan.batch.steps_per_epoch or steps)
            value = steps * step_s + save_s * saves
            high = value
        return Cost(
            config=config,
            steps=steps,
            run_s=value,
            low_s=low,
            high_s=high,
            checkpoint_bytes=statistics.median(sizes) if sizes else None,
            around_s=around_s,
        )

    def rows(self, store: Path) -> list[tuple[str, str]]:
        """Return labels and texts for steps, time, device hours, startup, disk and jobs."""
        cluster = self.config.cluster
        value = self.run_s
        low = self.low_s
        high = self.high_s
        devices = cluster.ranks
        kind = "GPU"
        if cluster.device != "cuda":
            devices = cluster.ranks * cluster.cpus_per_rank
            kind = "CPU core"
        hours = [rounded(one * devices / HOUR_S) for one in (value, low or value, high)]
        first = "the faster of these two steps, the first of their process"
        time = f"at most {amount(high, 's')}: from {first}"
        if low is not None:
            time = (
                f"{amount(value, 's')} ({amount(low, 's')} to {amount(high, 's')}): from the "
                f"plan, and from {first}"
            )
        disk = "not known: no checkpoint was written"
        if self.checkpoint_bytes is not None:
            kept = self.config.train.checkpoints_on_disk
            needed = kept * self.checkpoint_bytes
            free = shutil.disk_usage(store).free
            disk = (
                f"{size(needed)} for {kept} of {size(self.checkpoint_bytes)}; {size(free)} are free"
            )
            disk += (
                "" if needed <= free else ": too little, lower train.keep_last or free some space"
            )
        return [
            ("steps", count(self.steps)),
            ("time", time),
            (
                f"{kind}-hours",
                f"{hours[0]} ({hours[1]} to {hours[2]}) on {count(devices, f'{kind}s')}",
            ),
            ("startup and shutdown", f"{amount(self.around_s, 's')} of each job"),
            ("disk for checkpoints", disk),
            ("jobs", self._jobs(value, high)),
        ]

    def _jobs(self, value_s: float, high_s: float) -> str:
        """Return the number of cluster jobs under the configured time limit."""
        minutes = self.config.cluster.runtime_minutes
        requeues = self.config.cluster.max_requeues
        if minutes is None:
            return (
                "cluster.runtime_minutes is not set: a job requests the time that the plan predicts"
            )
        each_s = minutes * 60 - self.around_s
        if each_s <= 0:
            return (
                f"cluster.runtime_minutes {minutes} is over before the first step: startup and "
                f"shutdown take {amount(self.around_s, 's')}; raise it"
            )
        jobs, most = (max(1, math.ceil(seconds / each_s)) for seconds in (value_s, high_s))
        over = (
            f"; cluster.max_requeues {requeues} allows {requeues + 1}, raise it"
            if most > requeues + 1
            else ""
        )
        return (
            f"{jobs if jobs == most else f'{jobs} to {most}'} of cluster.runtime_minutes "
            f"{minutes}{over}"
        )
