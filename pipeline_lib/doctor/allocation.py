"""Starts a command on nodes of the cluster by srun, and hands on what it prints; the job never outlives the block."""

import queue
import re
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO

from pipeline_lib.base.redact import redact
from pipeline_lib.slurm.job import SlurmError

POLL_S = 2.0
CALL_S = 20.0
END_S = 15.0
KEPT_LINES = 200
# Left over from a job around us, they would make srun a step of it; what a user sets for srun's sake stays.
_OF_A_JOB = re.compile(r"(SLURM|SRUN|SBATCH)_")
_FROM_SRUN = re.compile(r"^(srun|slurmstepd): (error: )?")


def outside_of_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the traces of the SLURM job that this process may be in."""
    if "SLURM_JOB_ID" not in environ:
        return dict(environ)
    return {key: value for key, value in environ.items() if key == "SLURM_CONF" or not _OF_A_JOB.match(key)}


class Allocation:
    """A job of srun's, from the queue to its end. Used in a `with` block, which cancels what is left of it."""

    def __init__(self, options: list[str], command: list[str], environ: Mapping[str, str], cwd: Path) -> None:
        """Submit `command` with srun's `options`."""
        self.name = f"doctor-{uuid.uuid4().hex[:12]}"
        self.errors: list[str] = []
        self.has_started = False
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._shown = ""
        self._asked_s = 0.0
        self._process = subprocess.Popen(
            ["srun", f"--job-name={self.name}", *options, *command],
            env=dict(environ),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for us: srun would ask for a second one
            text=True,
            errors="replace",
        )
        streams = ((self._process.stdout, self._lines.put), (self._process.stderr, self._keep))
        self._pumps = [threading.Thread(target=_pump, args=pair, daemon=True) for pair in streams]
        for pump in self._pumps:
            pump.start()

    def __enter__(self) -> "Allocation":
        """Itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel the job if it still waits or runs, and wait for srun and its last words."""
        if self._process.poll() is None:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(["scancel", f"--name={self.name}"], capture_output=True, timeout=CALL_S)
        if not self._ends_within(END_S):
            self._process.kill()
            self._process.wait()
        for pump in self._pumps:
            pump.join(END_S)

    def lines(self, wait_s: float, run_s: float, say: Callable[[str], None]) -> Iterator[str]:
        """What the tasks print, until they end, or for `run_s`. Raises SlurmError if none begins within `wait_s`."""
        begin_s, started_s = time.monotonic(), None
        while started_s is None or time.monotonic() - started_s < run_s:
            with suppress(queue.Empty):
                line = self._lines.get(timeout=0.2)
                if line is None:
                    self._ends_within(END_S)  # how the tasks ended srun says last, and not of a job that is cancelled
                    return
                started_s, self.has_started = started_s or time.monotonic(), True
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

    def _keep(self, line: str | None) -> None:
        if line is not None and line.strip():
            self.errors = [*self.errors, line.strip()][-KEPT_LINES:]

    def _watch(self, begin_s: float, wait_s: float, say: Callable[[str], None]) -> None:
        """Say when the place in the queue has changed, and give up after `wait_s`."""
        if time.monotonic() - self._asked_s < POLL_S:
            return
        self._asked_s = time.monotonic()
        number, state, reason, start = self._queued()
        self.has_started = state in ("RUNNING", "COMPLETING")
        expected = f", expected to start at {start}" if start not in ("", "N/A") else ""
        shown = f"job {number} waits in the queue: {reason}{expected}" if state == "PENDING" else ""
        if shown and shown != self._shown:
            say(f"doctor: {shown}")
            self._shown = shown
        if not self.has_started and time.monotonic() - begin_s > wait_s:
            raise SlurmError(
                f"{shown or 'srun got no answer'}; after {wait_s:.0f} s that was enough, and the job is cancelled: wait"
                " longer with --timeout SECONDS, or ask for fewer nodes with --nodes"
            )

    def _queued(self) -> tuple[str, str, str, str]:
        """Number, state, reason and expected start, as squeue tells them; empty where it tells nothing."""
        command = ["squeue", "--noheader", f"--name={self.name}", "--format=%i|%T|%r|%S"]
        with suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=CALL_S)
            fields = done.stdout.strip().split("|", 3)
            if done.returncode == 0 and len(fields) == 4:
                return fields[0], fields[1], fields[2], fields[3]
        return "", "", "", ""

    def reasons(self) -> list[str]:
        """What srun and the nodes' daemons complained of, each once; and the last word of a task."""
        said = [line for line in self.errors if _FROM_SRUN.match(line) and " error: " in line]
        others = [line for line in self.errors if not _FROM_SRUN.match(line)]
        return list(dict.fromkeys(redact(_FROM_SRUN.sub("", line)) for line in (*said, *others[-1:])))


def _pump(stream: IO[str] | None, take: Callable[[str | None], None]) -> None:
    if stream is not None:
        with suppress(ValueError):  # closed meanwhile
            for line in stream:
                take(line.rstrip("\n"))
    take(None)


@contextmanager
def token_in(share: Path) -> Iterator[str]:
    """A file in the folder `share` that holds its own name, for others to find; it and its answers are removed."""
    token = f".doctor-{uuid.uuid4().hex}"
    (share / token).write_text(token)
    try:
        yield token
    finally:
        for path in share.glob(f"{token}*"):
            path.unlink(missing_ok=True)
