"""A step now and then under torch's profiler, which tells what the GPU's time went into. No trace is written."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pipeline_lib.base.events import EventLog
from pipeline_lib.train.dist import World
from pipeline_lib.train.timeline import Interval, shares_of

ROW_FIELDS = ("compute_s", "exposed_communication_s", "exposed_copy_s", "idle_s")


class StepProfiler:
    """Profiles every `every_steps`-th step on the first rank's GPU; the others go on as ever, and none on a CPU.

    The event `step.profiled` holds seconds and fractions of the step, by what `timeline.Shares` tells apart; the
    step's row has the seconds (`take`).
    """

    def __init__(self, world: World, every_steps: int | None, events: EventLog) -> None:
        """Profile nothing if `every_steps` is None."""
        self._last: dict[str, float] = {}
        self._device, self._events = world.device, events
        self._every_steps = every_steps if world.is_first and world.device.type == "cuda" else None
        if every_steps is not None and world.is_first and world.device.type != "cuda":
            events.emit("profile.left_out", reason="steps are profiled on GPUs only")

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Surrounds step number `step`, from 1; what it computes is not changed."""
        if self._every_steps is None or step % self._every_steps:
            yield
            return
        torch.cuda.synchronize(self._device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            start_s = time.perf_counter()
            yield
            torch.cuda.synchronize(self._device)
            duration_s = time.perf_counter() - start_s
        found = describe(_kernels(profiler), duration_s)
        self._last = row_fields(found)
        self._events.emit("step.profiled", step=step, **found)

    def take(self) -> dict[str, float]:
        """Fields of the row of the step that was profiled last; once, and none of a step that was not."""
        last, self._last = self._last, {}
        return last


def describe(kernels: list[tuple[str, Interval]], duration_s: float) -> dict[str, Any]:
    """The fields of the event for a step of `duration_s` seconds. `kernels`, in seconds, lie within it.

    Host and GPU keep different clocks, so the span is laid around the kernels, with its end at that of the last one:
    the step was waited for.
    """
    if not kernels:
        return {"step_s": round(duration_s, 6), "problem": "the profiler saw no kernels; may this user profile GPUs?"}
    end = max(interval[1] for _, interval in kernels)
    shares = asdict(shares_of(kernels, (end - duration_s, end)))
    fractions = {f"{name.removesuffix('_s')}_fraction": round(value / duration_s, 4) for name, value in shares.items()}
    return {"step_s": round(duration_s, 6), **{name: round(value, 6) for name, value in shares.items()}, **fractions}


def row_fields(described: dict[str, Any]) -> dict[str, float]:
    """What the row of a step holds of what `describe` made: seconds that add up to it; nothing where it failed."""
    return {f"profile_{name}": described[name] for name in ROW_FIELDS if name in described}


def _kernels(profiler: profile) -> list[tuple[str, Interval]]:
    """Name and time, in seconds, of what ran on the GPU, without the ranges that programs mark there."""
    return [
        (event.name, (event.time_range.start / 1e6, event.time_range.end / 1e6))
        for event in profiler.events() or []  # type: ignore[no-untyped-call]
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    ]
