"""Runs a function in real processes that form a gloo group: the harness of every multi-rank test."""

import contextlib
import multiprocessing
import os
import queue
import random
import socket
import traceback
from collections.abc import Callable, Mapping
from typing import Any


def free_port() -> int:
    """A TCP port on loopback that nobody uses, below the range that the system gives to outgoing connections."""
    while True:
        port = random.randint(20_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


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


def run_ranks(function: Callable[..., Any], world: int, *arguments: Any, timeout_s: float = 120.0) -> dict[int, Any]:
    """Call `function(environ, *arguments)` in `world` processes; their results by rank.

    Raises AssertionError with the tracebacks of all ranks that failed, or that did not end in time.
    """
    # Ranks are forked from a server that has the slow imports behind it and has never started a thread.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pipeline_lib.train.rank"])
    results: Any = context.Queue()
    port = free_port()
    processes = [
        context.Process(target=_run, args=(function, rank_environment(rank, world, port), results, arguments))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    done: dict[int, Any] = {}
    failures: dict[int, str] = {}
    try:
        while len(done) + len(failures) < world and not (failures and not any(p.is_alive() for p in processes)):
            rank, is_ok, value = results.get(timeout=timeout_s)
            (done if is_ok else failures)[rank] = value
            if failures:
                timeout_s = min(timeout_s, 15.0)
    except queue.Empty:
        missing = set(range(world)) - done.keys() - failures.keys()
        failures.update({rank: f"no answer within {timeout_s} s" for rank in missing})
    finally:
        for process in processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
    assert not failures, "\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(failures.items()))
    return done


def _run(function: Callable[..., Any], environ: Mapping[str, str], results: Any, arguments: tuple[Any, ...]) -> None:
    os.environ.update(environ)
    rank = int(environ["RANK"])
    try:
        results.put((rank, True, function(environ, *arguments)))
    except BaseException:  # noqa: BLE001 - every failure of a rank has to reach the test
        results.put((rank, False, traceback.format_exc()))
