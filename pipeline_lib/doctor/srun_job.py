"""The job: start a command on nodes by srun, and pass on its output.

The job never outlives the `with` block.
"""

import queue
import re
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from pipeline_lib.core.text import redact
from pipeline_lib.slurm.job import SlurmError

POLL_S = 2.0
CALL_S = 20.0
END_S = 15.0
KEPT_LINES = 200
# Variables of an enclosing job, which would make srun start a step of it. Outside a job, the user's
# are kept.
_OF_A_JOB = re.compile(r"(SLURM|SRUN|SBATCH)_")
_FROM_SRUN = re.compile(r"^(srun|slurmstepd): (error: )?")


def outside_of_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the variables of the SLURM job that this process may be in."""
    if "SLURM_JOB_ID" not in environ:
        return dict(environ)
    kept = {}
    for key, value in environ.items():
        if key == "SLURM_CONF" or not _OF_A_JOB.match(key):
            kept[key] = value
    return kept


class SrunJob:
    """A job started by srun, from the queue to its end; leaving its `with` block cancels it."""

    def __init__(
        self, options: list[str], command: list[str], environ: Mapping[str, str], cwd: Path
    ) -> None:
        """Submit `command` with srun's `options`."""
        self.name = f"doctor-{uuid.uuid4().hex[:12]}"
        self.errors: list[str] = []
        self.has_started = False
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._wait_told = ""
        self._asked_s = 0.0
        self._process = subprocess.Popen(
            ["srun", f"--job-name={self.name}", *options, *command],
            env=dict(environ),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is handled here, since srun would ask for a second one
            text=True,
            errors="replace",
        )
        streams = (
            (self._process.stdout, self._lines.put),
            (self._process.stderr, self._keep_error),
        )
        self._pumps = [threading.Thread(target=_pump, args=pair, daemon=True) for pair in streams]
        for pump in self._pumps:
            pump.start()

    def __enter__(self) -> "SrunJob":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Cancel the job if pending or running, and wait for srun and the rest of its output."""
        if self._process.poll() is None:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    ["scancel", f"--name={self.name}"], capture_output=True, timeout=CALL_S
                )
        if not self._ends_within(END_S):
            self._process.kill()
            self._process.wait()
        for pump in self._pumps:
            pump.join(END_S)

    def lines(self, wait_s: float, run_s: float, say: Callable[[str], None]) -> Iterator[str]:
        """Yield the tasks' output until they end, or for `run_s`.

        Raise SlurmError if none starts within `wait_s`.
        """
        begin_s = time.monotonic()
        started_s = None
        while started_s is None or time.monotonic() - started_s < run_s:
            with suppress(queue.Empty):
                line = self._lines.get(timeout=0.2)
                if line is None:
                    # srun reports failures of tasks last, and not after a cancellation
                    self._ends_within(END_S)
                    return
                started_s = started_s or time.monotonic()
                self.has_started = True
                yield line
                continue
            if started_s is None and not self.has_started:
                self._watch(begin_s, wait_s, say)
                started_s = time.monotonic() if self.has_started else None
        self.errors.append(f"not all was done within {run_s:.0f} s: the job was ended")

    def _ends_within(self, seconds: float) -> bool:
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _keep_error(self, line: str | None) -> None:
        if line is not None and line.strip():
            self.errors = [*self.errors, line.strip()][-KEPT_LINES:]

    def _watch(self, begin_s: float, wait_s: float, say: Callable[[str], None]) -> None:
        """Report changes of the job's state in the queue, and raise SlurmError after `wait_s`."""
        if time.monotonic() - self._asked_s < POLL_S:
            return
        self._asked_s = time.monotonic()
        command = ["squeue", "--noheader", f"--name={self.name}", "--format=%i|%T|%r|%S"]
        number = state = reason = start = ""  # also if squeue reports nothing
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_S)
            fields = done.stdout.strip().split("|", 3)
            if done.returncode == 0 and len(fields) == 4:
                number, state, reason, start = fields
        self.has_started = state in ("RUNNING", "COMPLETING")
        expected = f", expected to start at {start}" if start not in ("", "N/A") else ""
        waits = f"job {number} waits in the queue: {reason}{expected}" if state == "PENDING" else ""
        if waits and waits != self._wait_told:
            say(f"doctor: {waits}")
            self._wait_told = waits
        if not self.has_started and time.monotonic() - begin_s > wait_s:
            raise SlurmError(
                f"{waits or 'srun got no answer'}; after {wait_s:.0f} s that was enough, and the "
                "job is cancelled: wait"
                " longer with --timeout SECONDS, or ask for fewer nodes with --nodes"
            )

    def reasons(self) -> list[str]:
        """Return the errors of srun and slurmstepd, each once, and of a task the last line."""
        from_srun = [line for line in self.errors if _FROM_SRUN.match(line) and " error: " in line]
        others = [line for line in self.errors if not _FROM_SRUN.match(line)]
        told = from_srun + others[-1:]
        return list(dict.fromkeys(redact(_FROM_SRUN.sub("", line)) for line in told))


def _pump(stream: IO[str] | None, take: Callable[[str | None], None]) -> None:
    if stream is not None:
        with suppress(ValueError):  # the stream was closed
            for line in stream:
                take(line.rstrip("\n"))
    take(None)
