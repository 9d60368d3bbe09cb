"""Read the numbers of a training run, and find out why nobody works on a stage that is not done."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from pipeline_lib.config.halving import RUNG_LOGS
from pipeline_lib.core.errors import IntegrityError, Interrupted, end_of_log
from pipeline_lib.core.events import EventName
from pipeline_lib.core.rank_use import RankUse
from pipeline_lib.core.run_folder import (
    CHECKPOINTS,
    ERRORS,
    EVENTS_NAME,
    METRICS_NAME,
    PLAN_NAME,
    SUMMARY_NAME,
    sealed_steps,
)
from pipeline_lib.core.run_record import Event, RunRecord, number, objects, tail, text_of, whole
from pipeline_lib.core.stage import done_lines
from pipeline_lib.core.store import MANIFEST_NAME, Ref
from pipeline_lib.core.text import one_line, shortened
from pipeline_lib.launch.rank_report import RankReport
from pipeline_lib.records.plan import read_plan
from pipeline_lib.slurm.job import PENDING, QueuedJob
from pipeline_lib.status.catalog import changed_at, json_object
from pipeline_lib.train.metrics import speed, training_time_s

# The numbers of a training run, from the ends of the files in its folder. Numbers of an earlier attempt are never shown
# as those of a later one.

RECENT_STEPS = 20  # the same as in train.metrics.print_progress
STALLED_S, STALLED_STEPS = 60.0, 10  # without a step for longer than both: no ETA


@dataclass(frozen=True)
class Numbers:
    """The progress of a training; a number that is not known is None.

    `elapsed_s` is the time since the attempt's first step, for a finished training the time of all attempts.
    `since_step_s` is the time since the last step. `is_stalled` is true if that is far longer than a step takes.
    `peak_memory_bytes` is of the rank with the largest. `gpu_utilization` is by rank, as a fraction of time; `warnings`
    are about both.
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
    """Return the numbers of `run`, read by `read_ends`. Those about speed are known only of a run that is alive."""
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
    return whole(run.last_event.get("step")) if _is_rewound(run) else None


def _counted_rows(run: RunRecord) -> list[Event]:
    """Return the rows of steps that still count: not those that were taken back by a rewind."""
    rewound = _rewound_to(run)
    if rewound is None:
        return list(run.rows)
    return [row for row in run.rows if row["step"] <= rewound]


def _step_of(run: RunRecord, counted: Sequence[Event], rows: Sequence[Event], is_alive: bool) -> int | None:
    """Return the newest step, from the `counted` rows of all attempts and the `rows` of the last one."""
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
    """Return the step at which `run` will end; None if it has ended, maybe short of what is asked for now."""
    if not is_alive and run.last_event.get("event") in (EventName.RUN_END, EventName.RUN_REWOUND):
        return None
    return whole(run.newest(EventName.RUN_START).get("last_step"))


def _newest_loss(rows: Sequence[Event]) -> float | None:
    """Return the loss of the newest step that was not skipped or rolled back."""
    applied = (row for row in reversed(rows) if "verdict" not in row)
    return next((number(row.get("loss")) for row in applied), None)


def _is_late(since_step_s: float | None, each_s: float | None) -> bool:
    """Return whether the last step is so long ago that the run seems to hang."""
    return since_step_s is not None and since_step_s > max(STALLED_S, STALLED_STEPS * (each_s or 0.0))


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
    """Return the most that a rank has used, from the rows of the first rank and the `use` of all."""
    peaks = [whole(row.get("peak_memory_bytes")) or 0 for row in rows]
    return round(max([*peaks, *use.peak_memory_bytes], default=0)) or None


def finished_numbers(sealed: Path) -> Numbers:
    """Return the numbers of a finished training, from its summary.

    Speed and time come from its steps if earlier code left them out of the summary.
    """
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
    """Return both from all steps of a sealed training, which never change; None if there are no steps."""
    try:
        rows = objects(metrics.read_bytes())
    except OSError:
        rows = []
    return {
        "tokens_per_s": speed(number(row.get("tokens_per_s")) for row in rows),
        "training_time_s": training_time_s((whole(row.get("attempt")), number(row.get("elapsed_s"))) for row in rows),
    }


def planned_steps(plan_dir: Path) -> int | None:
    """Return the number of steps in the sealed plan; None if it is not known."""
    try:
        return read_plan(plan_dir / PLAN_NAME).batch.steps
    except (OSError, IntegrityError):
        return None


def newest_checkpoint(folder: Path) -> tuple[int | None, float | None]:
    """Return the step of the newest sealed checkpoint and its age in seconds; None for both without one."""
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
    """Return the seconds per step of one attempt, including all work between steps, as train.metrics counts them."""
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


# Why nobody works on a stage that is not done: it failed, was interrupted, waits in SLURM, or was never begun. The
# newest evidence counts: SLURM's queue, then the end of the stage's log, then what the run and its ranks left. If an
# old log describes the same end as the latter, they know better whether it was a failure.

DONE = "done"
RUNNING = "running"
WAITING = "waiting"
REQUEUED = "requeued"
INTERRUPTED = "interrupted"
FAILED = "failed"
NOT_BEGUN = "not begun"
STOPPED = "stopped"  # by its sweep, until the sweep decides anew
UNREADABLE = "unreadable"

LOGS, SLURM_LOGS = Path("logs"), Path("logs/slurm")
_RUNG_RULE = "rule_rung_stage"
REASON_CHARS = 600
LOG_BYTES = 16 * 1024
_OVER = ("COMPLETED", "COMPLETING", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")
_SLACK_S = 5.0  # between the last event and the end of the log, which may be on different file systems
# The end of an interruption's message before logs had an exit line. It must match old logs, so it never changes.
_OLD_CONTINUES = "run the same command again to continue"
_SILENT = "its process is gone and left no message: it was killed, or its machine went down"


@dataclass(frozen=True)
class AtRest:
    """The state of a stage, and the reason for it."""

    state: str
    reason: str | None = None


@dataclass(frozen=True)
class Traces:
    """The evidence about a stage instance. `jobs` are its SLURM jobs; None if SLURM gave no answer.

    `to_rungs` are the digests of the trainings to a rung that share this training's run.
    """

    stage: str
    digest: str
    known_since: float | None  # when its spec was written; anything older is not of this store
    run: RunRecord | None
    jobs: list[QueuedJob] | None
    folder: Path  # where snakemake runs
    to_rungs: Sequence[str] = ()

    @cached_property
    def log(self) -> Path | None:
        """The log of the newest attempt; None if it is older than the spec or the run, or ends in success.

        A log from before a rewind is about a run that is no more.
        """
        logs = {self.digest: self.folder / LOGS / self.stage / f"{self.digest}.log"}
        logs |= {digest: self.folder / LOGS / RUNG_LOGS / f"{digest}.log" for digest in self.to_rungs}
        digest, path = max(logs.items(), key=lambda each: changed_at(each[1]) or 0.0)
        written = changed_at(path)
        last_event = changed_at(self.run.folder / EVENTS_NAME) if self.run else None
        slack_s = 0.0 if self.run is not None and _is_rewound(self.run) else _SLACK_S
        if written is None or written < max(self.known_since or 0.0, (last_event or 0.0) - slack_s):
            return None
        done = tuple(line.encode() for line in done_lines(Ref(self.stage, digest)))
        return None if any(line.startswith(done) for line in tail(path, LOG_BYTES)[0].split(b"\n")) else path

    def slurm_log(self, job: str | None) -> Path | None:
        """Return SLURM's log of `job`, else of the newest job of the stage; None if there is none."""
        folders = [self.folder / SLURM_LOGS / f"rule_{self.stage}_stage" / self.digest]
        folders += [self.folder / SLURM_LOGS / _RUNG_RULE / digest for digest in self.to_rungs]
        logs = (path for folder in folders for path in folder.glob("*.log"))
        found = sorted(logs, key=lambda path: changed_at(path) or 0.0)
        return next((path for path in found if path.stem == job), found[-1] if found else None)


def at_rest(traces: Traces) -> AtRest:
    """Return the state of a stage that nobody works on."""
    run = traces.run
    last = run.last_event.get("event") if run is not None else None
    jobs = [job for job in traces.jobs or [] if job.state not in _OVER]
    if run is not None and last in (EventName.RUN_FAILED, EventName.RUN_REQUEUE_REFUSED):
        # SLURM lists a job until it has ended what the run has ended for good.
        jobs = [job for job in jobs if run.job != job.id or job.state == PENDING]
    is_requeued = last == EventName.RUN_REQUEUED
    if jobs or (is_requeued and (traces.jobs is None or bool(traces.jobs))):  # nothing shows that it will not requeue
        job = jobs[0] if jobs else None
        queued = ""
        if job is not None:
            starts = f", expected to start at {job.start}" if job.state == "PENDING" and "T" in job.start else ""
            queued = f"SLURM job {job.id}: {job.shown}{starts}"
        if run is not None and (is_requeued or (job is not None and run.job == job.id)):
            why = text_of(run.last_event.get("reason")) or "SLURM took its nodes away"
            return AtRest(REQUEUED, _joined(shown(why), queued))
        return AtRest(WAITING, queued)
    if (ended := _end_of_log(traces)) is not None:
        return ended
    if run is not None and (ended := _end_of_run(run, traces.log is not None)):
        return ended
    return AtRest(INTERRUPTED, _SILENT) if traces.log is not None else AtRest(NOT_BEGUN)


def _is_rewound(run: RunRecord) -> bool:
    """Return whether nothing has happened to the run since it was rewound."""
    return run.last_event.get("event") == EventName.RUN_REWOUND


def _joined(*parts: str) -> str | None:
    return "; ".join(part for part in parts if part) or None


def _end_of_log(traces: Traces) -> AtRest | None:
    """Return the state by the error that ends the log; None without a log or an error in it.

    Its exit code tells a failure from an interruption. Older logs have none: then what the run and its ranks report
    about the same end counts, else the words of the error.
    """
    if traces.log is None:
        return None
    end = end_of_log(tail(traces.log, LOG_BYTES)[0].decode(errors="replace"))
    if end is None:
        return None
    message = end.message
    if end.exit_code is not None or end.is_interruption:
        return AtRest(INTERRUPTED if end.is_interruption else FAILED, shown(message))
    for known in _ends_of(traces.run) if traces.run is not None else ():
        if known.reason and one_line(known.reason).removesuffix("...").rstrip() in one_line(message):
            return AtRest(known.state, shown(message))
    return AtRest(INTERRUPTED if _OLD_CONTINUES in message else FAILED, shown(message))


def _ends_of(run: RunRecord) -> Iterator[AtRest]:
    """Yield how the newest attempt ended, as raw text: by its last event, then by its ranks, the most telling first."""
    reason = text_of(run.last_event.get("reason"))
    if _is_rewound(run):
        return  # the reports of its ranks are from before
    match run.last_event.get("event"):
        case EventName.RUN_INTERRUPTED:
            yield AtRest(INTERRUPTED, reason)
        case EventName.RUN_FAILED:
            yield AtRest(FAILED, reason)
        case EventName.RUN_REQUEUE_REFUSED:
            yield AtRest(INTERRUPTED, f"not queued again: {reason or 'SLURM refused'}")
    reports = [RankReport.from_json(json_object(path)) for path in (run.folder / ERRORS).glob("rank-*.json")]
    for report in sorted(filter(None, reports), key=lambda each: (each.blame, each.rank)):
        state = INTERRUPTED if report.exit_code == Interrupted.exit_code else FAILED
        yield AtRest(state, f"rank {report.rank}: {report.message}")


def _end_of_run(run: RunRecord, has_log: bool) -> AtRest | None:
    """Return the state according to the run's own files; None if the run was never begun.

    Rehearsals and shorter runs share its folder.
    """
    last = run.last_event.get("event")
    if (known := next(_ends_of(run), None)) is not None:
        before = None
        if last == EventName.RUN_REQUEUE_REFUSED:
            before = text_of(run.newest(EventName.RUN_INTERRUPTED).get("reason"))
        return AtRest(known.state, _joined(shown(before or ""), shown(known.reason or _SILENT)))
    if _is_rewound(run):
        return AtRest(INTERRUPTED, f"rewound to step {whole(run.last_event.get('step'))}")
    if last == EventName.RUN_REQUEUED:
        return AtRest(INTERRUPTED, "SLURM was asked to start it again, and its job is gone from the queue")
    if last == EventName.RUN_END:
        step = whole(run.last_event.get("step"))
        if has_log:
            return AtRest(INTERRUPTED, f"stopped after its last step, {step}, before its result was sealed")
        return AtRest(NOT_BEGUN, f"a shorter run or a rehearsal ended after step {step}; training resumes from there")
    return AtRest(INTERRUPTED, _SILENT) if run.rows or run.events else None


def shown(text: str) -> str:
    """Return `text` of a file in a form safe to show: one line, shortened, no credentials, no control characters."""
    return shortened(text, REASON_CHARS)
