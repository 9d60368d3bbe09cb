"""A GPU's time by activity, computing, exchanging, copying or idle, from profiles of single steps.

Profiles are made by torch's profiler. No trace is written.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline_lib.core.events import EventLog, EventName
from pipeline_lib.train.dist import World

Interval = tuple[float, float]


@dataclass(frozen=True)
class Shares:
    """Seconds of a span by activity; the first four add up to it.

    Each moment counts for the first that went on in it. `exposed_communication_s` and
    `exposed_copy_s` are the parts without concurrent computation; `hidden_communication_s` is the
    rest of the communication, which took place within `compute_s`. `context_s` is the communication
    of ranks that share a block, exposed or not.
    """

    compute_s: float
    exposed_communication_s: float
    exposed_copy_s: float
    idle_s: float
    hidden_communication_s: float
    context_s: float


def kind_of(kernel: str) -> str:
    """Return `communication`, `copy` or `compute`: what the operation of that name does."""
    lowered = kernel.lower()
    if "nccl" in lowered:
        return "communication"
    return "copy" if lowered.startswith(("memcpy", "memset")) else "compute"


def is_of_context(kernel: str) -> bool:
    """Return whether the kernel exchanges between ranks that share a block: NCCL's all-to-all."""
    return "sendrecv" in kernel.lower()


def shares_of(kernels: Iterable[tuple[str, Interval]], span: Interval) -> Shares:
    """Return how the named intervals, in seconds, used `span`; nothing outside it counts."""
    by_kind: dict[str, list[Interval]] = {"compute": [], "communication": [], "copy": []}
    of_context: list[Interval] = []
    for name, (begin, end) in kernels:
        clipped = max(begin, span[0]), min(end, span[1])
        if clipped[0] < clipped[1]:
            by_kind[kind_of(name)].append(clipped)
            if is_of_context(name):
                of_context.append(clipped)
    compute = length(by_kind["compute"])
    communication = length(by_kind["communication"])
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
    covered = 0.0
    reached = float("-inf")
    for begin, end in sorted(intervals):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered


ROW_FIELDS = ("compute_s", "exposed_communication_s", "exposed_copy_s", "idle_s")


class StepProfiler:
    """A profiler of every `every_steps`-th step on the first rank's GPU; the rest is not profiled.

    The event `step.profiled` holds seconds and fractions of the step by the fields of `Shares`; the
    step's row has the seconds (`take`).
    """

    def __init__(self, world: World, every_steps: int | None, events: EventLog) -> None:
        """Profile nothing if `every_steps` is None."""
        self._last: dict[str, float] = {}
        self._device = world.device
        self._events = events
        self._every_steps = every_steps if world.is_first and world.device.type == "cuda" else None
        if every_steps is not None and world.is_first and world.device.type != "cuda":
            events.emit(EventName.PROFILE_LEFT_OUT, reason="steps are profiled on GPUs only")

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Profile the enclosed step number `step`, from 1, if it is due, and do not change it."""
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
        """Return the profile's fields for the last step's row, once; nothing without one."""
        last = self._last
        self._last = {}
        return last


def describe(kernels: list[tuple[str, Interval]], duration_s: float) -> dict[str, Any]:
    """Return the fields of the event for a step of `duration_s` seconds.

    `kernels`, in seconds, lie within it. Host and GPU have different clocks, so the span is placed
    to end with the last kernel: the host waited for it.
    """
    if not kernels:
        return {
            "step_s": round(duration_s, 6),
            "problem": "the profiler saw no kernels; may this user profile GPUs?",
        }
    end = max(interval[1] for _, interval in kernels)
    shares = asdict(shares_of(kernels, (end - duration_s, end)))
    fractions = {
        f"{name.removesuffix('_s')}_fraction": round(value / duration_s, 4)
        for name, value in shares.items()
    }
    return {
        "step_s": round(duration_s, 6),
        **{name: round(value, 6) for name, value in shares.items()},
        **fractions,
    }


def row_fields(described: dict[str, Any]) -> dict[str, float]:
    """Return the row's fields from those of `describe`, which add up to the step, in seconds.

    There are none if it failed.
    """
    return {f"profile_{name}": described[name] for name in ROW_FIELDS if name in described}
