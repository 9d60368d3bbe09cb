"""The numbers of a training run, from the ends of the files in its folder.

A number that is not known is None. What an earlier attempt left is never shown as that of a later one.
"""

import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pipeline_lib.base.manifest import MANIFEST_NAME
from pipeline_lib.base.run_folder import CHECKPOINTS, EVENTS_NAME, METRICS_NAME, PLAN_NAME, SUMMARY_NAME, sealed_steps
from pipeline_lib.slurm.requeue import REFUSED, REQUEUED
from pipeline_lib.status.tail import (
    EVENTS_BYTES,
    METRICS_BYTES,
    changed_at,
    json_object,
    number,
    objects,
    tail,
    text_of,
    whole,
)
from pipeline_lib.train.progress import speed, training_time_s

RECENT_STEPS = 20  # as train.progress has it
READ_STEPS = 40  # those and some more, so that a loss is there though the guards refused a few
STALLED_S, STALLED_STEPS = 60.0, 10  # without a step for longer than both: no ETA

Row = dict[str, Any]


@dataclass(frozen=True)
class Numbers:
    """How far a training is. `elapsed_s` is the time from the attempt's first step on; of a finished one, of them all.

    `since_step_s` is how long the last step is ago; `is_stalled` says that this is far longer than a step takes.
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


@dataclass(frozen=True)
class Run:
    """The folder of a training run as it is now."""

    folder: Path
    rows: list[Row]
    events: list[Row]
    has_all_events: bool

    @staticmethod
    def read(folder: Path) -> "Run":
        """Read the ends of the files in `folder`, which need not be there."""
        metrics, _ = tail(folder / METRICS_NAME, METRICS_BYTES)
        events, is_all = tail(folder / EVENTS_NAME, EVENTS_BYTES)
        rows = [row for row in objects(metrics, last=READ_STEPS) if whole(row.get("step")) is not None]
        return Run(folder, rows, objects(events, b'"run.'), is_all)

    @property
    def is_begun(self) -> bool:
        """Whether anything was ever done."""
        return bool(self.rows or self.events)

    @property
    def last_event(self) -> Row:
        """The last event about the run as a whole."""
        return self.events[-1] if self.events else {}

    @property
    def attempt(self) -> int | None:
        """The number of the newest attempt."""
        launched = self.newest("run.launched").get("attempt")
        return whole(launched) or (whole(self.rows[-1].get("attempt")) if self.rows else None)

    @property
    def job(self) -> str | None:
        """The SLURM job of the newest attempt."""
        return text_of(self.newest("run.launched").get("job"))

    def newest(self, name: str) -> Row:
        """The last event `name`; empty if there is none."""
        return next((event for event in reversed(self.events) if event.get("event") == name), {})

    def numbers(self, is_alive: bool) -> Numbers:
        """All of them. Those about speed only of a run that is alive."""
        attempt = self.attempt
        rows = [row for row in self.rows if whole(row.get("attempt")) == attempt]
        step, recent = self._step(rows, is_alive), rows[-(RECENT_STEPS + 1) :] if is_alive else []
        last_step, each_s = self._last_step(is_alive), _each_s(recent)
        since_step_s = age_s(self.folder / METRICS_NAME) if recent else None
        is_over = step is not None and step == last_step
        is_late = since_step_s is not None and since_step_s > max(STALLED_S, STALLED_STEPS * (each_s or 0.0))
        is_stalled = is_late and not is_over
        eta_s = None
        if step is not None and last_step is not None and each_s is not None and not is_stalled:
            eta_s = round(max(0, last_step - step) * each_s, 1)
        checkpoint_step, checkpoint_age_s = newest_checkpoint(self.folder / CHECKPOINTS)
        return Numbers(
            step=step,
            last_step=last_step,
            loss=last_loss(rows if is_alive else self.rows),
            tokens_per_s=speed(number(row.get("tokens_per_s")) for row in recent),
            eta_s=eta_s,
            elapsed_s=number(rows[-1].get("elapsed_s")) if rows else None,
            since_step_s=since_step_s,
            attempt=attempt,
            requeues=self._requeues(),
            peak_memory_bytes=max((whole(row.get("peak_memory_bytes")) or 0 for row in rows), default=0) or None,
            checkpoint_step=checkpoint_step,
            checkpoint_age_s=checkpoint_age_s,
            is_stalled=is_stalled,
        )

    def _step(self, rows: list[Row], is_alive: bool) -> int | None:
        """The last step made: an attempt that works and made none yet stands where it took up."""
        if rows or not is_alive:
            made = rows or self.rows
            return whole(made[-1]["step"]) if made else None
        resumed = self.newest("run.resumed")
        return whole(resumed.get("step")) if resumed.get("attempt") == self.attempt else None

    def _last_step(self, is_alive: bool) -> int | None:
        """Where the attempt is to stop; of one that ended there and is not what is asked for, it says nothing."""
        ended_well = not is_alive and self.last_event.get("event") == "run.end"
        return None if ended_well else whole(self.newest("run.start").get("last_step"))

    def _requeues(self) -> int | None:
        """How often SLURM agreed to start the run again; None if that is too far back to know."""
        if not self.has_all_events:
            return None
        refused = [event.get("attempt") for event in self.events if event.get("event") == REFUSED]
        asked = [event.get("attempt") for event in self.events if event.get("event") == REQUEUED]
        return sum(attempt not in refused for attempt in asked)


def finished_numbers(sealed: Path) -> Numbers:
    """What a finished training came to, from its summary; from its steps where earlier code left out speed and time."""
    found = json_object(sealed / SUMMARY_NAME)
    if found and not {"tokens_per_s", "training_time_s"} <= found.keys():
        found = {**_speed_and_time(sealed / METRICS_NAME), **found}
    step = whole(found.get("steps"))
    return Numbers(
        step=step,
        last_step=step,
        loss=number(found.get("final_loss")),
        tokens_per_s=number(found.get("tokens_per_s")),
        elapsed_s=number(found.get("training_time_s")),
        attempt=whole(found.get("attempts")),
    )


@lru_cache(maxsize=1024)
def _speed_and_time(metrics: Path) -> dict[str, float | None]:
    """Both from all steps of a sealed training, which never change; None where there are none."""
    try:
        rows = objects(metrics.read_bytes())
    except OSError:
        rows = []
    return {
        "tokens_per_s": speed(number(row.get("tokens_per_s")) for row in rows),
        "training_time_s": training_time_s((whole(row.get("attempt")), number(row.get("elapsed_s"))) for row in rows),
    }


def planned_steps(plan_dir: Path) -> int | None:
    """The steps that the sealed plan counts on."""
    batch = json_object(plan_dir / PLAN_NAME).get("batch")
    return whole(batch.get("steps")) if isinstance(batch, dict) else None


def newest_checkpoint(folder: Path) -> tuple[int | None, float | None]:
    """The step of the newest sealed checkpoint, and how long ago it was sealed."""
    for step, path in reversed(sealed_steps(folder)):
        sealed_s = age_s(path / MANIFEST_NAME)
        if sealed_s is not None:
            return step, sealed_s
    return None, None


def age_s(path: Path) -> float | None:
    """How long ago the file at `path` changed."""
    at = changed_at(path)
    return None if at is None else max(0.0, round(time.time() - at, 1))


def last_loss(rows: list[Row]) -> float | None:
    """The loss of the last step that was applied."""
    return next((number(row.get("loss")) for row in reversed(rows) if "verdict" not in row), None)


def _each_s(rows: list[Row]) -> float | None:
    """Seconds of a step with all that is between them, as train.progress counts; `rows` are of one attempt."""
    if not rows:
        return None
    first, last = rows[0], rows[-1]
    begun_s, ended_s, steps = (
        number(first.get("elapsed_s")),
        number(last.get("elapsed_s")),
        last["step"] - first["step"],
    )
    if begun_s is None or ended_s is None:
        return None
    each_s = (ended_s - begun_s) / steps if steps > 0 else ended_s
    return each_s if each_s >= 0 else None
