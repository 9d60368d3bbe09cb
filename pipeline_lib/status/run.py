"""The numbers of a training run, and why nobody works on a stage that is not done."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from pipeline_lib.config.halving import RUNG_LOGS
from pipeline_lib.core.errors import EXIT_LINE, Interrupted, exit_line
from pipeline_lib.core.run_folder import (
    CHECKPOINTS,
    ERRORS,
    EVENTS_NAME,
    METRICS_NAME,
    PLAN_NAME,
    SUMMARY_NAME,
    sealed_steps,
)
from pipeline_lib.core.stage import done_lines
from pipeline_lib.core.store import MANIFEST_NAME, Ref
from pipeline_lib.core.text import one_line, shortened
from pipeline_lib.launch.outcome import Report
from pipeline_lib.slurm.job import PENDING, REFUSED_EVENT, REQUEUED_EVENT, QueuedJob
from pipeline_lib.status.catalog import (
    EVENTS_BYTES,
    LOG_BYTES,
    METRICS_BYTES,
    changed_at,
    json_object,
    number,
    objects,
    tail,
    text_of,
    whole,
)
from pipeline_lib.train.metrics import speed, training_time_s

# The numbers of a training run, from the ends of the files in its folder.
#
# A number that is not known is None. What an earlier attempt left is never shown as that of a later one.

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
        refused = [event.get("attempt") for event in self.events if event.get("event") == REFUSED_EVENT]
        asked = [event.get("attempt") for event in self.events if event.get("event") == REQUEUED_EVENT]
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


# Why nobody works on a stage that is not done: it failed, was interrupted, waits in SLURM, or was never begun.
#
# The newest word counts: SLURM's queue, then the end of the stage's log, then what the run and its ranks left.
# Where the log and those tell of the same end, they know better whether it was a failure.

DONE = "done"
RUNNING = "running"
WAITING = "waiting"
REQUEUED = "requeued"
INTERRUPTED = "interrupted"
FAILED = "failed"
NOT_BEGUN = "not begun"
STOPPED = "stopped"  # by its sweep, until that decides anew
UNREADABLE = "unreadable"

LOGS, SLURM_LOGS = Path("logs"), Path("logs/slurm")
_RUNG_RULE = "rule_rung_stage"
REASON_CHARS = 600
_OVER = ("COMPLETED", "COMPLETING", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")
_SLACK_S = 5.0  # between the last event and the end of the log, which may be on other file systems
# What the message of an interruption ended with before logs had an exit line; it is theirs, whatever is said today.
_OLD_CONTINUES = "run the same command again to continue"
_SILENT = "nobody works on it any more, and it did not say why: it was killed, or its machine went down"


@dataclass(frozen=True)
class AtRest:
    """A state and why it is that."""

    state: str
    reason: str | None = None


@dataclass(frozen=True)
class LastError:
    """The error at the end of a log. `exit_line` is as in errors.exit_line; None in logs of before there was one."""

    message: str
    exit_line: str | None


@dataclass(frozen=True)
class Traces:
    """What there is to go by: `jobs` are SLURM's of this stage instance, None where SLURM is not known.

    `to_rungs` are the digests of the trainings to a rung that share the run of this one.
    """

    stage: str
    digest: str
    known_since: float | None  # when its spec was written: what is older is not of this store
    run: Run | None
    jobs: list[QueuedJob] | None
    folder: Path  # where snakemake runs
    to_rungs: Sequence[str] = ()

    @cached_property
    def log(self) -> Path | None:
        """The log of the stage's newest attempt, if it can be one of this store, where the stage is not done."""
        logs = {self.digest: self.folder / LOGS / self.stage / f"{self.digest}.log"}
        logs |= {digest: self.folder / LOGS / RUNG_LOGS / f"{digest}.log" for digest in self.to_rungs}
        digest, path = max(logs.items(), key=lambda each: changed_at(each[1]) or 0.0)
        written = changed_at(path)
        last_event = changed_at(self.run.folder / EVENTS_NAME) if self.run else None
        if written is None or written < max(self.known_since or 0.0, (last_event or 0.0) - _SLACK_S):
            return None
        done = tuple(line.encode() for line in done_lines(Ref(self.stage, digest)))
        return None if any(line.startswith(done) for line in tail(path, LOG_BYTES)[0].split(b"\n")) else path

    def slurm_log(self, job: str | None) -> Path | None:
        """What SLURM wrote for `job`, or for the newest job of the stage."""
        folders = [self.folder / SLURM_LOGS / f"rule_{self.stage}_stage" / self.digest]
        folders += [self.folder / SLURM_LOGS / _RUNG_RULE / digest for digest in self.to_rungs]
        logs = (path for folder in folders for path in folder.glob("*.log"))
        found = sorted(logs, key=lambda path: changed_at(path) or 0.0)
        return next((path for path in found if path.stem == job), found[-1] if found else None)


def at_rest(traces: Traces) -> AtRest:
    """The state of a stage that nobody works on."""
    jobs = [job for job in traces.jobs or [] if job.state not in _OVER and not _is_ending(job, traces.run)]
    if jobs or _is_between_jobs(traces):
        return _queued(traces.run, jobs)
    if (error := _last_error(traces.log)) is not None:
        return AtRest(_state_of(error, traces.run), shown(error.message))
    if traces.run is not None and (found := _of_run(traces.run, traces.log is not None)):
        return found
    return AtRest(INTERRUPTED, _SILENT) if traces.log is not None else AtRest(NOT_BEGUN)


def _is_ending(job: QueuedJob, run: Run | None) -> bool:
    """Whether `job` is only there because SLURM takes a moment to end what `run` has ended for good."""
    if run is None or run.last_event.get("event") not in ("run.failed", REFUSED_EVENT):
        return False
    return run.job == job.id and job.state != PENDING


def _is_between_jobs(traces: Traces) -> bool:
    """Whether SLURM was asked to start the run again, and it is not known that it will not."""
    return _is_requeued(traces.run) and (traces.jobs is None or bool(traces.jobs))


def _is_requeued(run: Run | None) -> bool:
    return run is not None and run.last_event.get("event") == REQUEUED_EVENT


def _queued(run: Run | None, jobs: list[QueuedJob]) -> AtRest:
    """Of a stage that SLURM will work on, or has just begun to."""
    job = jobs[0] if jobs else None
    if run is not None and (_is_requeued(run) or (job is not None and run.job == job.id)):
        why = text_of(run.last_event.get("reason")) or "SLURM took its nodes away"
        return AtRest(REQUEUED, _joined(shown(why), _said_of(job)))
    return AtRest(WAITING, _said_of(job))


def _said_of(job: QueuedJob | None) -> str:
    if job is None:
        return ""
    starts = f", expected to start at {job.start}" if job.state == "PENDING" and "T" in job.start else ""
    return f"SLURM job {job.id}: {job.shown}{starts}"


def _joined(*parts: str) -> str | None:
    return "; ".join(part for part in parts if part) or None


def _state_of(error: LastError, run: Run | None) -> str:
    """Whether the `error` at the end of the log is a failure: by its exit code, which older logs do not have.

    Of those, by what the run and its ranks say of the same end, then by its words.
    """
    if error.exit_line is not None:
        return INTERRUPTED if error.exit_line == exit_line(Interrupted.exit_code) else FAILED
    for known in _ends_of(run) if run is not None else ():
        if known.reason and one_line(known.reason).removesuffix("...").rstrip() in one_line(error.message):
            return known.state
    return INTERRUPTED if _OLD_CONTINUES in error.message else FAILED


def _ends_of(run: Run) -> Iterator[AtRest]:
    """How the newest attempt ended: by its last event, then by its ranks, the most telling first; not yet `shown`."""
    reason = text_of(run.last_event.get("reason"))
    match run.last_event.get("event"):
        case "run.interrupted":
            yield AtRest(INTERRUPTED, reason)
        case "run.failed":
            yield AtRest(FAILED, reason)
        case event if event == REFUSED_EVENT:
            yield AtRest(INTERRUPTED, f"not queued again: {reason or 'SLURM refused'}")
    for report in sorted(_reports(run.folder), key=lambda each: (each.blame, each.rank)):
        state = INTERRUPTED if report.exit_code == Interrupted.exit_code else FAILED
        yield AtRest(state, f"rank {report.rank}: {report.message}")


def _of_run(run: Run, has_log: bool) -> AtRest | None:
    """What the run's own files say; None if it was never begun. Rehearsals and shorter runs share its folder."""
    if (known := next(_ends_of(run), None)) is not None:
        is_refused = run.last_event.get("event") == REFUSED_EVENT
        before = text_of(run.newest("run.interrupted").get("reason")) if is_refused else None
        return AtRest(known.state, _joined(shown(before or ""), shown(known.reason or _SILENT)))
    if _is_requeued(run):
        return AtRest(INTERRUPTED, "SLURM was asked to start it again, and its job is gone from the queue")
    if run.last_event.get("event") == "run.end":
        step = whole(run.last_event.get("step"))
        if has_log:
            return AtRest(INTERRUPTED, f"stopped after step {step}, its last, while its result was sealed")
        return AtRest(NOT_BEGUN, f"a shorter run or a rehearsal ended after step {step}; it goes on from there")
    return AtRest(INTERRUPTED, _SILENT) if run.is_begun else None


def _reports(folder: Path) -> Iterator[Report]:
    """What the ranks of the newest attempt left when they failed."""
    for path in (folder / ERRORS).glob("rank-*.json"):
        if (report := Report.from_json(json_object(path))) is not None:
            yield report


def _last_error(log: Path | None) -> LastError | None:
    """The error that the stage ended with, from the end of its log: the last thing it says."""
    if log is None:
        return None
    lines = tail(log, LOG_BYTES)[0].decode(errors="replace").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    told = lines[starts[-1] :] if starts else []
    message = "\n".join(line for line in told if not line.startswith(EXIT_LINE)).removeprefix("error: ").strip()
    return LastError(message, next((line for line in told if line.startswith(EXIT_LINE)), None)) if message else None


def shown(text: str) -> str:
    """`text` of a file as it may be shown: one line, not endless, without credentials and what moves the cursor."""
    return shortened(text, REASON_CHARS)
