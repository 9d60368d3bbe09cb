"""The plan's predictions against the measurements: each figure's band, measured value and error.

A figure that was not measured, or was measured under another plan, is omitted, never estimated.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline_lib.core import units
from pipeline_lib.core.events import EventName
from pipeline_lib.core.language import N_, _
from pipeline_lib.core.run_record import RunRecord
from pipeline_lib.core.units import HOUR_S
from pipeline_lib.records.plan import Figure, PlanDocument, PlannedWay
from pipeline_lib.records.training import Step, Training, training_time_s

# The first steps of an attempt choose kernels, allocate memory and compile; predictions do not
# cover them.
SETTLING_STEPS = 3
PHASES = ("forward_s", "backward_s", "update_s")
# The names of Prediction, each with its label and its unit (units.amount).
FIGURES = {
    "step_s": (N_("time of a step"), "s"),
    "forward_s": (N_("forward of a step"), "s"),
    "backward_s": (N_("backward of a step"), "s"),
    "update_s": (N_("update of a step"), "s"),
    "tokens_per_s_per_rank": (N_("speed of a rank"), "tokens/s"),
    "mfu": ("MFU", "fraction"),
    "peak_memory_bytes": (N_("peak of the allocator"), "memory"),
    "needed_memory_bytes": (N_("memory in use on the GPU"), "memory"),
    "network_bytes": (N_("sent by a node in a step"), "bytes"),
    "run_s": (N_("all steps with saving and validation"), "s"),
    "gpu_hours": (N_("GPU hours of that"), "GPU hours"),
    "checkpoint_bytes": (N_("a checkpoint"), "bytes"),
    "checkpoint_s": (N_("writing a checkpoint"), "s"),
}
# A checkpoint's tensors are counted exactly; headers, random states and records come on top.
_BESIDE_TENSORS, _RECORDS_BYTES = 0.02, 1_000_000
# The counters of a machine also count packet headers and unrelated traffic.
_BESIDE_PAYLOAD = 0.05
# times the low end; a wider band contains nearly any value, so it does not test the prediction
_WIDEST = 4
# Counters that saw less than this fraction of the exchanged bytes do not count the path that they
# took, as between ranks of one machine that is configured as several nodes.
_SEEN = 0.01


@dataclass(frozen=True)
class Compared:
    """A predicted figure and its measured value, both in `unit`."""

    key: str
    name: str
    unit: str
    predicted: float
    low: float
    high: float
    measured: float

    @property
    def error_fraction(self) -> float:
        """The excess of the measured over the predicted value, as a fraction of the prediction."""
        return self.measured / self.predicted - 1

    @property
    def is_judged(self) -> bool:
        """Whether the band is narrow enough to test the prediction."""
        return self.high <= _WIDEST * self.low

    @property
    def within(self) -> bool:
        """Whether the measured value is within the band."""
        return self.low <= self.measured <= self.high

    @property
    def beyond_fraction(self) -> float:
        """The distance from the band as a fraction of its nearer end; negative below, 0 within."""
        end = min(max(self.measured, self.low), self.high)
        return self.measured / end - 1 if end else 0.0


def comparison(
    plan: PlanDocument, training: Training, steps: Sequence[Step], record: RunRecord
) -> list[Compared]:
    """Return every figure of `plan` that was measured, in the order of FIGURES.

    Times are medians over the settled steps, memory is the maximum over all steps, and the run's
    time is the sum over its attempts.
    """
    way = plan.prediction
    if way is None:
        return []
    others = attempts_elsewhere(plan, record)
    here = steps_here(plan, steps, record)
    every_save = record.named(EventName.CHECKPOINT_SAVED)
    saved = [event for event in every_save if event.get("attempt") not in others]
    measured = medians(here) | _memory(plan, here) | _network(way, here)
    if not others:
        measured |= _run(plan, training, here)
    measured["checkpoint_bytes"] = median(event.get("bytes") for event in saved)
    measured["checkpoint_s"] = median(event.get("duration_s") for event in saved)
    speed = measured["tokens_per_s"]
    if speed is not None:
        measured["tokens_per_s_per_rank"] = speed / plan.cluster.ranks
    compared = []
    for key, (name, unit) in FIGURES.items():
        band = _band(way, key)
        value = measured.get(key)
        if band is not None and band.value and value is not None:
            compared.append(Compared(key, _(name), unit, band.value, band.low, band.high, value))
    return compared


def verdict(compared: Sequence[Compared]) -> str:
    """Return sentences: how many figures are within their bands, and how far the others are out."""
    judged = [one for one in compared if one.is_judged]
    outside = [one for one in judged if not one.within]
    text = f"{tally(compared)}."
    if outside:
        distances = []
        for one in outside:
            distances.append(
                _("{name}, {beyond} the band").format(name=one.name, beyond=beyond(one))
            )
        text += _(" Outside: {figures}.").format(figures="; ".join(distances))
    if len(judged) < len(compared):
        text += _(
            " Bands wider than a factor of {factor} are not judged; `qwen3 calibrate CONFIG` narrows "
            "them."
        ).format(factor=_WIDEST)
    return text


def tally(compared: Sequence[Compared]) -> str:
    """Return text like `7 of 8 figures are within their bands, 2 not judged`."""
    judged = [one for one in compared if one.is_judged]
    others = len(compared) - len(judged)
    if not judged:
        return _("{figures} not judged").format(figures=units.count(others, _("figures")))
    text = _("{within} of {judged} figures are within their bands")
    if len(judged) == 1:
        text = _("{within} of {judged} figure is within its band")
    text = text.format(within=sum(one.within for one in judged), judged=len(judged))
    if others:
        text += _(", {number} not judged").format(number=others)
    return text


def unjudged(one: Compared) -> str:
    """Return the reason why a figure is not judged."""
    if one.low <= 0:
        return "not judged: a band from zero"
    return f"not judged: a band of a factor of {one.high / one.low:,.0f}"


def beyond(one: Compared) -> str:
    """Return text like `14.0% above` for a figure that is outside its band."""
    text = _("{distance} above") if one.beyond_fraction > 0 else _("{distance} below")
    return text.format(distance=units.percent(abs(one.beyond_fraction)))


def settled(steps: Sequence[Step]) -> list[Step]:
    """Return the steps that predictions cover.

    These come after the first SETTLING_STEPS of their attempt, were applied, and were not slowed by
    the profiler.
    """
    seen: Counter[int] = Counter()  # steps by attempt
    found = []
    for step in steps:
        seen[step.attempt] += 1
        is_usual = step.verdict is None and step.profile_compute_s is None
        if is_usual and seen[step.attempt] > SETTLING_STEPS:
            found.append(step)
    return found


def medians(steps: Sequence[Step]) -> dict[str, float | None]:
    """Return medians over the settled of `steps`: seconds of step and phases, tokens/s, MFU."""
    names = ("step_s", *PHASES, "data_wait_s", "tokens_per_s", "mfu")
    found = settled(steps)
    return {name: median(getattr(step, name) for step in found) for name in names}


def steps_here(plan: PlanDocument, steps: Sequence[Step], record: RunRecord) -> list[Step]:
    """Return those of `steps` whose attempt ran as `plan` describes."""
    others = attempts_elsewhere(plan, record)
    return [step for step in steps if step.attempt not in others]


def attempts_elsewhere(plan: PlanDocument, record: RunRecord) -> set[int]:
    """Return the attempts that ran with another number of ranks, strategy or placement than `plan`.

    A field that an event of an earlier version does not have counts as equal.
    """
    expected: dict[str, Any] = {"world_size": plan.cluster.ranks, "strategy": plan.chosen.strategy}
    if plan.prediction is not None:
        expected = vars(plan.prediction.changes) | expected
    known = {key: value for key, value in expected.items() if value is not None}
    others = set()
    for attempt, event in record.starts.items():
        if any(event.get(key, value) != value for key, value in known.items()):
            others.add(attempt)
    return others


def _band(way: PlannedWay, key: str) -> Figure | None:
    """Return the predicted band, widened by what is measured along with the figure."""
    if key == "checkpoint_bytes":
        size = way.checkpoint_bytes
        return Figure(
            value=size,
            low=size * (1 - _BESIDE_TENSORS),
            high=size * (1 + _BESIDE_TENSORS) + _RECORDS_BYTES,
        )
    figure: Figure | None = getattr(way, key)
    if key == "network_bytes" and figure is not None:
        return replace(figure, high=figure.high * (1 + _BESIDE_PAYLOAD))
    return figure


def _memory(plan: PlanDocument, steps: Sequence[Step]) -> dict[str, float | None]:
    """Return the memory peaks; nothing on CPUs: the process is measured, tensors are predicted."""
    if not plan.cluster.is_gpu:
        return {}
    return {
        "peak_memory_bytes": _known(max, (step.peak_memory_bytes for step in steps)),
        "needed_memory_bytes": _known(max, (step.device_memory_bytes for step in steps)),
    }


def _network(way: PlannedWay, steps: Sequence[Step]) -> dict[str, float | None]:
    sent = median(step.node_sent_bytes for step in settled(steps))
    expected = way.network_bytes.value
    if not sent or not expected or sent < _SEEN * expected:
        return {}
    return {"network_bytes": sent}


def _run(plan: PlanDocument, training: Training, steps: Sequence[Step]) -> dict[str, float | None]:
    """Return the run's time and GPU hours without lost steps; nothing if it has another length."""
    if training.steps != plan.batch.steps:
        return {}
    run_s = training_time_s((step.attempt, step.elapsed_s) for step in steps)
    if run_s is None:
        return {}
    return {"run_s": run_s, "gpu_hours": run_s * plan.cluster.ranks / HOUR_S}


def median(values: Any) -> float | None:
    """Return the median of the numbers among `values`; None if there are none."""
    return _known(statistics.median, values)


def _known(reduce: Callable[[list[float]], float], values: Any) -> float | None:
    """Return `reduce` of the numbers among `values`; None if there are none."""
    found = []
    for value in values:
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found.append(float(value))
    return float(reduce(found)) if found else None
