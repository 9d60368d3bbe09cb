"""Starts the ranks of one node as processes and waits for them; the ranks of a failed one's node end with it."""

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
    program: Sequence[str], environ: Mapping[str, str], ranks_per_node: int, nodes: int = 1, node: int = 0
) -> Failed | None:
    """Run `python -m pipeline_lib PROGRAM` as the ranks of node number `node`; return which failed first, if any did.

    Each rank has a session of its own, so that only their launcher tells them of signals from a terminal.
    """
    command = [sys.executable, "-m", MODULE, *program]
    started: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for environment in rank_environments(environ, ranks_per_node, nodes, node):
            started[int(environment["RANK"])] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        return _wait(started)
    finally:
        _end(list(started.values()))


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
