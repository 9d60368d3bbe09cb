"""Why nobody works on a stage that is not done: it failed, was interrupted, waits in SLURM, or was never begun.

The newest word counts: SLURM's queue, then the end of the stage's log, then what the run and its ranks left.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pipeline_lib.base.errors import Interrupted
from pipeline_lib.base.redact import redact
from pipeline_lib.slurm.queue import QueuedJob
from pipeline_lib.status.run import Row, Run
from pipeline_lib.status.tail import LOG_BYTES, changed_at, json_object, tail, text_of, whole

DONE = "done"
RUNNING = "running"
WAITING = "waiting"
REQUEUED = "requeued"
INTERRUPTED = "interrupted"
FAILED = "failed"
NOT_BEGUN = "not begun"
UNREADABLE = "unreadable"

CONTINUES = "run the same command again to continue"  # as train.launch.outcome ends what is no failure
LOST_A_PEER = "lost a peer"  # as train.dist says it
LOGS, SLURM_LOGS = Path("logs"), Path("logs/slurm")
REASON_CHARS = 600
_OVER = ("COMPLETED", "COMPLETING", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")
_SLACK_S = 5.0  # between the last event and the end of the log, which may be on other file systems
_SILENT = "nobody works on it any more, and it did not say why: it was killed, or its machine went down"


@dataclass(frozen=True)
class AtRest:
    """A state and why it is that."""

    state: str
    reason: str | None = None


@dataclass(frozen=True)
class Traces:
    """What there is to go by: `jobs` are SLURM's of this stage instance, None where SLURM is not known."""

    stage: str
    digest: str
    known_since: float | None  # when its spec was written: what is older is not of this store
    run: Run | None
    jobs: list[QueuedJob] | None
    folder: Path  # where snakemake runs

    @cached_property
    def log(self) -> Path | None:
        """The log of the stage's newest attempt, if it can be one of this store, where the stage is not done."""
        path = self.folder / LOGS / self.stage / f"{self.digest}.log"
        written = changed_at(path)
        last_event = changed_at(self.run.folder / "events.jsonl") if self.run else None
        if written is None or written < max(self.known_since or 0.0, (last_event or 0.0) - _SLACK_S):
            return None
        done = tuple(f"{self.stage} {self.digest}: {said}".encode() for said in ("done", "already done"))
        return None if any(line.startswith(done) for line in tail(path, LOG_BYTES)[0].split(b"\n")) else path

    def slurm_log(self, job: str | None) -> Path | None:
        """What SLURM wrote for `job`, or for the newest job of the stage."""
        folder = self.folder / SLURM_LOGS / f"rule_{self.stage}_stage" / self.digest
        found = sorted(folder.glob("*.log"), key=lambda path: changed_at(path) or 0.0)
        return next((path for path in found if path.stem == job), found[-1] if found else None)


def at_rest(traces: Traces) -> AtRest:
    """The state of a stage that nobody works on."""
    is_over = not any(job.state not in _OVER for job in traces.jobs or [])
    if not is_over or _is_between_jobs(traces):
        return _queued(traces)
    if (error := _last_error(traces.log)) is not None:
        return AtRest(INTERRUPTED if CONTINUES in error or _says_interrupted(traces.run) else FAILED, shown(error))
    if traces.run is not None and (found := _of_run(traces.run, traces.log is not None)):
        return found
    return AtRest(INTERRUPTED, _SILENT) if traces.log is not None else AtRest(NOT_BEGUN)


def _is_between_jobs(traces: Traces) -> bool:
    """Whether SLURM was asked to start the run again, and it is not known that it will not."""
    return _is_requeued(traces.run) and (traces.jobs is None or bool(traces.jobs))


def _is_requeued(run: Run | None) -> bool:
    return run is not None and run.last_event.get("event") == "run.requeued"


def _queued(traces: Traces) -> AtRest:
    """Of a stage that SLURM will work on, or has just begun to."""
    job = traces.jobs[0] if traces.jobs else None
    run = traces.run
    if run is not None and (_is_requeued(run) or (job is not None and run.job == job.id)):
        why = text_of(run.last_event.get("reason")) if _is_requeued(run) else "SLURM took its nodes away"
        return AtRest(REQUEUED, _joined(shown(why or ""), _said_of(job)))
    return AtRest(WAITING, _said_of(job))


def _said_of(job: QueuedJob | None) -> str:
    if job is None:
        return ""
    starts = f", expected to start at {job.start}" if job.state == "PENDING" and "T" in job.start else ""
    return f"SLURM job {job.id}: {job.shown}{starts}"


def _joined(*parts: str) -> str | None:
    return "; ".join(part for part in parts if part) or None


def _of_run(run: Run, has_log: bool) -> AtRest | None:
    """What the run's own files say; None if it was never begun. Rehearsals and shorter runs share its folder."""
    reports = sorted(_reports(run.folder), key=_blame)
    if reports:
        first = reports[0]
        state = INTERRUPTED if first.get("exit_code") == Interrupted.exit_code else FAILED
        return AtRest(state, shown(f"rank {first.get('rank')}: {first['message']}"))
    if _says_interrupted(run):
        return AtRest(INTERRUPTED, shown(text_of(run.last_event.get("reason")) or _SILENT))
    if _is_requeued(run):
        return AtRest(INTERRUPTED, "SLURM was asked to start it again, and its job is gone from the queue")
    if run.last_event.get("event") == "run.end":
        step = whole(run.last_event.get("step"))
        if has_log:
            return AtRest(INTERRUPTED, f"stopped after step {step}, its last, while its result was sealed")
        return AtRest(NOT_BEGUN, f"a shorter run or a rehearsal ended after step {step}; it goes on from there")
    return AtRest(INTERRUPTED, _SILENT) if run.is_begun else None


def _says_interrupted(run: Run | None) -> bool:
    return run is not None and run.last_event.get("event") == "run.interrupted"


def _reports(folder: Path) -> Iterator[Row]:
    """What the ranks of the newest attempt left when they failed."""
    for path in (folder / "errors").glob("rank-*.json"):
        report = json_object(path)
        if text_of(report.get("message")) and whole(report.get("exit_code")) is not None:
            yield report


def _blame(report: Row) -> tuple[int, int]:
    """The rank that is to blame first, as train.launch.outcome has it: before mistakes of ours, before complaints."""
    is_complaint = report["exit_code"] == Interrupted.exit_code and LOST_A_PEER in report["message"]
    return (2 if is_complaint else int(report["exit_code"] == 1), whole(report.get("rank")) or 0)


def _last_error(log: Path | None) -> str | None:
    """The message that the stage ended with, from the end of its log: the last thing it says."""
    if log is None:
        return None
    lines = tail(log, LOG_BYTES)[0].decode(errors="replace").splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("error: ")]
    return "\n".join(lines[starts[-1] :]).removeprefix("error: ").strip() or None if starts else None


def shown(text: str) -> str:
    """`text` of a file as it may be shown: one line, not endless, without credentials and what moves the cursor."""
    line = re.sub(r"\s+", " ", "".join(char if char.isprintable() else " " for char in redact(text))).strip()
    return line if len(line) <= REASON_CHARS else f"{line[:REASON_CHARS]} ..."
