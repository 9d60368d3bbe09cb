"""The numbers of a training run, from the ends of the files in its folder.

Numbers of an earlier attempt are never shown as those of a later one.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.events import EventName
from pipeline_lib.core.rank_use import RankUse
from pipeline_lib.core.run_folder import (
    CHECKPOINTS,
    METRICS_NAME,
    PLAN_NAME,
    sealed_steps,
)
from pipeline_lib.core.run_record import Event, RunRecord, number, whole
from pipeline_lib.core.store import MANIFEST_NAME
from pipeline_lib.records.plan import read_plan
from pipeline_lib.records.training import Training, read_training, speed
from pipeline_lib.status.catalog import changed_at

RECENT_STEPS = 20  # the same as in train.metrics.print_progress
STALLED_S, STALLED_STEPS = 60.0, 10  # without a step for longer than both: no ETA


@dataclass(frozen=True)
class Numbers:
    """The progress of a training; a number that is not known is None.

    `elapsed_s` is the time since the attempt's first step, for a finished training the time of all
    attempts. `since_step_s` is the time since the last step. `is_stalled` is true if that is far
    longer than a step takes. `peak_memory_bytes` is of the rank with the largest. `gpu_utilization`
    is by rank, as a fraction of time; `warnings` are about both.
    """

    step: int | None = None
    last_step: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    eta_s: float | None = None
    elapsed_s: float | None = None
    since_step_s: float | None = None
    attempt: int | None = None
    requeues: int | None = None
    peak_memory_bytes: int | None = None
    checkpoint_step: int | None = None
    checkpoint_age_s: float | None = None
    is_stalled: bool = False
    gpu_utilization: tuple[float, ...] | None = None
    warnings: tuple[str, ...] = ()


def numbers_of(run: RunRecord, is_alive: bool) -> Numbers:
    """Return the numbers of `run`, read by `read_ends`.

    Those about speed are known only of a run that is alive.
    """
    counted = _counted_rows(run)
    rows = [row for row in counted if whole(row.get("attempt")) == run.attempt]
    recent = rows[-(RECENT_STEPS + 1) :] if is_alive else []
    step = _step_of(run, counted, rows, is_alive)
    last_step = _last_step_of(run, is_alive)
    each_s = _each_s(recent)
    since_step_s = age_s(run.folder / METRICS_NAME) if recent else None
    is_stalled = _is_late(since_step_s, each_s) and (step is None or step != last_step)
    checkpoint_step, checkpoint_age_s = newest_checkpoint(run.folder / CHECKPOINTS)
    use = RankUse.of(rows)
    return Numbers(
        step=step,
        last_step=last_step,
        loss=_newest_loss(rows if is_alive else counted),
        tokens_per_s=speed(number(row.get("tokens_per_s")) for row in recent),
        eta_s=None if is_stalled else _eta_s(step, last_step, each_s),
        elapsed_s=number(rows[-1].get("elapsed_s")) if rows else None,
        since_step_s=since_step_s,
        attempt=run.attempt,
        requeues=_requeues_of(run),
        peak_memory_bytes=_peak_memory_bytes(rows, use),
        checkpoint_step=checkpoint_step,
        checkpoint_age_s=checkpoint_age_s,
        is_stalled=is_stalled,
        gpu_utilization=use.utilization or None,
        warnings=tuple(use.warnings().values()) if is_alive else (),
    )


def _rewound_to(run: RunRecord) -> int | None:
    """Return the step that `run` was rewound to, if no attempt has begun since."""
    return whole(run.last_event.get("step")) if run.is_rewound else None


def _counted_rows(run: RunRecord) -> list[Event]:
    """Return the rows of steps that still count: not those that were taken back by a rewind."""
    rewound = _rewound_to(run)
    if rewound is None:
        return list(run.rows)
    return [row for row in run.rows if row["step"] <= rewound]


def _step_of(
    run: RunRecord, counted: Sequence[Event], rows: Sequence[Event], is_alive: bool
) -> int | None:
    """Return the newest step, from all attempts' `counted` rows and the last one's `rows`."""
    rewound = _rewound_to(run)
    if rewound is not None:
        return rewound
    if rows:
        return whole(rows[-1]["step"])
    if not is_alive:
        return whole(counted[-1]["step"]) if counted else None
    # A live attempt that has made no step yet is at the step it resumed from.
    resumed = run.newest(EventName.RUN_RESUMED)
    return whole(resumed.get("step")) if resumed.get("attempt") == run.attempt else None


def _last_step_of(run: RunRecord, is_alive: bool) -> int | None:
    """Return the step where `run` will end; None if it has ended, maybe short of the target."""
    if not is_alive and run.last_event.get("event") in (EventName.RUN_END, EventName.RUN_REWOUND):
        return None
    return whole(run.newest(EventName.RUN_START).get("last_step"))


def _newest_loss(rows: Sequence[Event]) -> float | None:
    """Return the loss of the newest step that was not skipped or rolled back."""
    for row in reversed(rows):
        if "verdict" not in row:
            return number(row.get("loss"))
    return None


def _is_late(since_step_s: float | None, each_s: float | None) -> bool:
    """Return whether the last step is so long ago that the run seems to hang."""
    if since_step_s is None:
        return False
    return since_step_s > max(STALLED_S, STALLED_STEPS * (each_s or 0.0))


def _eta_s(step: int | None, last_step: int | None, each_s: float | None) -> float | None:
    """Return the seconds that the remaining steps will take."""
    if step is None or last_step is None or each_s is None:
        return None
    return round(max(0, last_step - step) * each_s, 1)


def _requeues_of(run: RunRecord) -> int | None:
    """Return how often SLURM took the job back; None if the record of the run is not whole."""
    if not run.is_whole:
        return None
    refused = [event.get("attempt") for event in run.named(EventName.RUN_REQUEUE_REFUSED)]
    return sum(event.get("attempt") not in refused for event in run.named(EventName.RUN_REQUEUED))


def _peak_memory_bytes(rows: Sequence[Event], use: RankUse) -> int | None:
    """Return the most that a rank has used, from the first rank's rows and the `use` of all."""
    of_first = [whole(row.get("peak_memory_bytes")) or 0 for row in rows]
    peak = max(max(of_first, default=0), max(use.peak_memory_bytes, default=0))
    return round(peak) or None


def finished_numbers(sealed: Path) -> Numbers:
    """Return the numbers of a finished training, from its summary; none if that is damaged."""
    try:
        training = _finished(sealed)
    except (OSError, IntegrityError):
        return Numbers()
    return Numbers(
        step=training.steps,
        last_step=training.steps,
        loss=training.final_loss,
        tokens_per_s=training.tokens_per_s,
        elapsed_s=training.training_time_s,
        attempt=training.attempts,
    )


@lru_cache(maxsize=1024)
def _finished(sealed: Path) -> Training:
    """Return the summary of a sealed training, which stays as it is."""
    return read_training(sealed)


def planned_steps(plan_dir: Path) -> int | None:
    """Return the number of steps in the sealed plan; None if it is not known."""
    try:
        return read_plan(plan_dir / PLAN_NAME).batch.steps
    except (OSError, IntegrityError):
        return None


def newest_checkpoint(folder: Path) -> tuple[int | None, float | None]:
    """Return the newest sealed checkpoint's step and its age in seconds; None without one."""
    for step, path in reversed(sealed_steps(folder)):
        sealed_s = age_s(path / MANIFEST_NAME)
        if sealed_s is not None:
            return step, sealed_s
    return None, None


def age_s(path: Path) -> float | None:
    """Return how many seconds ago the file at `path` changed; None if that cannot be read."""
    at = changed_at(path)
    return None if at is None else max(0.0, round(time.time() - at, 1))


def _each_s(rows: Sequence[Event]) -> float | None:
    """Return one attempt's seconds per step, with work between steps, as in train.metrics."""
    if not rows:
        return None
    first = rows[0]
    last = rows[-1]
    begun_s = number(first.get("elapsed_s"))
    ended_s = number(last.get("elapsed_s"))
    steps = last["step"] - first["step"]
    if begun_s is None or ended_s is None:
        return None
    each_s = (ended_s - begun_s) / steps if steps > 0 else ended_s
    return each_s if each_s >= 0 else None
