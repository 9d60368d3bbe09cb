"""What is measured of every step beside its loss: speed, the share of the GPU's peak, waits, memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pipeline_lib.base.events import EventLog
from pipeline_lib.base.stage import peak_rss_bytes
from pipeline_lib.config.schema import Train
from pipeline_lib.plan.flops import step_flops
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.gpus import peak_flops
from pipeline_lib.train.dist import World
from pipeline_lib.train.network import SentMeter
from pipeline_lib.train.nvml import GpuSampler, gpu_sampler
from pipeline_lib.train.prefetch import Prefetcher, Read
from pipeline_lib.train.profile import StepProfiler
from pipeline_lib.train.step import StepResult


@dataclass(frozen=True)
class Meter:
    """Turns the work of a step into its measures. Where there is no GPU, or an unknown one, there is no MFU."""

    world: World
    geometry: Geometry
    train: Train
    peak: float | None

    @staticmethod
    def of(world: World, geometry: Geometry, train: Train) -> "Meter":
        """The meter for the GPUs of this world, which are all like this rank's."""
        is_gpu = world.device.type == "cuda"
        name = torch.cuda.get_device_name(world.device) if is_gpu else ""
        return Meter(world, geometry, train, peak_flops(name, train.precision))

    def fields(self, result: StepResult, data_wait_s: float) -> dict[str, Any]:
        """Fields of the step's row. Rates are over the step and the wait for its data; saving is not in them.

        `mfu` counts attention causally, `mfu_full_attention` as if each token saw its whole document.
        """
        seconds = result.duration_s + data_wait_s
        row: dict[str, Any] = {
            "tokens_per_s": round(result.tokens / seconds, 1),
            "supervised_tokens_per_s": round(result.supervised_tokens / seconds, 1),
            "data_wait_s": round(data_wait_s, 6),
            **memory_fields(self.world),
        }
        if self.peak is not None:
            flops = step_flops(
                self.geometry, self.train, result.tokens, result.squared_lengths, result.supervised_tokens
            )
            possible = self.peak * self.world.size * seconds
            row["mfu"] = round(flops.causal / possible, 4)
            row["mfu_full_attention"] = round(flops.full_attention / possible, 4)
        return row


@dataclass(frozen=True)
class Instruments:
    """What a loop measures with. The GPU that is sampled is the first rank's, as it is the first rank that records."""

    prefetcher: Prefetcher
    profiler: StepProfiler
    meter: Meter
    gpu: GpuSampler
    sent: SentMeter

    def fields(self, result: StepResult, data_wait_s: float) -> dict[str, Any]:
        """All that is measured of a step, for its row."""
        return self.meter.fields(result, data_wait_s) | self.sent.take() | self.gpu.take() | self.profiler.take()


@contextmanager
def instruments(read: Read, last_step: int, meter: Meter, events: EventLog) -> Iterator[Instruments]:
    """Instruments for steps up to `last_step`, whose batches `read` gives; their threads end with the block."""
    world, every_steps = meter.world, meter.train.profile_every_steps
    sampled = world.device if world.is_first else None
    sent = SentMeter(has_others=world.is_first and world.size > world.local_size)
    with Prefetcher(read, last_step, world.device) as prefetcher, gpu_sampler(sampled) as gpu:
        yield Instruments(prefetcher, StepProfiler(world, every_steps, events), meter, gpu, sent)


def memory_fields(world: World) -> dict[str, int]:
    """`peak_memory_bytes`, the most this rank has held: on the GPU where it has one, else in the process.

    Of a GPU also what torch's allocator has reserved at most, and what is in use on the device now, by whomever: with
    the context of CUDA, the buffers of NCCL and what is cut up.
    """
    if world.device.type != "cuda":
        return {"peak_memory_bytes": peak_rss_bytes()}
    free, total = torch.cuda.mem_get_info(world.device)
    return {
        "peak_memory_bytes": torch.cuda.max_memory_allocated(world.device),
        "reserved_memory_bytes": torch.cuda.max_memory_reserved(world.device),
        "device_memory_bytes": total - free,
    }
