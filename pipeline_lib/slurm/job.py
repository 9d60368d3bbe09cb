"""Jobs of SLURM: the one that this process runs in, those in the queue, and queueing one again."""

import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.core.errors import CONTINUES, ConfigError, DiskFull, Interrupted, PipelineError
from pipeline_lib.core.events import EventLog, read_events
from pipeline_lib.core.stage import Say
from pipeline_lib.core.text import cut, redact

# The SLURM job that this process runs in, as the cluster describes it.
#
# Snakemake's job step hands down no SLURM variable but the job's number: everything else is asked for.

JOB_VARIABLE = "SLURM_JOB_ID"
CALL_S = 30.0
PATIENCE_S = 120.0  # a control daemon is restarted within a minute
RETRY_S = 2.0
# What SLURM's programs say when the control daemon does not answer, or not yet. All else is an answer.
_NO_ANSWER = (
    *("unable to contact", "timed out", "zero bytes", "connection refused", "connection reset", "standby"),
    *("temporarily", "communication", "no answer"),
)


class SlurmError(PipelineError):
    """SLURM answered, and refused."""

    exit_code = 69


@dataclass(frozen=True)
class SlurmJob:
    """A job and its fields, as they were when it was asked for."""

    id: int
    fields: Mapping[str, str]

    @staticmethod
    def of(environ: Mapping[str, str]) -> "SlurmJob | None":
        """The job that `environ` is of; None outside of one. Raises what `scontrol` raises."""
        number = environ.get(JOB_VARIABLE, "")
        return show_job(int(number)) if number.isdecimal() else None

    def show(self) -> "SlurmJob":
        """The same job as it is now. Raises what `scontrol` raises."""
        return show_job(self.id)

    @property
    def state(self) -> str:
        """RUNNING, COMPLETING and so on."""
        return self.fields["JobState"]

    @property
    def left_s(self) -> float | None:
        """How long it may run from when it was asked for, by SLURM's own count; None without a limit."""
        limit_s, run_s = (seconds_of(self.fields.get(name, "")) for name in ("TimeLimit", "RunTime"))
        return None if limit_s is None or run_s is None else limit_s - run_s

    @property
    def batch_host(self) -> str:
        """The name of the first node, where the batch script runs; empty for a job without one."""
        return self.fields.get("BatchHost", "")

    @property
    def node_list(self) -> str:
        """The nodes of the job in SLURM's short form, as `gpu[003-005,9]`."""
        return self.fields["NodeList"]


def seconds_of(duration: str) -> float | None:
    """A time as SLURM writes it, `1-00:30:00` or `30:00`; None for `UNLIMITED` and the like."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", duration)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def can_start_tasks(environ: Mapping[str, str]) -> bool:
    """Whether this is within a job whose nodes `srun` reaches: of the user or of Snakemake."""
    return JOB_VARIABLE in environ and shutil.which("srun", path=environ.get("PATH")) is not None


def show_job(number: int) -> SlurmJob:
    """The job with that number as it is now. Raises what `scontrol` raises."""
    return SlurmJob(number, fields_of(scontrol("show", "job", str(number))))


def job_and_log(environ: Mapping[str, str]) -> str | None:
    """Where this runs, and where all that it says is kept, for the end of an error; None outside of a job."""
    number = environ.get(JOB_VARIABLE, "")
    if not number.isdecimal():
        return None
    try:
        fields = fields_of(scontrol("show", "job", number, patience_s=0))
    except PipelineError:
        return f"in SLURM job {number}"
    return f"in SLURM job {number} on {fields.get('NodeList')}; its log: {fields.get('StdOut')}"


def node_address(name: str) -> str:
    """Where the node `name` is reached: names of nodes need not resolve. Raises what `scontrol` raises."""
    return fields_of(scontrol("show", "node", name))["NodeAddr"]


def node_names(node_list: str) -> tuple[str, ...]:
    """The names that `gpu[003-005,9]` stands for, in order. Raises what `scontrol` raises."""
    return tuple(scontrol("show", "hostnames", node_list).split())


def fields_of(line: str) -> dict[str, str]:
    """`JobId=7 JobName=two words JobState=RUNNING` as a mapping; only a name and its `=` begin a field."""
    parts = re.split(r"\s+(?=[A-Z][A-Za-z:/_]*=)", line.strip())
    return {name: value for name, _, value in (part.partition("=") for part in parts)}


def has_no_answer(text: str) -> bool:
    """Whether a program of SLURM says in `text` that the control daemon is silent."""
    return any(sign in text.lower() for sign in _NO_ANSWER)


def scontrol(*arguments: str, patience_s: float = PATIENCE_S) -> str:
    """What `scontrol --oneliner ARGUMENTS` prints; asked again while the control daemon does not answer.

    Raises SlurmError if it answers that it will not, and Interrupted if it is silent for `patience_s`.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        reason = "no answer"
        try:
            done = subprocess.run(
                ["scontrol", "--oneliner", *arguments], capture_output=True, text=True, timeout=CALL_S
            )
        except subprocess.TimeoutExpired:
            pass
        except OSError as error:
            raise SlurmError(f"scontrol cannot be run ({error}): SLURM's programs are to be on PATH") from error
        else:
            if done.returncode == 0:
                return done.stdout
            reason = (done.stderr.strip() or done.stdout.strip() or reason).splitlines()[-1]
            if not has_no_answer(reason):
                raise SlurmError(f"scontrol {' '.join(arguments)}: {reason}")
        if time.monotonic() > deadline_s:
            raise Interrupted(
                f"SLURM did not answer for {patience_s:.0f} s (scontrol {' '.join(arguments)}: {reason}); {CONTINUES}"
            )
        time.sleep(RETRY_S)


# What of ours waits or runs in SLURM's queue, as one call of squeue tells.
#
# The executor plugin names its jobs by UUIDs and puts the rule and its wildcards, thus the digest of the stage
# instance, into the comment: `rule_train_stage_wildcards_DIGEST`.

RUNNING = "RUNNING"
PENDING = "PENDING"
_FORMAT = "%i|%T|%r|%S|%Z|%k"  # the comment last, since people may write anything into theirs


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue. `start` is when it began or is expected to, as squeue writes it ("N/A": not known)."""

    id: str
    state: str
    reason: str
    start: str
    work_dir: str
    comment: str

    @property
    def shown(self) -> str:
        """Its state, with SLURM's reason if it waits for one: `PENDING (Resources)`."""
        return f"{self.state} ({self.reason})" if self.state == PENDING and self.reason else self.state


def queued_jobs(timeout_s: float = 5.0) -> list[QueuedJob] | None:
    """All jobs in the queue that carry a comment; None if there is no SLURM here or it does not answer in time."""
    command = ["squeue", "--noheader", "--format", _FORMAT]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    jobs = (_parse(line) for line in done.stdout.decode(errors="replace").split("\n"))
    return [job for job in jobs if job is not None]


def of_digest(jobs: list[QueuedJob], *digests: str) -> list[QueuedJob]:
    """Those of `jobs` that work on a stage instance of `digests`: one that runs first, then those that wait."""
    found = [job for job in jobs if any(digest in job.comment for digest in digests)]
    return sorted(found, key=lambda job: (job.state != RUNNING, job.state != PENDING))


def _parse(line: str) -> QueuedJob | None:
    """The job that `line` tells of; None for lines that are none of ours."""
    fields = [field.strip() for field in line.split("|", 5)]
    if len(fields) < 6 or not fields[5] or fields[5] == "(null)":
        return None
    return QueuedJob(*fields)


# A Snakemake that was killed leaves its jobs in the queue: the next one waits for them, and submits no second copy.

_POLL_S = 5.0
_TELL_S = 60.0
_SILENCE_S = 300.0  # of the control daemon, before it is taken to know of no jobs
# Reasons that time does not end: of the limits those of a partition, and those that one job goes beyond by itself.
_STUCK = re.compile(
    r"held|neversatisfied|invalid|badconstraints|partition\w*limit|perjob|pernode|maxmemperlimit", re.IGNORECASE
)
_QUOTA = re.compile(r"^(QOS|Assoc)?(Grp|Max)|Limit$")  # all other limits: of a user, an account, a QOS


def wait_for_jobs(titles: Mapping[str, str], work_dir: Path, say: Say) -> None:
    """Wait until no job of ours in the queue makes one of the stage instances `titles`, by digest.

    Only those that were submitted from `work_dir`: those of other clones have locks, and other stores perhaps.
    Raises ConfigError for a job that will never begin.
    """
    told_s = answered_s = time.monotonic() - _TELL_S
    waited = False
    while True:
        jobs = queued_jobs()
        ours = _ours(jobs or [], titles, work_dir)
        if jobs is not None:
            answered_s = time.monotonic()
        if not ours and (jobs is not None or time.monotonic() - answered_s > _SILENCE_S):
            if waited:
                say("the jobs of the earlier snakemake have ended")
            return
        _refuse_stuck(ours)
        if time.monotonic() - told_s >= _TELL_S:
            for digest, job in ours.items():
                why = "; a quota is used up, and it begins when there is room again" if _waits_for_quota(job) else ""
                say(f"waiting for SLURM job {job.id}, {job.shown}, of an earlier snakemake: {titles[digest]}{why}")
            if jobs is None:
                say("waiting for squeue, which does not answer")
            told_s = time.monotonic()
        waited = waited or bool(ours)
        time.sleep(_POLL_S)


def _ours(jobs: list[QueuedJob], titles: Mapping[str, str], work_dir: Path) -> dict[str, QueuedJob]:
    near = [job for job in jobs if Path(job.work_dir) == work_dir]
    return {digest: found[0] for digest in titles if (found := of_digest(near, digest))}


def _waits_for_quota(job: QueuedJob) -> bool:
    return job.state == PENDING and _QUOTA.search(job.reason) is not None


def _refuse_stuck(jobs: Mapping[str, QueuedJob]) -> None:
    for job in jobs.values():
        if job.state == PENDING and _STUCK.search(job.reason):
            raise ConfigError(
                f"SLURM job {job.id} of an earlier snakemake",
                [f"it will not begin by itself ({job.reason}): `scontrol release {job.id}` or `scancel {job.id}`"],
            )


# A job that was interrupted is queued again, as long as that gets it on: SLURM itself does so only for lost nodes.

REQUEUED_EVENT, REFUSED_EVENT = "run.requeued", "run.requeue_refused"
VAIN_ATTEMPTS = 3  # in a row, at the end of which nothing new was saved
_ENDED_WITHIN_S = 120.0
_REASON_CHARS = 500


@dataclass(frozen=True)
class Run:
    """A training that the SLURM job `job` makes. `saved_step` is 0 if nothing is saved yet."""

    job: int
    events_path: Path
    saved_step: int
    max_requeues: int


def queue_again(run: Run, error: PipelineError, say: Say) -> str:
    """Queue the job again, in which this runs and which `error` interrupted; SLURM then ends this process.

    Returns why it was not: others have ended it or queue it again, it was often enough, gets nowhere, or SLURM refused.
    """
    events = read_events(run.events_path)
    attempt = max((int(event.get("attempt", 0)) for event in events), default=0)
    brief = cut(redact(str(error)), _REASON_CHARS)
    try:
        log = EventLog(run.events_path, attempt=attempt)
        if (state := show_job(run.job).state) != "RUNNING":
            return f"others are ending SLURM job {run.job}, which is {state}"
        if reason := why_not(events, run):
            return reason
        log.emit(REQUEUED_EVENT, job=run.job, step=run.saved_step, reason=brief)  # now: SLURM ends us when it is asked
        say(f"launch: {error}")
        say(f"launch: SLURM job {run.job} is to be queued again, and go on from step {run.saved_step} in some minutes")
    except PipelineError as silent:
        return str(silent)
    try:
        scontrol("requeue", str(run.job))
    except PipelineError as refused:
        with suppress(OSError, DiskFull):  # `refused` says more than a full disk
            log.emit(REFUSED_EVENT, job=run.job, step=run.saved_step, reason=cut(redact(str(refused)), _REASON_CHARS))
        return str(refused)
    _wait_for_the_end()
    return f"SLURM did not end job {run.job}, which it was asked to queue again"


def why_not(events: Sequence[Mapping[str, Any]], run: Run) -> str | None:
    """Why the job is not queued again; None if it may be."""
    steps = _requeued_steps(events, run.job)
    if len(steps) >= run.max_requeues:
        return f"that was done {len(steps)} times, as often as cluster.max_requeues allows"
    if steps[1 - VAIN_ATTEMPTS :] == [run.saved_step] * (VAIN_ATTEMPTS - 1):
        return f"{VAIN_ATTEMPTS} attempts in a row ended at step {run.saved_step}, so something else is wrong"
    return None


def _requeued_steps(events: Sequence[Mapping[str, Any]], job: int) -> list[Any]:
    """What was saved each time that SLURM agreed to queue `job` again."""
    steps: list[Any] = []
    for event in events:
        if event.get("job") == job and event.get("event") == REQUEUED_EVENT:
            steps.append(event.get("step"))
        elif event.get("job") == job and event.get("event") == REFUSED_EVENT and steps:
            steps.pop()
    return steps


def _wait_for_the_end() -> None:
    """Until SLURM ends the job: who leaves before would make it look like a job that failed."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_ENDED_WITHIN_S)
