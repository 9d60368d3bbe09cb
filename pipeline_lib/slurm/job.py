"""Describe this process's SLURM job and the queue, wait for jobs, and requeue this one."""

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
from pipeline_lib.core.events import EventLog, EventName, read_events
from pipeline_lib.core.stage import Say
from pipeline_lib.core.text import reason_of
from pipeline_lib.core.units import count

# The SLURM job of this process. Snakemake's job step passes on only the job's number from SLURM's
# variables, so `scontrol` is asked for everything else.

JOB_VARIABLE = "SLURM_JOB_ID"
CALL_S = 30.0
PATIENCE_S = 120.0  # a control daemon is restarted within a minute
RETRY_S = 2.0
# Words of SLURM's programs that mean that the control daemon does not answer (yet). Any other
# message is an answer.
_NO_ANSWER = (
    *(
        "unable to contact",
        "timed out",
        "zero bytes",
        "connection refused",
        "connection reset",
        "standby",
    ),
    *("temporarily", "communication", "no answer"),
)


class SlurmError(PipelineError):
    """An error for a request that SLURM refused."""

    exit_code = 69


@dataclass(frozen=True)
class SlurmJob:
    """A job and its fields, as they were when SLURM was asked."""

    id: int
    fields: Mapping[str, str]

    @staticmethod
    def of(environ: Mapping[str, str]) -> "SlurmJob | None":
        """Return the job of the environment `environ`; None outside of a job.

        Raises as `scontrol`.
        """
        number = environ.get(JOB_VARIABLE, "")
        return show_job(int(number)) if number.isdecimal() else None

    @property
    def left_s(self) -> float | None:
        """The seconds left when SLURM was asked, by its own count; None without a time limit."""
        limit_s, run_s = (
            seconds_of(self.fields.get(name, "")) for name in ("TimeLimit", "RunTime")
        )
        return None if limit_s is None or run_s is None else limit_s - run_s


def seconds_of(duration: str) -> float | None:
    """Parse a duration of SLURM, `1-00:30:00` or `30:00`; return None for `UNLIMITED` and such."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", duration)
    if found is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def can_start_tasks(environ: Mapping[str, str]) -> bool:
    """Return whether this process is in a job, the user's or Snakemake's, that `srun` reaches."""
    return JOB_VARIABLE in environ and shutil.which("srun", path=environ.get("PATH")) is not None


def show_job(number: int) -> SlurmJob:
    """Return the job with that number as it is now. Raises as `scontrol`."""
    return SlurmJob(number, fields_of(scontrol("show", "job", str(number))))


def job_and_log(environ: Mapping[str, str]) -> str | None:
    """Describe the job, its nodes and its log file, to end an error message; None without a job."""
    number = environ.get(JOB_VARIABLE, "")
    if not number.isdecimal():
        return None
    try:
        fields = fields_of(scontrol("show", "job", number, patience_s=0))
    except PipelineError:
        return f"in SLURM job {number}"
    return f"in SLURM job {number} on {fields.get('NodeList')}; its log: {fields.get('StdOut')}"


def node_address(name: str) -> str:
    """Return the address of the node `name`, since node names need not resolve.

    Raises as `scontrol`.
    """
    return fields_of(scontrol("show", "node", name))["NodeAddr"]


def node_names(node_list: str) -> tuple[str, ...]:
    """Return the names that `gpu[003-005,9]` stands for, in order. Raises as `scontrol`."""
    return tuple(scontrol("show", "hostnames", node_list).split())


def fields_of(line: str) -> dict[str, str]:
    """Parse `JobId=7 JobName=two words JobState=RUNNING` into a mapping; values may have spaces."""
    parts = re.split(r"\s+(?=[A-Z][A-Za-z:/_]*=)", line.strip())
    return {name: value for name, _, value in (part.partition("=") for part in parts)}


def has_no_answer(text: str) -> bool:
    """Return whether a message of a SLURM program says that the control daemon does not answer."""
    return any(sign in text.lower() for sign in _NO_ANSWER)


def scontrol(*arguments: str, patience_s: float = PATIENCE_S) -> str:
    """Return what `scontrol --oneliner ARGUMENTS` prints; retry while the daemon does not answer.

    Raises SlurmError if SLURM refuses, and Interrupted if there is no answer within `patience_s`.
    """
    command = ["scontrol", "--oneliner", *arguments]
    deadline_s = time.monotonic() + patience_s
    while True:
        reason = "no answer"
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_S)
        except subprocess.TimeoutExpired:
            pass
        except OSError as error:
            raise SlurmError(
                f"scontrol cannot be run ({error}): put SLURM's programs on PATH"
            ) from error
        else:
            if done.returncode == 0:
                return done.stdout
            reason = (done.stderr.strip() or done.stdout.strip() or reason).splitlines()[-1]
            if not has_no_answer(reason):
                raise SlurmError(f"scontrol {' '.join(arguments)}: {reason}")
        if time.monotonic() > deadline_s:
            raise Interrupted(
                f"SLURM did not answer for {patience_s:.0f} s (scontrol {' '.join(arguments)}: "
                f"{reason}); {CONTINUES}"
            )
        time.sleep(RETRY_S)


# Our jobs in SLURM's queue, from one call of squeue. The executor plugin names jobs by UUIDs. It
# puts the rule and its wildcards, thus the digest of the stage instance, into the comment:
# `rule_train_stage_wildcards_DIGEST`.

RUNNING = "RUNNING"
PENDING = "PENDING"
_FORMAT = "%i|%T|%r|%S|%Z|%k"  # the comment last, since it may contain anything


@dataclass(frozen=True)
class QueuedJob:
    """A job in the queue.

    `start` is its actual or expected start as squeue prints it, "N/A" if not known.
    """

    id: str
    state: str
    reason: str
    start: str
    work_dir: str
    comment: str

    @property
    def shown(self) -> str:
        """The state, with SLURM's reason if the job is pending: `PENDING (Resources)`."""
        return (
            f"{self.state} ({self.reason})" if self.state == PENDING and self.reason else self.state
        )


def queued_jobs(timeout_s: float = 5.0) -> list[QueuedJob] | None:
    """Return all queued jobs with a comment; None without SLURM or an answer in time."""
    command = ["squeue", "--noheader", "--format", _FORMAT]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode:
        return None
    jobs = []
    for line in done.stdout.decode(errors="replace").split("\n"):
        fields = [field.strip() for field in line.split("|", 5)]
        if len(fields) == 6 and fields[5] not in ("", "(null)"):
            jobs.append(QueuedJob(*fields))
    return jobs


def of_digest(jobs: list[QueuedJob], *digests: str) -> list[QueuedJob]:
    """Return the jobs on a stage instance of `digests`: running ones first, then pending ones."""
    found = [job for job in jobs if any(digest in job.comment for digest in digests)]
    return sorted(found, key=lambda job: (job.state != RUNNING, job.state != PENDING))


# A killed Snakemake leaves its jobs in the queue. The next one waits for them instead of submitting
# a second copy.

_POLL_S = 5.0
_TELL_S = 60.0
_SILENCE_S = 300.0  # without an answer, after which the queue is taken to be empty
# Reasons that do not go away with time: limits of a partition, and limits that a single job
# exceeds.
_STUCK = re.compile(
    r"held|neversatisfied|invalid|badconstraints|partition\w*limit|perjob|pernode|maxmemperlimit",
    re.IGNORECASE,
)
# all other limits, of a user, an account or a QOS
_QUOTA = re.compile(r"^(QOS|Assoc)?(Grp|Max)|Limit$")


def wait_for_jobs(titles: Mapping[str, str], work_dir: Path, say: Say) -> None:
    """Wait until no queued job of ours makes a stage instance in `titles`, given by digest.

    Only jobs submitted from `work_dir` count: jobs of other clones have locks, and may use other
    stores. Raises ConfigError for a job that will never start.
    """
    told_s = answered_s = time.monotonic() - _TELL_S
    waited = False
    while True:
        jobs = queued_jobs()
        near = [job for job in jobs or [] if Path(job.work_dir) == work_dir]
        ours = {digest: found[0] for digest in titles if (found := of_digest(near, digest))}
        if jobs is not None:
            answered_s = time.monotonic()
        if not ours and (jobs is not None or time.monotonic() - answered_s > _SILENCE_S):
            if waited:
                say("the jobs of the earlier snakemake have ended")
            return
        for job in ours.values():
            if job.state == PENDING and _STUCK.search(job.reason):
                remedy = f"`scontrol release {job.id}` or `scancel {job.id}`"
                problem = f"it will not start by itself ({job.reason}): {remedy}"
                raise ConfigError(f"SLURM job {job.id} of an earlier snakemake", [problem])
        if time.monotonic() - told_s >= _TELL_S:
            for digest, job in ours.items():
                is_quota = job.state == PENDING and _QUOTA.search(job.reason)
                why = (
                    "; a quota is used up, and the job starts when other jobs have ended"
                    if is_quota
                    else ""
                )
                say(
                    f"waiting for SLURM job {job.id}, {job.shown}, of an earlier snakemake: "
                    f"{titles[digest]}{why}"
                )
            if jobs is None:
                say("squeue does not answer; waiting for it")
            told_s = time.monotonic()
        waited = waited or bool(ours)
        time.sleep(_POLL_S)


# Requeueing of an interrupted job, as long as it makes progress. SLURM itself requeues only after
# the loss of a node.

VAIN_ATTEMPTS = 3  # in a row that saved nothing new
_ENDED_WITHIN_S = 120.0


@dataclass(frozen=True)
class TrainingJob:
    """A training in the SLURM job `job`. `saved_step` is 0 if nothing is saved yet."""

    job: int
    events_path: Path
    saved_step: int
    max_requeues: int


def queue_again(run: TrainingJob, error: PipelineError, say: Say) -> str:
    """Requeue the SLURM job of this process, which `error` interrupted.

    SLURM then ends this process. Returns the reason if the job is not requeued: it is no longer
    running, the limit is reached, it makes no progress, or SLURM refused or did not answer.
    """
    events = read_events(run.events_path)
    attempt = max((int(event.get("attempt", 0)) for event in events), default=0)
    brief = reason_of(error)
    try:
        log = EventLog(run.events_path, attempt=attempt)
        if (state := show_job(run.job).fields["JobState"]) != RUNNING:
            return f"SLURM job {run.job} is being ended already: it is {state}"
        if reason := why_not(events, run):
            return reason
        # Before the request, which ends this process.
        log.emit(EventName.RUN_REQUEUED, job=run.job, step=run.saved_step, reason=brief)
        say(f"launch: {error}")
        say(
            f"launch: SLURM job {run.job} will be queued again, to continue from step "
            f"{run.saved_step} in some minutes"
        )
    except PipelineError as silent:
        return str(silent)
    try:
        scontrol("requeue", str(run.job))
    except PipelineError as refused:
        brief = reason_of(refused)
        with suppress(OSError, DiskFull):  # `refused` matters more than a full disk
            log.emit(EventName.RUN_REQUEUE_REFUSED, job=run.job, step=run.saved_step, reason=brief)
        return str(refused)
    # Wait for SLURM to end the job: a process that exits earlier makes it look like a failed job.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_ENDED_WITHIN_S)
    return f"SLURM was asked to queue job {run.job} again, and did not end it"


def why_not(events: Sequence[Mapping[str, Any]], run: TrainingJob) -> str | None:
    """Return why the job must not be requeued; None if it may be."""
    steps: list[Any] = []  # the saved step of each time that SLURM agreed to requeue the job
    for event in events:
        if event.get("job") == run.job and event.get("event") == EventName.RUN_REQUEUED:
            steps.append(event.get("step"))
        elif (
            event.get("job") == run.job
            and event.get("event") == EventName.RUN_REQUEUE_REFUSED
            and steps
        ):
            steps.pop()
    if len(steps) >= run.max_requeues:
        return (
            f"cluster.max_requeues allows {count(run.max_requeues, 'times')}, and that is reached"
        )
    if steps[1 - VAIN_ATTEMPTS :] == [run.saved_step] * (VAIN_ATTEMPTS - 1):
        return (
            f"{VAIN_ATTEMPTS} attempts in a row ended at step {run.saved_step}, so something "
            "else is wrong"
        )
    return None
