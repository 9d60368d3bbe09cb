"""Why nobody works on a stage that is not done: it failed, waits in SLURM, or never began.

It may also have been interrupted. The newest evidence counts: SLURM's queue, then the end of the
stage's log, then what the run and its ranks left. If an old log describes the same end as the
latter, they know better whether it was a failure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pipeline_lib.config.halving import RUNG_LOGS
from pipeline_lib.core.errors import Interrupted, end_of_log
from pipeline_lib.core.events import EventName
from pipeline_lib.core.language import N_, _
from pipeline_lib.core.run_folder import ERRORS, EVENTS_NAME
from pipeline_lib.core.run_record import RunRecord, tail, text_of, whole
from pipeline_lib.core.stage import done_lines
from pipeline_lib.core.store import Ref
from pipeline_lib.core.text import one_line, shortened
from pipeline_lib.launch.rank_report import RankReport
from pipeline_lib.slurm.queue import PENDING, QueuedJob
from pipeline_lib.status.catalog import changed_at, json_object

DONE = N_("done")
RUNNING = N_("running")
WAITING = N_("waiting")
REQUEUED = N_("requeued")
INTERRUPTED = N_("interrupted")
FAILED = N_("failed")
NOT_BEGUN = N_("not begun")
STOPPED = N_("stopped")  # by its sweep, until the sweep decides anew
UNREADABLE = N_("unreadable")

LOGS = Path("logs")
SLURM_LOGS = Path("logs/slurm")
_RUNG_RULE = "rule_rung_stage"
REASON_CHARS = 600
LOG_BYTES = 16 * 1024
_OVER = (
    "COMPLETED",
    "COMPLETING",
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
)
# between the last event and the end of the log, which may be on different file systems
_SLACK_S = 5.0
_ENDED_FOR_GOOD = (EventName.RUN_FAILED, EventName.RUN_REQUEUE_REFUSED)
_SILENT = N_("its process is gone and left no message: it was killed, or its machine went down")


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
        """The newest attempt's log; None if older than the spec or the run, or a success.

        A log from before a rewind is about a run that is no more.
        """
        logs = {self.digest: self.folder / LOGS / self.stage / f"{self.digest}.log"}
        for rung in self.to_rungs:
            logs[rung] = self.folder / LOGS / RUNG_LOGS / f"{rung}.log"
        digest, path = max(logs.items(), key=lambda each: changed_at(each[1]) or 0.0)
        written = changed_at(path)
        since = self.known_since or 0.0
        if self.run is not None:
            slack_s = 0.0 if self.run.is_rewound else _SLACK_S
            last_event = changed_at(self.run.folder / EVENTS_NAME) or 0.0
            since = max(since, last_event - slack_s)
        if written is None or written < since:
            return None
        done = tuple(line.encode() for line in done_lines(Ref(self.stage, digest)))
        for line in tail(path, LOG_BYTES)[0].split(b"\n"):
            if line.startswith(done):
                return None
        return path

    def slurm_log(self, job: str | None) -> Path | None:
        """Return SLURM's log of `job`, else of the stage's newest job; None without one."""
        folders = [self.folder / SLURM_LOGS / f"rule_{self.stage}_stage" / self.digest]
        folders += [self.folder / SLURM_LOGS / _RUNG_RULE / digest for digest in self.to_rungs]
        logs: list[Path] = []
        for folder in folders:
            logs += folder.glob("*.log")
        logs.sort(key=lambda path: changed_at(path) or 0.0)
        for path in logs:
            if path.stem == job:
                return path
        return logs[-1] if logs else None


def at_rest(traces: Traces) -> AtRest:
    """Return the state of a stage that nobody works on."""
    if (queued := _in_queue(traces)) is not None:
        return queued
    if (ended := _end_of_log(traces)) is not None:
        return ended
    has_log = traces.log is not None
    if traces.run is not None and (ended := _end_of_run(traces.run, has_log)) is not None:
        return ended
    return AtRest(INTERRUPTED, _(_SILENT)) if has_log else AtRest(NOT_BEGUN)


def _in_queue(traces: Traces) -> AtRest | None:
    """Return the state by SLURM's queue; None if no job is to work on the stage."""
    run = traces.run
    is_requeued = run is not None and run.last_event.get("event") == EventName.RUN_REQUEUED
    jobs = _jobs_to_come(traces)
    if jobs:
        queued = _queued(jobs[0])
        if run is not None and (is_requeued or run.job == jobs[0].id):
            return _requeued(run, queued)
        return AtRest(WAITING, queued)
    # Unless SLURM answered that it has no job, nothing shows that it will not requeue.
    if run is not None and is_requeued and traces.jobs != []:
        return _requeued(run, "")
    return None


def _jobs_to_come(traces: Traces) -> list[QueuedJob]:
    """Return the jobs that are still to work on the stage."""
    jobs = [job for job in traces.jobs or [] if job.state not in _OVER]
    run = traces.run
    if run is not None and run.last_event.get("event") in _ENDED_FOR_GOOD:
        # SLURM lists a job until it has ended what the run has ended for good.
        jobs = [job for job in jobs if run.job != job.id or job.state == PENDING]
    return jobs


def _queued(job: QueuedJob) -> str:
    starts = ""
    if job.state == PENDING and "T" in job.start:
        starts = f", expected to start at {job.start}"
    return f"SLURM job {job.id}: {job.shown}{starts}"


def _requeued(run: RunRecord, queued: str) -> AtRest:
    why = text_of(run.last_event.get("reason")) or "SLURM took its nodes away"
    return AtRest(REQUEUED, _joined(shown(why), queued))


def _joined(*parts: str) -> str | None:
    return "; ".join(part for part in parts if part) or None


def _end_of_log(traces: Traces) -> AtRest | None:
    """Return the state by the error that ends the log; None without a log or an error in it.

    Its exit code tells a failure from an interruption. A log may lack it, as one on a full disk:
    then what the run and its ranks report about the same end counts.
    """
    if traces.log is None:
        return None
    end = end_of_log(tail(traces.log, LOG_BYTES)[0].decode(errors="replace"))
    if end is None:
        return None
    message = shown(end.message)
    if end.is_interruption:
        return AtRest(INTERRUPTED, message)
    if end.exit_code is None and traces.run is not None:
        for known in _ends_of(traces.run):
            if known.reason and _contains(end.message, known.reason):
                return AtRest(known.state, message)
    return AtRest(FAILED, message)


def _contains(message: str, reason: str) -> bool:
    """Return whether `message` contains `reason`, which may have been shortened."""
    return one_line(reason).removesuffix("...").rstrip() in one_line(message)


def _ends_of(run: RunRecord) -> Iterator[AtRest]:
    """Yield how the newest attempt ended, as raw text: by its last event, then by its ranks.

    The most telling rank comes first.
    """
    reason = text_of(run.last_event.get("reason"))
    if run.is_rewound:
        return  # the reports of its ranks are from before
    match run.last_event.get("event"):
        case EventName.RUN_INTERRUPTED:
            yield AtRest(INTERRUPTED, reason)
        case EventName.RUN_FAILED:
            yield AtRest(FAILED, reason)
        case EventName.RUN_REQUEUE_REFUSED:
            yield AtRest(INTERRUPTED, f"not queued again: {reason or 'SLURM refused'}")
    reports = []
    for path in (run.folder / ERRORS).glob("rank-*.json"):
        report = RankReport.from_json(json_object(path))
        if report is not None:
            reports.append(report)
    for report in sorted(reports, key=lambda each: (each.blame, each.rank)):
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
        return AtRest(known.state, _joined(shown(before or ""), shown(known.reason or _(_SILENT))))
    if run.is_rewound:
        return AtRest(INTERRUPTED, f"rewound to step {whole(run.last_event.get('step'))}")
    if last == EventName.RUN_REQUEUED:
        why = "SLURM was asked to start it again, and its job is gone from the queue"
        return AtRest(INTERRUPTED, why)
    if last == EventName.RUN_END:
        step = whole(run.last_event.get("step"))
        if has_log:
            why = f"stopped after its last step, {step}, before its result was sealed"
            return AtRest(INTERRUPTED, why)
        why = f"a shorter run or a rehearsal ended after step {step}; training resumes from there"
        return AtRest(NOT_BEGUN, why)
    return AtRest(INTERRUPTED, _(_SILENT)) if run.rows or run.events else None


def shown(text: str) -> str:
    """Return a file's `text` safe to show: one short line without credentials and control codes."""
    return shortened(text, REASON_CHARS)
