"""Measurements of each step beside its loss: throughput, MFU, waits, GPU, network, memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from pipeline_lib.arch.geometry import Geometry, step_flops
from pipeline_lib.config.train import Train
from pipeline_lib.core.events import EventLog
from pipeline_lib.model.prefetch import Prefetcher, Read
from pipeline_lib.plan.gpus import peak_flops
from pipeline_lib.train.dist import World
from pipeline_lib.train.gpu_activity import StepProfiler
from pipeline_lib.train.gpu_sampler import GpuSampler, gpu_sampler
from pipeline_lib.train.rank_meter import RankMeter, memory_fields, rank_fields
from pipeline_lib.train.sent_bytes import SentMeter
from pipeline_lib.train.step import StepResult


@dataclass(frozen=True)
class Meter:
    """A converter of a step's work to its measurements.

    Without a GPU of known peak there is no MFU.
    """

    world: World
    geometry: Geometry
    train: Train
    peak: float | None

    @staticmethod
    def of(world: World, geometry: Geometry, train: Train) -> "Meter":
        """Return the meter for the GPUs of `world`, which are all like this rank's."""
        is_gpu = world.device.type == "cuda"
        name = torch.cuda.get_device_name(world.device) if is_gpu else ""
        return Meter(world, geometry, train, peak_flops(name, train.precision))

    def fields(self, result: StepResult, data_wait_s: float) -> dict[str, Any]:
        """Return fields of the step's row.

        Rates include the wait for the step's data, but not saving. `mfu` counts attention causally,
        `mfu_full_attention` as if each token saw its whole document.
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
                self.geometry,
                self.train,
                result.tokens,
                result.squared_lengths,
                result.supervised_tokens,
            )
            possible = self.peak * self.world.size * seconds
            row["mfu"] = round(flops.causal / possible, 4)
            row["mfu_full_attention"] = round(flops.full_attention / possible, 4)
        return row


@dataclass(frozen=True)
class Instruments:
    """The instruments of a loop. Each rank samples its own GPU; only the first rank records."""

    prefetcher: Prefetcher
    profiler: StepProfiler
    meter: Meter
    gpu: GpuSampler
    ranks: RankMeter
    sent: SentMeter

    def fields(self, result: StepResult, data_wait_s: float) -> dict[str, Any]:
        """Return all measurements of a step, for its row."""
        sample = self.gpu.take()
        self.ranks.add(sample)
        of_this_rank = (
            self.meter.fields(result, data_wait_s)
            | self.sent.take()
            | sample
            | self.profiler.take()
        )
        return of_this_rank | rank_fields(result.readings)


@contextmanager
def instruments(
    read: Read, last_step: int, meter: Meter, events: EventLog
) -> Iterator[Instruments]:
    """Provide instruments for steps up to `last_step`, with batches from `read`.

    Their threads end with the block.
    """
    world = meter.world
    every_steps = meter.train.profile_every_steps
    sent = SentMeter(has_others=world.is_first and world.size > world.local_size)
    ranks = RankMeter(world, last_step)
    with Prefetcher(read, last_step, world.device) as prefetcher, gpu_sampler(world.device) as gpu:
        yield Instruments(
            prefetcher, StepProfiler(world, every_steps, events), meter, gpu, ranks, sent
        )
