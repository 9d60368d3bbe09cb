"""A rank's work in a calibration: rates with the other ranks, then parts of the model alone."""

import tempfile
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline_lib.calibrate.fits import rate_of
from pipeline_lib.calibrate.links import group_of_node, link_rates
from pipeline_lib.calibrate.parts import measure_parts, most_tokens
from pipeline_lib.calibrate.rates import (
    attention_flop_s,
    copy_bytes_s,
    host_bytes_s,
    matmul_flop_s,
    memory_bytes_s,
)
from pipeline_lib.calibrate.task import Task
from pipeline_lib.train.dist import LET_GO_S, World, process_group

GROUP_TIMEOUT_S = 60
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
RATE_TOKENS = 8192  # rows of the measured matmuls; more do not make them faster


def measure_rank(task: Task, environ: MutableMapping[str, str]) -> dict[str, Any]:
    """Measure as the rank that `environ` names.

    Returns the measured content of cluster.json, and under `left_out` the reasons for what is
    missing. Raises TrainingError, or Interrupted if another rank is lost.
    """
    world = World.from_env(environ, task.device)
    with process_group(world, GROUP_TIMEOUT_S):
        of_node = group_of_node(world)
        rates = link_rates(world, of_node)
        rates["host_bytes_s"] = host_bytes_s(world, of_node)
        tokens = min(RATE_TOKENS, most_tokens(task.geometry, world.device.type == "cuda"))
        rates["matmul_flop_s"] = matmul_flop_s(task, tokens, world.device)
        rates["attention_flop_s"] = attention_flop_s(task, tokens, world.device)
        rates["memory_bytes_s"] = memory_bytes_s(world.device)
        if world.device.type == "cuda":
            rates["copy_bytes_s"] = copy_bytes_s(world.device)
        dist.barrier()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    environ.update(_ALONE)  # DeepSpeed compares these variables with the process group
    with _alone(world) as alone, tempfile.TemporaryDirectory(prefix="calibrate-") as folder:
        found = measure_parts(task, alone, Path(folder))
    if found.launch_s is not None:
        rates["launch_s"] = [found.launch_s]
    return {
        **_describe(world),
        "rates": {name: rate_of(values) for name, values in rates.items()},
        "parts": [asdict(part) for part in found.parts],
        "left_out": found.left_out,
    }


@contextmanager
def _alone(world: World) -> Iterator[World]:
    backend = "cpu:gloo,cuda:nccl" if world.device.type == "cuda" else "gloo"
    store: Any = getattr(dist, "HashStore")()  # noqa: B009 - torch's stubs do not export it
    dist.init_process_group(
        backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=GROUP_TIMEOUT_S)
    )
    yield World(0, world.local_rank, 1, world.device, world.local_size)
    time.sleep(LET_GO_S)
    dist.destroy_process_group()


def _describe(world: World) -> dict[str, Any]:
    found: dict[str, Any] = {
        "ranks": world.size,
        "nodes": world.size // world.local_size,
        "torch": torch.__version__,
    }
    if world.device.type == "cpu":
        ranks = world.local_size
        threads = torch.get_num_threads()
        host = f"{ranks} CPU rank{'s' * (ranks != 1)} of {threads} thread{'s' * (threads != 1)}"
        found |= {"gpu": None, "gpu_memory_bytes": None}
    else:
        properties = torch.cuda.get_device_properties(world.device)
        host = f"{world.local_size} x {properties.name}"
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory}
    return found | {"host": host if found["nodes"] == 1 else f"{found['nodes']} nodes of {host}"}
