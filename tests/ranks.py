"""Runs a function in real processes of a gloo group: the harness of all multi-rank tests."""

import faulthandler
import multiprocessing
import os
import queue
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tests.processes import free_port

IMPORTS_S = 120.0  # at most, of ranks that begin anew while others do


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun would set for this rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def run_ranks(
    function: Callable[..., Any], world: int, *arguments: Any, timeout_s: float = 120.0
) -> dict[int, Any]:
    """Call `function(environ, *arguments)` in `world` processes; their results by rank.

    Raises AssertionError with the tracebacks of all ranks that failed, or that did not end in time.
    """
    done, failures = run_ranks_that_may_fail(function, world, *arguments, timeout_s=timeout_s)
    assert not failures, "\n".join(
        f"rank {rank}:\n{text}" for rank, text in sorted(failures.items())
    )
    return done


def run_ranks_that_may_fail(
    function: Callable[..., Any], world: int, *arguments: Any, timeout_s: float = 120.0
) -> tuple[dict[int, Any], dict[int, str]]:
    """As `run_ranks`: results by rank, and what became of ranks without; a rank may be killed."""
    # Ranks are forked from a server that has the slow imports behind it and has never started a
    # thread. Where there are GPUs they begin anew: what the server imports may look for these
    # (torchao does), and then no child may use them.
    has_gpus = torch.cuda.device_count() > 0
    context: Any = multiprocessing.get_context("spawn" if has_gpus else "forkserver")
    if not has_gpus:
        context.set_forkserver_preload(["tests.preloaded"])
    results: Any = context.Queue()
    port = free_port()
    processes = [
        context.Process(
            target=_run, args=(function, rank_environment(rank, world, port), results, arguments)
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    done: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline_s = time.monotonic() + timeout_s + has_gpus * IMPORTS_S
    try:
        while len(done) + len(failures) < world:
            ended = {
                rank: process.exitcode
                for rank, process in enumerate(processes)
                if process.exitcode is not None
            }
            try:
                rank, is_ok, value = results.get(timeout=0.5)
                (done if is_ok else failures)[rank] = value
            except queue.Empty:  # whoever had ended before this wait had nothing to say
                silent = {
                    rank: f"ended with code {code} and no answer" for rank, code in ended.items()
                }
                failures.update(
                    {rank: text for rank, text in silent.items() if rank not in done | failures}
                )
                if time.monotonic() > deadline_s:
                    missing = set(range(world)) - done.keys() - failures.keys()
                    failures.update(
                        {
                            rank: f"no answer within {timeout_s} s; {_stacks(processes[rank].pid)}"
                            for rank in missing
                        }
                    )
            if failures:
                deadline_s = min(deadline_s, time.monotonic() + 15.0)
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
    return done, failures


def _stack_file(pid: int | None) -> Path:
    return Path(tempfile.gettempdir()) / f"pipeline-rank-{pid}.stacks"


def _stacks(pid: int | None) -> str:
    """What all threads of a rank that hangs are at."""
    if pid is None or not _stack_file(pid).exists():
        return "it has not begun"
    os.kill(pid, signal.SIGUSR2)
    time.sleep(1)
    return f"it is at:\n{_stack_file(pid).read_text()}"


def _run(
    function: Callable[..., Any],
    environ: Mapping[str, str],
    results: Any,
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(environ)
    # torch was imported before the variable was set
    torch.set_num_threads(int(environ["OMP_NUM_THREADS"]))
    rank = int(environ["RANK"])
    stacks = _stack_file(os.getpid())
    faulthandler.register(signal.SIGUSR2, stacks.open("w"))
    try:
        results.put((rank, True, function(environ, *arguments)))
    except BaseException:  # noqa: BLE001 - every failure of a rank has to reach the test
        results.put((rank, False, traceback.format_exc()))
    stacks.unlink()
