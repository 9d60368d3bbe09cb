"""Measurements of every step beside its loss: throughput, MFU, waits, the GPU's state, network, memory."""

import importlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline_lib.arch.geometry import Geometry, step_flops
from pipeline_lib.config.train import Train
from pipeline_lib.core.events import EventLog, EventName
from pipeline_lib.core.rank_use import EVERY_STEPS, PEAK_MEMORY, UTILIZATION
from pipeline_lib.core.stage import peak_rss_bytes
from pipeline_lib.model.batch import Prefetcher, Read
from pipeline_lib.plan.machine import peak_flops
from pipeline_lib.train.dist import World
from pipeline_lib.train.step import StepResult

# The time of a GPU by activity, from the intervals of its kernels: computing, exchanging, copying, idle.

Interval = tuple[float, float]


@dataclass(frozen=True)
class Shares:
    """Seconds of a span by activity; the first four add up to it. Each moment counts for the first that went on in it.

    `exposed_communication_s` and `exposed_copy_s` are the parts without concurrent computation;
    `hidden_communication_s` is the rest of the communication, which took place within `compute_s`. `context_s` is the
    communication of ranks that share a block, exposed or not.
    """

    compute_s: float
    exposed_communication_s: float
    exposed_copy_s: float
    idle_s: float
    hidden_communication_s: float
    context_s: float


def kind_of(kernel: str) -> str:
    """Return `communication`, `copy` or `compute`: what the kernel or memory operation of that name does."""
    lowered = kernel.lower()
    if "nccl" in lowered:
        return "communication"
    return "copy" if lowered.startswith(("memcpy", "memset")) else "compute"


def is_of_context(kernel: str) -> bool:
    """Return whether the kernel exchanges between ranks that share a block: NCCL's all-to-all sends and receives."""
    return "sendrecv" in kernel.lower()


def shares_of(kernels: Iterable[tuple[str, Interval]], span: Interval) -> Shares:
    """Return how `span` was used by the named intervals, all in seconds; what lies outside of it does not count."""
    by_kind: dict[str, list[Interval]] = {"compute": [], "communication": [], "copy": []}
    of_context: list[Interval] = []
    for name, (begin, end) in kernels:
        clipped = max(begin, span[0]), min(end, span[1])
        if clipped[0] < clipped[1]:
            by_kind[kind_of(name)].append(clipped)
            if is_of_context(name):
                of_context.append(clipped)
    compute, communication = length(by_kind["compute"]), length(by_kind["communication"])
    used = length(by_kind["compute"] + by_kind["communication"])
    busy = length(chain.from_iterable(by_kind.values()))
    return Shares(
        compute_s=compute,
        exposed_communication_s=used - compute,
        exposed_copy_s=busy - used,
        idle_s=span[1] - span[0] - busy,
        hidden_communication_s=communication - (used - compute),
        context_s=length(of_context),
    )


def length(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of `intervals`."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


# Profiles of single steps with torch's profiler, which break down the GPU's time. No trace is written.

ROW_FIELDS = ("compute_s", "exposed_communication_s", "exposed_copy_s", "idle_s")


class StepProfiler:
    """A profiler of every `every_steps`-th step on the first rank's GPU; other ranks and CPUs are not profiled.

    The event `step.profiled` holds seconds and fractions of the step by the fields of `Shares`; the step's row has the
    seconds (`take`).
    """

    def __init__(self, world: World, every_steps: int | None, events: EventLog) -> None:
        """Profile nothing if `every_steps` is None."""
        self._last: dict[str, float] = {}
        self._device, self._events = world.device, events
        self._every_steps = every_steps if world.is_first and world.device.type == "cuda" else None
        if every_steps is not None and world.is_first and world.device.type != "cuda":
            events.emit(EventName.PROFILE_LEFT_OUT, reason="steps are profiled on GPUs only")

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Profile the enclosed step number `step`, from 1, if it is due; what it computes is not changed."""
        if self._every_steps is None or step % self._every_steps:
            yield
            return
        torch.cuda.synchronize(self._device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            start_s = time.perf_counter()
            yield
            torch.cuda.synchronize(self._device)
            duration_s = time.perf_counter() - start_s
        kernels = [
            (event.name, (event.time_range.start / 1e6, event.time_range.end / 1e6))
            for event in profiler.events() or []
            if event.device_type.name == "CUDA" and not event.is_user_annotation
        ]
        description = describe(kernels, duration_s)
        self._last = row_fields(description)
        self._events.emit(EventName.STEP_PROFILED, step=step, **description)

    def take(self) -> dict[str, float]:
        """Return the profile's fields for the row of the last step, once; nothing if that was not profiled."""
        last, self._last = self._last, {}
        return last


def describe(kernels: list[tuple[str, Interval]], duration_s: float) -> dict[str, Any]:
    """Return the fields of the event for a step of `duration_s` seconds. `kernels`, in seconds, lie within it.

    Host and GPU have different clocks, so the span is placed to end with the last kernel: the host waited for it.
    """
    if not kernels:
        return {"step_s": round(duration_s, 6), "problem": "the profiler saw no kernels; may this user profile GPUs?"}
    end = max(interval[1] for _, interval in kernels)
    shares = asdict(shares_of(kernels, (end - duration_s, end)))
    fractions = {f"{name.removesuffix('_s')}_fraction": round(value / duration_s, 4) for name, value in shares.items()}
    return {"step_s": round(duration_s, 6), **{name: round(value, 6) for name, value in shares.items()}, **fractions}


def row_fields(described: dict[str, Any]) -> dict[str, float]:
    """Return the row's fields from those of `describe`: seconds that add up to the step; nothing if it failed."""
    return {f"profile_{name}": described[name] for name in ROW_FIELDS if name in described}


# Utilization, memory, power and temperature of a GPU during training, from the driver (NVML).

EVERY_S = 1.0
Sample = dict[str, float]


class GpuSampler:
    """A thread that samples about once a second; `take` returns the means since its last call.

    If no sample can be taken, `take` returns nothing.
    """

    def __init__(self, sample: Callable[[], Sample] | None, every_s: float = EVERY_S) -> None:
        """Take samples with `sample`, which raises OSError when no more can be taken; None takes none."""
        self._sample, self._every_s = sample, every_s
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._taken: list[Sample] = []
        self._latest: Sample = {}
        self._thread = threading.Thread(target=self._run, name="nvml", daemon=True)

    def __enter__(self) -> "GpuSampler":
        """Start sampling."""
        if self._sample is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop sampling."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(self._every_s + 1.0)

    def take(self) -> Sample:
        """Return the mean of each value since the last call, or the last means if there were no samples in between."""
        with self._lock:
            taken, self._taken = self._taken, []
        if taken:
            self._latest = {key: round(sum(sample[key] for sample in taken) / len(taken), 3) for key in taken[0]}
        return dict(self._latest)

    def _run(self) -> None:
        while self._sample is not None and not self._stopped.is_set():
            try:
                sample = self._sample()
            except OSError:
                self._sample = None
                return
            with self._lock:
                self._taken.append(sample)
            self._stopped.wait(self._every_s)


def gpu_sampler(device: torch.device | None) -> GpuSampler:
    """Return a sampler of `device`; it samples nothing if that is None or a CPU, or without NVML.

    A sample has the utilization as a fraction of time, memory in bytes, watts and degrees Celsius.
    """
    if device is None or device.type != "cuda":
        return GpuSampler(None)
    try:
        nvml: Any = importlib.import_module("pynvml")
    except ImportError:  # an installation from before it was required
        return GpuSampler(None)

    def sample() -> Sample:
        try:
            return {
                "gpu_utilization": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
                "gpu_memory_used_bytes": float(nvml.nvmlDeviceGetMemoryInfo(handle).used),
                "gpu_power_w": nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
                "gpu_temperature_c": float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            }
        except nvml.NVMLError as error:
            raise OSError(str(error)) from error

    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        sample()
    except (nvml.NVMLError, OSError, AttributeError):  # no driver, or a MIG slice of a GPU, which has no such values
        return GpuSampler(None)
    return GpuSampler(sample)


# Bytes that this machine sends to others, as the kernel counts them: a check of the plan's network traffic.
#
# All traffic that leaves the machine is counted, whoever sends it; local traffic (loopback, NVLink, bridges) is not.
# Non-goal: networks for which Linux keeps no such counters.

SYS = Path("/sys/class")
# Interface types (linux/if_arp.h): loopback, and IP over InfiniBand, whose bytes their port counts too.
_NOT_COUNTED = (772, 32)


def sent_bytes(sys: Path = SYS) -> int | None:
    """Return the bytes that this machine has sent since boot; None if nothing counts them."""
    folders = [path for path in sys.glob("net/*") if path.is_dir() and _number(path / "type") not in _NOT_COUNTED]
    # Where there are hardware interfaces, the others (bonds, bridges, containers) only pass traffic on to them.
    real = [folder for folder in folders if (folder / "device").exists()] or folders
    counts = [_number(folder / "statistics" / "tx_bytes") for folder in real]
    for port in sys.glob("infiniband/*/ports/*"):
        words = _number(port / "counters" / "port_xmit_data")
        # Linux, Documentation/ABI/stable/sysfs-class-infiniband: octets divided by 4
        counts.append(None if words is None else words * 4)
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


class SentMeter:
    """A meter of the bytes that this machine sends between steps: nothing at the first, or without other machines."""

    def __init__(self, has_others: bool, sys: Path = SYS) -> None:
        """Count only if `has_others`: other machines take part in the run."""
        self._has_others, self._sys = has_others, sys
        self._before: int | None = None

    def take(self) -> dict[str, int]:
        """Return the field `node_sent_bytes` for the row of a step, if it is known."""
        if not self._has_others:
            return {}
        before, self._before = self._before, sent_bytes(self._sys)
        if before is None or self._before is None or self._before < before:  # an interface went away
            return {}
        return {"node_sent_bytes": self._before - before}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


# What all ranks use of their GPUs and memory. The readings travel with the counts of a step, an exchange between hosts
# that takes place anyway.

_NOT_KNOWN = -1.0


class RankMeter:
    """This rank's readings for the rows of all ranks; they are due every EVERY_STEPS steps and at `last_step`."""

    def __init__(self, world: World, last_step: int) -> None:
        """Begin with no samples."""
        self._world, self._last_step = world, last_step
        self._utilizations: list[float] = []

    def add(self, sample: Sample) -> None:
        """Add the GPU's sample of a step; it may be empty."""
        if "gpu_utilization" in sample:
            self._utilizations.append(sample["gpu_utilization"])

    def take(self, step: int) -> list[float]:
        """Return the mean utilization since the last readings and the peak memory in bytes; nothing unless due."""
        if step % EVERY_STEPS and step != self._last_step:
            return []
        taken, self._utilizations = self._utilizations, []
        utilization = round(sum(taken) / len(taken), 3) if taken else _NOT_KNOWN
        return [utilization, float(memory_fields(self._world)["peak_memory_bytes"])]


def rank_fields(readings: Sequence[float]) -> dict[str, Any]:
    """Return the fields of a row by rank, from what `take` returned on each, rank by rank; nothing from nothing.

    Without the utilization of every rank there is none.
    """
    utilizations, memories = list(readings[::2]), [int(value) for value in readings[1::2]]
    if not memories:
        return {}
    known = {} if _NOT_KNOWN in utilizations else {UTILIZATION: utilizations}
    return {**known, PEAK_MEMORY: memories}


# All measurements of a step together.


@dataclass(frozen=True)
class Meter:
    """A converter of a step's work to its measurements. Without a GPU of known peak there is no MFU."""

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
        """Return fields of the step's row. Rates include the wait for the step's data, but not saving.

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
        of_this_rank = self.meter.fields(result, data_wait_s) | self.sent.take() | sample | self.profiler.take()
        return of_this_rank | rank_fields(result.readings)


@contextmanager
def instruments(read: Read, last_step: int, meter: Meter, events: EventLog) -> Iterator[Instruments]:
    """Provide instruments for steps up to `last_step`, with batches from `read`; their threads end with the block."""
    world, every_steps = meter.world, meter.train.profile_every_steps
    sent = SentMeter(has_others=world.is_first and world.size > world.local_size)
    ranks = RankMeter(world, last_step)
    with Prefetcher(read, last_step, world.device) as prefetcher, gpu_sampler(world.device) as gpu:
        yield Instruments(prefetcher, StepProfiler(world, every_steps, events), meter, gpu, ranks, sent)


def memory_fields(world: World) -> dict[str, int]:
    """Return `peak_memory_bytes`, this rank's peak: memory allocated on the GPU, or of the process without one.

    For a GPU also the peak that torch's allocator reserved, and the memory in use on the device now by all processes,
    which includes the CUDA context, NCCL's buffers and fragmentation.
    """
    if world.device.type != "cuda":
        return {"peak_memory_bytes": peak_rss_bytes()}
    free, total = torch.cuda.mem_get_info(world.device)
    return {
        "peak_memory_bytes": torch.cuda.max_memory_allocated(world.device),
        "reserved_memory_bytes": torch.cuda.max_memory_reserved(world.device),
        "device_memory_bytes": total - free,
    }
