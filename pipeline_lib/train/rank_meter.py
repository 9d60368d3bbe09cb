"""What all ranks use of their GPUs and memory.

The readings travel with the counts of a step, an exchange between hosts that takes place anyway.
"""

from collections.abc import Sequence
from typing import Any

import torch

from pipeline_lib.core.rank_use import EVERY_STEPS, PEAK_MEMORY, UTILIZATION
from pipeline_lib.core.stage import peak_rss_bytes
from pipeline_lib.train.dist import World
from pipeline_lib.train.gpu_sampler import Sample

_NOT_KNOWN = -1.0


class RankMeter:
    """This rank's readings for all ranks' rows, due every EVERY_STEPS steps and at `last_step`."""

    def __init__(self, world: World, last_step: int) -> None:
        """Begin with no samples."""
        self._world, self._last_step = world, last_step
        self._utilizations: list[float] = []

    def add(self, sample: Sample) -> None:
        """Add the GPU's sample of a step; it may be empty."""
        if "gpu_utilization" in sample:
            self._utilizations.append(sample["gpu_utilization"])

    def take(self, step: int) -> list[float]:
        """Return the mean utilization since the last readings and the peak bytes, if due."""
        if step % EVERY_STEPS and step != self._last_step:
            return []
        taken = self._utilizations
        self._utilizations = []
        utilization = round(sum(taken) / len(taken), 3) if taken else _NOT_KNOWN
        return [utilization, float(memory_fields(self._world)["peak_memory_bytes"])]


def rank_fields(readings: Sequence[float]) -> dict[str, Any]:
    """Return a row's fields by rank, from what `take` returned on each; nothing from nothing.

    Without the utilization of every rank there is none.
    """
    utilizations = list(readings[::2])
    memories = [int(value) for value in readings[1::2]]
    if not memories:
        return {}
    known = {} if _NOT_KNOWN in utilizations else {UTILIZATION: utilizations}
    return {**known, PEAK_MEMORY: memories}


def memory_fields(world: World) -> dict[str, int]:
    """Return `peak_memory_bytes`, this rank's peak: of the GPU, or of the process without one.

    For a GPU also the peak that torch's allocator reserved, and the memory in use on the device now
    by all processes, which includes the CUDA context, NCCL's buffers and fragmentation.
    """
    if world.device.type != "cuda":
        return {"peak_memory_bytes": peak_rss_bytes()}
    free, total = torch.cuda.mem_get_info(world.device)
    return {
        "peak_memory_bytes": torch.cuda.max_memory_allocated(world.device),
        "reserved_memory_bytes": torch.cuda.max_memory_reserved(world.device),
        "device_memory_bytes": total - free,
    }
