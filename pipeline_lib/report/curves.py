"""The training curves, reduced to at most a given number of points."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.records.training import Step

MAX_POINTS = 2000
COLUMNS = ("loss", "lr", "tokens_per_s", "grad_norm", "peak_memory_mb")
GIB_OF_MB = 1e6 / 2**30
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Curves:
    """The training curves; each value is a mean of `steps_per_point` steps, NaN where unknown.

    The last point may cover fewer steps. `step` is the last step of each point; `low` and `high`
    are its smallest and largest value, by column. `loss_smooth` is the exponential moving average
    over all steps with a half-life of `half_life_steps`.
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
    """Return the curves of `steps`: exact up to `max_points` steps, averages of runs above it."""
    if not steps:
        none: Any = np.empty(0)
        columns = dict.fromkeys(COLUMNS, none)
        return Curves(1, 1, np.empty(0, np.int64), columns, columns, loss_smooth=none, **columns)
    width = max(1, math.ceil(len(steps) / max_points))
    starts = np.arange(0, len(steps), width)
    half_life = max(1, len(steps) // 50)
    raw = {}
    for name in COLUMNS:
        raw[name] = np.array([getattr(step, name) for step in steps], dtype=np.float64)
    numbers = np.array([step.step for step in steps], dtype=np.int64)
    last = np.minimum(starts + width - 1, len(steps) - 1)
    return Curves(
        steps_per_point=width,
        half_life_steps=half_life,
        step=numbers[last],
        low={name: np.fmin.reduceat(values, starts) for name, values in raw.items()},
        high={name: np.fmax.reduceat(values, starts) for name, values in raw.items()},
        loss_smooth=smoothed(raw["loss"], half_life)[last],
        **{name: _means(values, starts) for name, values in raw.items()},
    )


def curves_csv(curves: Curves) -> str:
    """Return the curves as CSV with the columns step and COLUMNS; an unknown value is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("step", *COLUMNS))
    columns = [getattr(curves, name) for name in COLUMNS]
    for step, *values in zip(curves.step, *columns, strict=True):
        row = [str(step)]
        for value in values:
            row.append("" if math.isnan(value) else f"{value:.7g}")
        writer.writerow(row)
    return text.getvalue()


def smoothed(values: Values, half_life: float) -> Values:
    """Return the bias-corrected exponential moving average; NaN leaves it unchanged."""
    keep = 0.5 ** (1 / half_life)
    total = weight = 0.0
    averages = np.full(len(values), np.nan)
    for index, value in enumerate(values):
        if not math.isnan(value):
            total = keep * total + value
            weight = keep * weight + 1.0
        if weight:
            averages[index] = total / weight
    return averages


def _means(values: Values, starts: NDArray[np.int64]) -> Values:
    """Return the mean from each of `starts` to the next without NaN; NaN where all are."""
    known = ~np.isnan(values)
    totals = np.add.reduceat(np.where(known, values, 0.0), starts)
    counts = np.add.reduceat(known.astype(np.int64), starts)
    means: Values = np.divide(totals, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    return means
