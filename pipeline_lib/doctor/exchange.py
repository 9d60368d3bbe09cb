"""What one rank of a small process group measures: bandwidth of its collectives, and its GPU at work.

Bus bandwidth is the bytes that cross the slowest link a second: what a rank holds, divided by the time, times
2(n-1)/n for an all-reduce and (n-1)/n for an all-gather, as nccl-tests defines it (doc/PERFORMANCE.md there).
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipeline_lib.doctor.facts import Section, Unmeasured
from pipeline_lib.doctor.gpus import clocks

SIZES_BYTES = {"cuda": (1 << 20, 16 << 20, 256 << 20), "cpu": (64 << 10, 1 << 20, 16 << 20)}
PATIENCE_S = 0.4  # for each size of each collective
TIMEOUT_S = 15
WORK_SIZE = 8192


def torch_facts() -> Section:
    """What torch was built for, and the GPUs that it sees."""
    found: Section = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "none: a build for the CPU",
        "gpus": torch.cuda.device_count(),
        "cuda_works": torch.cuda.is_available(),
    }
    if torch.cuda.is_available():
        nccl: Any = torch.cuda.nccl
        found["nccl"] = ".".join(map(str, nccl.version()))
    return found


def exchange(environ: Mapping[str, str], device_kind: str) -> Section:
    """Join the group that `environ` describes; bytes a second by collective and size, and this rank's GPU at work."""
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if device_kind == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    found: Section = {}
    if world > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
        for size_bytes in SIZES_BYTES[device.type]:
            found[f"all_reduce.{size_bytes}"] = _all_reduce(size_bytes, world, device)
            found[f"all_gather.{size_bytes}"] = _all_gather(size_bytes, world, device)
        dist.destroy_process_group()
    if device.type == "cuda":
        found["gpu"] = _gpu_at_work(device)
    return found


def _all_reduce(size_bytes: int, world: int, device: torch.device) -> float:
    """Bus bandwidth of an all-reduce of `size_bytes` on each rank, in bytes a second."""
    values = torch.zeros(size_bytes // 4, device=device)
    return size_bytes / _duration_s(lambda: dist.all_reduce(values), device) * 2 * (world - 1) / world


def _all_gather(size_bytes: int, world: int, device: torch.device) -> float:
    """Bus bandwidth of an all-gather whose result is `size_bytes` on each rank, in bytes a second."""
    part = torch.zeros(size_bytes // 4 // world, device=device)
    parts = [torch.empty_like(part) for _ in range(world)]
    return size_bytes / _duration_s(lambda: dist.all_gather(parts, part), device) * (world - 1) / world


def _duration_s(collective: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, the mean of as many as fit into PATIENCE_S; all ranks make equally many."""
    collective()
    one_s = _timed(collective, 1, device)
    agreed = torch.tensor([one_s], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
    times = max(1, min(50, int(PATIENCE_S / max(agreed.item(), 1e-6))))
    return _timed(collective, times, device) / times


def _timed(collective: Callable[[], object], times: int, device: torch.device) -> float:
    _wait(device)
    start_s = time.perf_counter()
    for _ in range(times):
        collective()
    _wait(device)
    return time.perf_counter() - start_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _gpu_at_work(device: torch.device) -> Section:
    """The clock while it multiplies matrices in bf16, and how many operations a second that makes."""
    a = torch.randn(WORK_SIZE, WORK_SIZE, device=device, dtype=torch.bfloat16)
    b = torch.randn(WORK_SIZE, WORK_SIZE, device=device, dtype=torch.bfloat16)
    one_s = min(_timed(lambda: a @ b, 5, device) / 5 for _ in range(3))
    found: Section = {"bf16_flops": 2 * WORK_SIZE**3 / one_s}
    for _ in range(int(1.0 / one_s)):  # a second of work, which goes on while we look
        a @ b
    time.sleep(0.6)
    with suppress(Unmeasured):
        found |= clocks(str(torch.cuda.get_device_properties(device).uuid))
    _wait(device)
    return found
