"""Many commands on GPUs of a machine lent for minutes: `python -m benchmarks.lease LIST --out DIR`.

A line of LIST is `NAME GPUS SECONDS COMMAND`; DIR is written {out}. Each command starts when as
many GPUs are free as it asks for, the lines above first, and has these alone; what takes longer
than its SECONDS is killed with all that it started, and nothing starts that would be cut short by
the limit. DIR/all.tar.gz holds all logs and results so far.
"""

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pipeline_lib.core.files import write_text

TAIL_LINES = 30
LEAST_S = 20.0  # less is not enough to start a command


@dataclass(frozen=True)
class Job:
    """A line of a list."""

    name: str
    gpus: int
    limit_s: float
    command: str


@dataclass(frozen=True)
class Running:
    """A job that was started, in a session of its own."""

    job: Job
    gpus: tuple[int, ...]
    process: "subprocess.Popen[bytes]"
    begun_s: float
    until_s: float

    def end_if_late(self, now_s: float) -> None:
        """Kill it with all that it started, if its time is over."""
        if now_s > self.until_s:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def read_jobs(text: str) -> list[Job]:
    """The jobs of a list. Raises ValueError for a line that is none, with its number."""
    jobs = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        try:
            name, gpus, limit_s, command = line.split(maxsplit=3)
            jobs.append(Job(name, int(gpus), float(limit_s), command))
        except ValueError as error:
            raise ValueError(
                f"line {number}: expected NAME GPUS SECONDS COMMAND, found {line!r}"
            ) from error
    return jobs


def run(jobs: Sequence[Job], gpus: int, out: Path, until_s: float) -> dict[str, int]:
    """The exit codes of jobs started before `until_s` of the monotonic clock; a killed has -9."""
    out.mkdir(parents=True, exist_ok=True)
    waiting = [job for job in jobs if job.gpus <= gpus]
    free, running, codes = set(range(gpus)), list[Running](), dict[str, int]()
    while waiting or running:
        now_s = time.monotonic()
        waiting = [job for job in waiting if now_s + min(LEAST_S, job.limit_s) < until_s]
        if waiting and waiting[0].gpus <= len(free):
            running.append(_start(waiting.pop(0), sorted(free), out, now_s, until_s))
            free -= set(running[-1].gpus)
            continue
        for each in running:
            each.end_if_late(now_s)
        for each in [each for each in running if each.process.poll() is not None]:
            running.remove(each)
            free |= set(each.gpus)
            codes[each.job.name] = each.process.returncode
            _tell(each, out, now_s)
        time.sleep(0.1)
    return codes


def _start(job: Job, free: Sequence[int], out: Path, now_s: float, until_s: float) -> Running:
    gpus = tuple(free[: job.gpus])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
    with (out / f"{job.name}.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", job.command.replace("{out}", str(out))],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    print(f"{job.name}: started on {gpus}", flush=True)
    return Running(job, gpus, process, now_s, min(until_s, now_s + job.limit_s))


def _tell(ended: Running, out: Path, now_s: float) -> None:
    """Print the end of its log, and pack all that there is: the machine may go at any moment."""
    log = (out / f"{ended.job.name}.log").read_text(errors="replace").splitlines()
    code = ended.process.returncode
    print(
        f"=== {ended.job.name}: {code} after {now_s - ended.begun_s:.0f} s",
        *log[-TAIL_LINES:],
        sep="\n",
        flush=True,
    )
    packed = out / "all.tar.gz"
    with tarfile.open(out / ".packing", "w:gz") as archive:
        for path in sorted(out.iterdir()):
            if path.name not in (packed.name, ".packing"):
                archive.add(path, path.name)
    (out / ".packing").replace(packed)


def main() -> None:
    """Run the list that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lease", description=__doc__)
    parser.add_argument("list", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=570.0, help="of all together")
    parser.add_argument(
        "--gpus", type=int, default=torch.cuda.device_count(), help="all that there are, by default"
    )
    given = parser.parse_args()
    try:
        jobs = read_jobs(given.list.read_text())
    except (OSError, ValueError) as error:
        parser.error(str(error))
    codes = run(jobs, given.gpus, given.out, time.monotonic() + given.limit_s)
    told = [f"{job.name} {codes.get(job.name, 'was not started')}" for job in jobs]
    write_text(given.out / "codes.txt", "\n".join(told) + "\n")
    print(*told, sep="\n")
    sys.exit(any(codes.get(job.name) != 0 for job in jobs))


if __name__ == "__main__":
    main()
