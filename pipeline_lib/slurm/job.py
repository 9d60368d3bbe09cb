"""The SLURM job that this process runs in, as the cluster describes it.

Snakemake's job step hands down no SLURM variable but the job's number: everything else is asked for.
"""

import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline_lib.base.errors import CONTINUES, Interrupted, PipelineError

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
