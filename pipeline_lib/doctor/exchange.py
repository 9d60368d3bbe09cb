"""What one rank of a small process group measures: bandwidth of its collectives, and its GPU at work.

Bus bandwidth is the bytes that cross the slowest link a second: what a rank holds, divided by the time, times
2(n-1)/n for an all-reduce and (n-1)/n for an all-gather, as nccl-tests defines it (doc/PERFORMANCE.md there).
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipeline_lib.doctor.facts import Section, Unmeasured
from pipeline_lib.doctor.gpus import clocks
from pipeline_lib.train.gpu import why_no_kernels

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
        if reason := why_no_kernels():
            found["no_kernels"] = reason
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
        for one in collectives(device):
            found[f"{one.kind}.{one.size_bytes}"] = one.bus_bytes / one.seconds
        dist.destroy_process_group()
    if device.type == "cuda":
        found["gpu"] = gpu_at_work(device)
    return found


@dataclass(frozen=True)
class Collective:
    """Seconds of one `all_reduce` or `all_gather` over `ranks` ranks, each of which holds `size_bytes` at the end."""

    kind: str
    size_bytes: int
    ranks: int
    seconds: float

    @property
    def rounds(self) -> int:
        """How often the data go around: an all-reduce is a reduce-scatter and an all-gather."""
        return 2 if self.kind == "all_reduce" else 1

    @property
    def bus_bytes(self) -> float:
        """Bytes that cross the slowest link."""
        return self.size_bytes * self.rounds * (self.ranks - 1) / self.ranks


def collectives(
    device: torch.device, group: dist.ProcessGroup | None = None, patience_s: float = PATIENCE_S
) -> list[Collective]:
    """Both collectives at every size over `group`, whose ranks call this together; up to `patience_s` for each."""
    ranks, found = dist.get_world_size(group), []
    for size_bytes in SIZES_BYTES[device.type]:
        values = torch.zeros(size_bytes // 4, device=device)
        part = torch.zeros(size_bytes // 4 // ranks, device=device)
        parts = [torch.empty_like(part) for _ in range(ranks)]
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": partial(dist.all_reduce, values, group=group),
            "all_gather": partial(dist.all_gather, parts, part, group=group),
        }
        for kind, call in calls.items():
            found.append(Collective(kind, size_bytes, ranks, duration_s(call, device, group, patience_s)))
    return found


def duration_s(
    collective: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None, patience_s: float
) -> float:
    """Seconds of one call, the mean of as many as fit into `patience_s`; all ranks make equally many."""
    collective()
    one_s = timed(collective, 1, device)
    agreed = torch.tensor([one_s], device=device)
    dist.all_reduce(agreed, op=dist.ReduceOp.MAX, group=group)
    times = max(1, min(50, int(patience_s / max(agreed.item(), 1e-6))))
    return timed(collective, times, device) / times


def timed(work: Callable[[], object], times: int, device: torch.device) -> float:
    """Seconds of `times` calls of `work`, all that they give `device` to do included."""
    _wait(device)
    start_s = time.perf_counter()
    for _ in range(times):
        work()
    _wait(device)
    return time.perf_counter() - start_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def gpu_at_work(device: torch.device) -> Section:
    """The clock while it multiplies matrices in bf16, and how many operations a second that makes."""
    a = torch.randn(WORK_SIZE, WORK_SIZE, device=device, dtype=torch.bfloat16)
    b = torch.randn(WORK_SIZE, WORK_SIZE, device=device, dtype=torch.bfloat16)
    one_s = min(timed(lambda: a @ b, 5, device) / 5 for _ in range(3))
    found: Section = {"bf16_flops": 2 * WORK_SIZE**3 / one_s}
    for _ in range(int(1.0 / one_s)):  # a second of work, which goes on while we look
        a @ b
    time.sleep(0.6)
    with suppress(Unmeasured):
        found |= clocks(str(torch.cuda.get_device_properties(device).uuid))
    _wait(device)
    return found
