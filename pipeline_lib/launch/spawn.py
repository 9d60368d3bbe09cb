"""Starts one node's ranks as processes and waits for them; when one fails, they all end."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from pipeline_lib.launch.environment import rank_environments

MODULE = "pipeline_lib"
POLL_S = 0.1
END_S = 30.0  # for ranks that are asked to end since another has failed: they may be saving


@dataclass(frozen=True)
class Failed:
    """The rank of a node that failed first. Its exit code is negative if a signal killed it."""

    rank: int
    exit_code: int


def run_ranks(
    program: Sequence[str],
    environ: Mapping[str, str],
    ranks_per_node: int,
    nodes: int = 1,
    node: int = 0,
) -> Failed | None:
    """Run `python -m pipeline_lib PROGRAM` as the ranks of node `node`; return which failed first.

    Each rank has a session of its own, so that only their launcher tells them of signals from a
    terminal.
    """
    started: dict[int, subprocess.Popen[bytes]] = {}
    try:
        _start(
            started,
            program,
            rank_environments(environ, ranks_per_node, nodes, node),
            subprocess.DEVNULL,
        )
        return _wait(started)
    finally:
        _end(list(started.values()))


# Ranks take seconds to import torch. Meanwhile their launcher verifies what they will read, which
# may take as long. They open no file before it gives the word, a line of JSON on standard input. If
# that ends without one, what was to be read is not whole, or the launcher has ended.

HELD = "--held"
_RESUME_FROM = "resume_from"


class HeldRanks:
    """The ranks of a training on this machine, which wait for the word within the context.

    None outlives it.
    """

    def __init__(self, program: Sequence[str], environ: Mapping[str, str], ranks: int) -> None:
        """Prepare `ranks` processes of `python -m pipeline_lib PROGRAM`."""
        self._program, self._environments = [*program, HELD], rank_environments(environ, ranks)
        self._started: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "HeldRanks":
        try:
            _start(self._started, self._program, self._environments, subprocess.PIPE)
        except OSError:
            _end(list(self._started.values()))
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """End the ranks that still run."""
        for process in self._started.values():
            if process.stdin is not None:
                with suppress(BrokenPipeError):
                    process.stdin.close()
        _end(list(self._started.values()))

    def release(self, resume_from: Path | None) -> Failed | None:
        """Let the ranks train from the verified checkpoint `resume_from`; return which failed."""
        word = (
            json.dumps({_RESUME_FROM: str(resume_from.absolute()) if resume_from else None}) + "\n"
        )
        for process in self._started.values():
            if process.stdin is not None:
                with suppress(BrokenPipeError):  # it has ended, which is told by its exit code
                    process.stdin.write(word.encode())
                    process.stdin.close()
        return _wait(self._started)


def checkpoint_in(word: str) -> Path | None:
    """Return the checkpoint that a rank continues from, by its launcher's `word`, or None."""
    resume_from = json.loads(word)[_RESUME_FROM]
    return Path(resume_from) if resume_from else None


def _start(
    started: dict[int, "subprocess.Popen[bytes]"],
    program: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    stdin: int,
) -> None:
    """Add a process for each of `environments` to `started`, by its rank."""
    command = [sys.executable, "-m", MODULE, *program]
    for environment in environments:
        started[int(environment["RANK"])] = subprocess.Popen(
            command, env=dict(environment), stdin=stdin, start_new_session=True
        )


def _wait(started: Mapping[int, "subprocess.Popen[bytes]"]) -> Failed | None:
    """Wait until a rank fails or all have ended."""
    running = dict(started)
    while running:
        time.sleep(POLL_S)
        for rank, process in list(running.items()):
            exit_code = process.poll()
            if exit_code is None:
                continue
            if exit_code != 0:
                return Failed(rank, exit_code)
            del running[rank]
    return None


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Ask the processes to end that still run, and kill those that do not."""
    for process in processes:
        process.terminate()  # does nothing to one that has ended
    deadline_s = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
