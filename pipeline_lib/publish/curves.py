"""The training curves, with at most a stated number of points however long the run was."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.publish.results import Step

MAX_POINTS = 2000
COLUMNS = ("loss", "lr", "tokens_per_s", "grad_norm", "peak_memory_mb")
GIB_OF_MB = 1e6 / 2**30
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Curves:
    """One value a point, the mean of `steps_per_point` steps (the last point may have fewer); NaN where there is none.

    `step` is the last step of the point, `low` and `high` its smallest and largest value, by column;
    `loss_smooth` is the exponential moving average over all steps, whose half-life is `half_life_steps`.
    """

    steps_per_point: int
    half_life_steps: int
    step: NDArray[np.int64]
    low: Mapping[str, Values]
    high: Mapping[str, Values]
    loss: Values
    loss_smooth: Values
    lr: Values
    tokens_per_s: Values
    grad_norm: Values
    peak_memory_mb: Values


def curves_of(steps: Sequence[Step], max_points: int = MAX_POINTS) -> Curves:
    """The curves of `steps`, exact up to `max_points` steps, averaged over runs of equal length above that."""
    width = max(1, math.ceil(len(steps) / max_points))
    half_life = max(1, len(steps) // 50)
    raw = {name: np.array([_value(step, name) for step in steps], dtype=np.float64) for name in COLUMNS}
    numbers = np.array([step.step for step in steps], dtype=np.int64)
    last = np.minimum(np.arange(width - 1, len(steps) + width - 1, width), max(len(steps) - 1, 0))
    return Curves(
        steps_per_point=width,
        half_life_steps=half_life,
        step=numbers[last] if len(steps) else numbers,
        low={name: _reduce(values, width, np.fmin) for name, values in raw.items()},
        high={name: _reduce(values, width, np.fmax) for name, values in raw.items()},
        loss_smooth=smoothed(raw["loss"], half_life)[last] if len(steps) else raw["loss"],
        **{name: _means(values, width) for name, values in raw.items()},
    )


def curves_csv(curves: Curves) -> str:
    """The curves as CSV, the step and COLUMNS; an unknown value is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("step", *COLUMNS))
    for step, *values in zip(curves.step, *(getattr(curves, name) for name in COLUMNS), strict=True):
        writer.writerow((step, *("" if math.isnan(value) else f"{value:.7g}" for value in values)))
    return text.getvalue()


def smoothed(values: Values, half_life: float) -> Values:
    """Exponential moving average, its start not pulled to zero. NaN values carry the average on."""
    keep = 0.5 ** (1 / half_life)
    total = weight = 0.0
    averages = np.full(len(values), np.nan)
    for index, value in enumerate(values):
        if not math.isnan(value):
            total, weight = keep * total + value, keep * weight + 1.0
        if weight:
            averages[index] = total / weight
    return averages


def _value(step: Step, name: str) -> float:
    value = getattr(step, name)
    return math.nan if value is None else float(value)


def _means(values: Values, width: int) -> Values:
    """Mean of each run of `width` values, without the NaN among them; NaN for a run of nothing else."""
    if not len(values):
        return values
    starts = np.arange(0, len(values), width)
    known = ~np.isnan(values)
    totals = np.add.reduceat(np.where(known, values, 0.0), starts)
    counts = np.add.reduceat(known.astype(np.int64), starts)
    means: Values = np.divide(totals, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    return means


def _reduce(values: Values, width: int, operation: np.ufunc) -> Values:
    if not len(values):
        return values
    result: Values = operation.reduceat(values, np.arange(0, len(values), width))
    return result
