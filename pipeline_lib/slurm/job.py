"""The SLURM job of this process, and what `scontrol` says of jobs and nodes.

Snakemake's job step passes on only the job's number from SLURM's variables, so `scontrol` is asked
for everything else.
"""

import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline_lib.core.errors import CONTINUES, Interrupted, PipelineError

JOB_VARIABLE = "SLURM_JOB_ID"
CALL_S = 30.0
PATIENCE_S = 120.0  # a control daemon is restarted within a minute
RETRY_S = 2.0
# Words of SLURM's programs that mean that the control daemon does not answer (yet). Any other
# message is an answer.
_NO_ANSWER = (
    "unable to contact",
    "timed out",
    "zero bytes",
    "connection refused",
    "connection reset",
    "standby",
    "temporarily",
    "communication",
    "no answer",
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
        limit_s = seconds_of(self.fields.get("TimeLimit", ""))
        run_s = seconds_of(self.fields.get("RunTime", ""))
        if limit_s is None or run_s is None:
            return None
        return limit_s - run_s


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
    fields = {}
    for part in re.split(r"\s+(?=[A-Z][A-Za-z:/_]*=)", line.strip()):
        name, _, value = part.partition("=")
        fields[name] = value
    return fields


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
            problem = f"scontrol cannot be run ({error}): put SLURM's programs on PATH"
            raise SlurmError(problem) from error
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
