"""What the plan foresaw against what came: each figure with its band, what was measured for it, and how far off it was.

What was not measured, or under another plan than this one, is left out and never made up.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline_lib.plan.units import HOUR_S
from pipeline_lib.publish import units
from pipeline_lib.publish.planned import Figure, Plan
from pipeline_lib.publish.results import Step, Training

# The first steps of an attempt choose kernels, lay out memory and compile: no prediction is of them.
SETTLING_STEPS = 3
PHASES = ("forward_s", "backward_s", "update_s")
# By the names of Prediction: what a figure is called, and what it is in (units.amount).
FIGURES = {
    "step_s": ("time of a step", "s"),
    "forward_s": ("forward of a step", "s"),
    "backward_s": ("backward of a step", "s"),
    "update_s": ("update of a step", "s"),
    "tokens_per_s_per_rank": ("speed of a rank", "tokens/s"),
    "mfu": ("MFU", "fraction"),
    "peak_memory_bytes": ("peak of the allocator", "memory"),
    "needed_memory_bytes": ("memory in use on the GPU", "memory"),
    "network_bytes": ("sent by a node in a step", "bytes"),
    "run_s": ("all steps with saving and validation", "s"),
    "gpu_hours": ("GPU hours of that", "GPU hours"),
    "checkpoint_bytes": ("a checkpoint", "bytes"),
    "checkpoint_s": ("writing a checkpoint", "s"),
}
# A checkpoint's tensors are counted exactly; headers, random states and records come on top.
_BESIDE_TENSORS, _RECORDS_BYTES = 0.02, 1_000_000
# The counters of a machine also count headers of packets, and what else it sends.
_BESIDE_PAYLOAD = 0.05
_WIDEST = 4  # times its low end: a wider band holds nearly anything, so that to be within it says nothing
# Counters that saw less than this part of what was exchanged do not count the way that it went, as between ranks of
# one machine that pass for several.
_SEEN = 0.01


@dataclass(frozen=True)
class Compared:
    """A figure of the plan and what was measured for it, both in the unit of `unit`."""

    key: str
    name: str
    unit: str
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def error_fraction(self) -> float:
        """How much more was measured than predicted, as a fraction of the prediction."""
        return self.measured / self.predicted - 1

    @property
    def is_judged(self) -> bool:
        """Whether the band is narrow enough for a prediction."""
        return self.high <= _WIDEST * self.low

    @property
    def within(self) -> bool:
        """Whether the band held it."""
        return self.low <= self.measured <= self.high

    @property
    def beyond_fraction(self) -> float:
        """How far past the end of the band it came, as a fraction of that end; negative below the band, else 0."""
        end = min(max(self.measured, self.low), self.high)
        return self.measured / end - 1 if end else 0.0


def comparison(
    plan: Plan, training: Training, steps: Sequence[Step], events: Sequence[Mapping[str, Any]]
) -> list[Compared]:
    """Every figure of `plan` that something was measured for, in the order of FIGURES.

    Times are medians over the settled steps, memory is the maximum over all, the run's time the sum over its attempts.
    """
    others = attempts_elsewhere(plan, events)
    here = steps_here(plan, steps, events)
    saved = [event for event in events if event.get("event") == "checkpoint.saved"]
    saved = [event for event in saved if event.get("attempt") not in others]
    measured = {
        **medians(here),
        **_memory(plan, here),
        **_network(plan, here),
        **({} if others else _run(plan, training, here)),
        "checkpoint_bytes": _median(event.get("bytes") for event in saved),
        "checkpoint_s": _median(event.get("duration_s") for event in saved),
    }
    speed, ranks = measured.pop("tokens_per_s", None), plan.cluster.ranks
    measured["tokens_per_s_per_rank"] = speed / ranks if speed is not None and ranks else None
    found = (_compared(key, _band(plan, key), measured.get(key)) for key in FIGURES)
    return [one for one in found if one is not None]


def verdict(compared: Sequence[Compared]) -> str:
    """A few sentences: how many figures were within their bands, and by how much each of the others was not."""
    judged = [one for one in compared if one.is_judged]
    outside = [one for one in judged if not one.within]
    said = f"{tally(compared)}."
    if outside:
        said += f" Outside: {'; '.join(f'{one.name}, {beyond(one)} the band' for one in outside)}."
    if len(judged) < len(compared):
        said += f" Bands wider than a factor of {_WIDEST} are not judged; `pipeline_lib calibrate` narrows them."
    return said


def tally(compared: Sequence[Compared]) -> str:
    """`7 of 8 figures came out within their bands, 2 not judged`."""
    judged = [one for one in compared if one.is_judged]
    others = len(compared) - len(judged)
    if not judged:
        return f"{units.count(others, 'figures')} not judged"
    figures, bands = ("figure", "its band") if len(judged) == 1 else ("figures", "their bands")
    said = f"{sum(one.within for one in judged)} of {len(judged)} {figures} came out within {bands}"
    return f"{said}, {others} not judged" if others else said


def unjudged(one: Compared) -> str:
    """Why there is no verdict on a figure that is not judged."""
    return "not judged: " + (f"a band of a factor of {one.high / one.low:,.0f}" if one.low > 0 else "a band from zero")


def beyond(one: Compared) -> str:
    """`14.0 % above`, of a figure that left its band."""
    side = "above" if one.beyond_fraction > 0 else "below"
    return f"{units.percent(abs(one.beyond_fraction))} {side}"


def settled(steps: Sequence[Step]) -> list[Step]:
    """Those that a prediction is of: past the first few of their attempt, applied, and not slowed by the profiler."""
    seen: dict[int, int] = {}
    found = []
    for step in steps:
        seen[_attempt(step)] = seen.get(_attempt(step), 0) + 1
        is_usual = step.verdict is None and step.profile_compute_s is None
        if seen[_attempt(step)] > SETTLING_STEPS and is_usual:
            found.append(step)
    return found


def medians(steps: Sequence[Step]) -> dict[str, float | None]:
    """Medians over the settled of `steps`: seconds of a step and its phases, tokens/s of all ranks, MFU."""
    names = ("step_s", *PHASES, "data_wait_s", "tokens_per_s", "mfu")
    found = settled(steps)
    return {name: _median(getattr(step, name) for step in found) for name in names}


def steps_here(plan: Plan, steps: Sequence[Step], events: Sequence[Mapping[str, Any]]) -> list[Step]:
    """Those of `steps` that ran as `plan` has it."""
    others = attempts_elsewhere(plan, events)
    return [step for step in steps if _attempt(step) not in others]


def attempts_elsewhere(plan: Plan, events: Sequence[Mapping[str, Any]]) -> set[int]:
    """Attempts that ran on another number of ranks, or placed otherwise, than `plan` is for.

    What an event of an earlier version does not hold counts as equal.
    """
    placed = plan.prediction.changes.model_dump()
    expected = {**placed, "world_size": plan.cluster.ranks, "strategy": plan.chosen.strategy}
    return {
        event["attempt"]
        for event in events
        if event.get("event") == "run.start"
        and isinstance(event.get("attempt"), int)
        and any(value is not None and event.get(key, value) != value for key, value in expected.items())
    }


def _compared(key: str, band: Figure, measured: float | None) -> Compared | None:
    if not band.value or band.low is None or band.high is None or measured is None:
        return None
    name, unit = FIGURES[key]
    return Compared(key, name, unit, band.value, band.low, band.high, measured)


def _band(plan: Plan, key: str) -> Figure:
    """The prediction, with room for what is measured along with it."""
    if key == "checkpoint_bytes":
        size = plan.prediction.checkpoint_bytes
        if size is None:
            return Figure()
        return Figure(value=size, low=size * (1 - _BESIDE_TENSORS), high=size * (1 + _BESIDE_TENSORS) + _RECORDS_BYTES)
    figure: Figure = getattr(plan.prediction, key)
    if key == "network_bytes" and figure.high is not None:
        return figure.model_copy(update={"high": figure.high * (1 + _BESIDE_PAYLOAD)})
    return figure


def _memory(plan: Plan, steps: Sequence[Step]) -> dict[str, float | None]:
    """On CPUs nothing: what is measured there is the whole process, and what is predicted its tensors."""
    if not plan.cluster.is_gpu:
        return {}
    return {
        "peak_memory_bytes": _known(max, (step.peak_memory_bytes for step in steps)),
        "needed_memory_bytes": _known(max, (step.device_memory_bytes for step in steps)),
    }


def _network(plan: Plan, steps: Sequence[Step]) -> dict[str, float | None]:
    sent = _median(step.node_sent_bytes for step in settled(steps))
    expected = plan.prediction.network_bytes.value
    return {"network_bytes": sent if sent and expected and sent >= _SEEN * expected else None}


def _run(plan: Plan, training: Training, steps: Sequence[Step]) -> dict[str, float | None]:
    """Nothing of a run that took fewer steps than planned. What an attempt did in vain is not in it."""
    if training.steps is None or training.steps != plan.batch.steps:
        return {}
    last_s = {_attempt(step): step.elapsed_s for step in steps}
    if not last_s or None in last_s.values():
        return {}
    run_s = sum(value or 0.0 for value in last_s.values())
    ranks = plan.cluster.ranks
    return {"run_s": run_s, "gpu_hours": run_s * ranks / HOUR_S if ranks else None}


def _attempt(step: Step) -> int:
    return step.attempt or 1


def _median(values: Any) -> float | None:
    return _known(statistics.median, values)


def _known(reduce: Callable[[list[float]], float], values: Any) -> float | None:
    """`reduce` of those of `values` that are numbers, if there are any."""
    found = [float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    return float(reduce(found)) if found else None
