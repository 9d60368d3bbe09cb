"""Starts ranks on this machine and reads what the first of them reports, line by line.

Without torchrun, whose agent takes seconds to start and ends ranks in its own way: what is measured
here is many short groups, of which one that fails must not take the others with it.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pipeline_lib.core.files import write_json
from pipeline_lib.launch.environment import LOOPBACK, PLACE_IN_WORLD, free_port

Row = dict[str, Any]
SHARED_LOG_LINES = 3
# NVLink multicast can put GPUs that others share out of service.
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
END_S = 20.0  # for ranks that have said all they have to say


class GroupFailed(Exception):
    """A rank ended with an error, or all were silent for too long."""


@dataclass(frozen=True)
class Group:
    """How to start ranks: a module of `benchmarks`, and the environment that differs by rank.

    Whole lines of JSON that begin with a name are its reports; the rest goes to a log in `folder`.
    """

    module: str
    ranks: int
    folder: Path
    is_gpu: bool
    silence_s: float
    shares_node: bool = True
    own: Callable[[int], Mapping[str, str]] = lambda _: {}

    def rows(self, arguments: Sequence[str], until_s: float) -> Generator[Row]:
        """The reports, as they come.

        Raises GroupFailed; at `until_s` of the monotonic clock the group is ended.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        port = str(free_port())
        found: queue.Queue[Row | None] = queue.Queue()
        log = self.folder / "ranks.log"
        with log.open("ab") as output:
            processes = [self._start(rank, port, arguments, output) for rank in range(self.ranks)]
            readers = [
                threading.Thread(target=_read, args=(process.stdout, log, found), daemon=True)
                for process in processes
            ]
            for reader in readers:
                reader.start()
            try:
                yield from self._follow(processes, found, log, until_s)
            finally:
                _end(processes)
                for reader in readers:
                    reader.join(timeout=5)

    def _start(
        self, rank: int, port: str, arguments: Sequence[str], errors: IO[bytes]
    ) -> "subprocess.Popen[bytes]":
        environment = {key: value for key, value in os.environ.items() if key not in PLACE_IN_WORLD}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.ranks)}
        environment |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
        environment["LOCAL_WORLD_SIZE"] = str(self.ranks if self.shares_node else 1)
        environment.setdefault("OMP_NUM_THREADS", "4" if self.is_gpu else "1")
        if self.is_gpu:  # as the training stage's launcher does
            environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        environment |= self.own(rank)
        command = [sys.executable, "-u", "-m", self.module, *arguments]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors)

    def _follow(
        self,
        processes: "Sequence[subprocess.Popen[bytes]]",
        found: "queue.Queue[Row | None]",
        log: Path,
        until_s: float,
    ) -> Iterator[Row]:
        heard_s, open_pipes = time.monotonic(), len(processes)
        while open_pipes:  # a rank that ends closes its own
            now_s = time.monotonic()
            if now_s > until_s:
                raise GroupFailed("cut off by the time limit")
            if now_s - heard_s > self.silence_s:
                raise GroupFailed(f"nothing heard for {self.silence_s:.0f} s; {_end_of(log)}")
            try:
                row = found.get(timeout=0.2)
            except queue.Empty:
                _refuse_failed(processes, log)
                continue
            heard_s = now_s
            if row is None:
                open_pipes -= 1
            else:
                yield row
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=END_S)
        _refuse_failed(processes, log)


def _refuse_failed(processes: "Sequence[subprocess.Popen[bytes]]", log: Path) -> None:
    for rank, process in enumerate(processes):
        if process.poll():
            raise GroupFailed(f"rank {rank} ended with {process.returncode}; {_end_of(log)}")


def _read(pipe: IO[bytes] | None, log: Path, found: "queue.Queue[Row | None]") -> None:
    """Sort a rank's lines into reports and others."""
    with log.open("ab") as output:
        for line in pipe or ():
            row = None
            if line.startswith(b'{"name"'):
                with suppress(ValueError):
                    row = json.loads(line)
            if row is None:
                output.write(line)
                output.flush()
            else:
                found.put(row)
    found.put(None)


def _end(processes: "Sequence[subprocess.Popen[bytes]]") -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()


def _end_of(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(line[:160] for line in lines[-SHARED_LOG_LINES:])


def measured(
    group: Group,
    cases: Sequence[Row],
    until_s: float,
    arguments: Sequence[str] = (),
    needed_s: float = 15.0,
) -> Iterator[Row]:
    """The reports on `cases`: a failed one has a `problem`, those without time have none.

    Torch's own strategies share a process group; DeepSpeed's engines keep memory, so each has one
    of its own.
    """
    waiting = list(cases)
    while waiting and time.monotonic() + needed_s < until_s:
        batch = waiting[: _shared(waiting)]
        path = group.folder / "cases.json"
        group.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, batch)
        ended: set[str] = set()
        limits = ["--limit-s", f"{until_s - time.monotonic():.0f}"]
        try:
            with closing(group.rows(["--cases", str(path), *limits, *arguments], until_s)) as rows:
                for row in rows:
                    if "problem" in row or row.get("ends_case", True):
                        ended.add(row["name"])
                    yield row
                    if "problem" in row:
                        break
        except GroupFailed as error:
            left = [case["name"] for case in batch if case["name"] not in ended]
            if left:
                ended.add(left[0])
                yield {"name": left[0], "problem": str(error)}
        if not ended:
            return
        waiting = [case for case in waiting if case["name"] not in ended]


def _shared(cases: Sequence[Row]) -> int:
    """How many of the first cases share a process group."""
    is_zero = [case["train"]["strategy"].startswith("zero") for case in cases]
    return 1 if is_zero[0] else ([*is_zero, True]).index(True)
