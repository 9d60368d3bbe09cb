"""Why nobody works on a stage that is not done: it failed, was interrupted, waits in SLURM, or was never begun.

The newest word counts: SLURM's queue, then the end of the stage's log, then what the run and its ranks left.
Where the log and those tell of the same end, they know better whether it was a failure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pipeline_lib.base.errors import EXIT_LINE, Interrupted, exit_line
from pipeline_lib.base.redact import one_line, shortened
from pipeline_lib.base.run_folder import ERRORS, EVENTS_NAME
from pipeline_lib.base.spec import Ref
from pipeline_lib.base.stage import done_lines
from pipeline_lib.config.halving import RUNG_LOGS
from pipeline_lib.slurm import requeue
from pipeline_lib.slurm.queue import PENDING, QueuedJob
from pipeline_lib.status.run import Run
from pipeline_lib.status.tail import LOG_BYTES, changed_at, json_object, tail, text_of, whole
from pipeline_lib.train.blame import Report

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
    if run is None or run.last_event.get("event") not in ("run.failed", requeue.REFUSED):
        return False
    return run.job == job.id and job.state != PENDING


def _is_between_jobs(traces: Traces) -> bool:
    """Whether SLURM was asked to start the run again, and it is not known that it will not."""
    return _is_requeued(traces.run) and (traces.jobs is None or bool(traces.jobs))


def _is_requeued(run: Run | None) -> bool:
    return run is not None and run.last_event.get("event") == requeue.REQUEUED


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
        case requeue.REFUSED:
            yield AtRest(INTERRUPTED, f"not queued again: {reason or 'SLURM refused'}")
    for report in sorted(_reports(run.folder), key=lambda each: (each.blame, each.rank)):
        state = INTERRUPTED if report.exit_code == Interrupted.exit_code else FAILED
        yield AtRest(state, f"rank {report.rank}: {report.message}")


def _of_run(run: Run, has_log: bool) -> AtRest | None:
    """What the run's own files say; None if it was never begun. Rehearsals and shorter runs share its folder."""
    if (known := next(_ends_of(run), None)) is not None:
        is_refused = run.last_event.get("event") == requeue.REFUSED
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
