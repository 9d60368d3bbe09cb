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
_LEAST_SPREAD = 1e-9  # of the weights' places, squared


@dataclass(frozen=True)
class Curves:
    """The training curves; each value is a mean of `steps_per_point` steps, NaN where unknown.

    The last point may cover fewer steps. `step` is the last step of each point; `low` and `high`
    are its smallest and largest value, by column. `loss_smooth` is `loss` smoothed, with weights
    that halve every `half_life_steps` steps to both sides. `held_out_loss` is the newest one that
    was measured in the steps of a point.
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
    held_out_loss: Values


def curves_of(steps: Sequence[Step], max_points: int = MAX_POINTS) -> Curves:
    """Return the curves of `steps`: exact up to `max_points` steps, averages of runs above it."""
    if not steps:
        none: Any = np.empty(0)
        columns = dict.fromkeys(COLUMNS, none)
        beside = {"loss_smooth": none, "held_out_loss": none}
        return Curves(1, 1, np.empty(0, np.int64), columns, columns, **beside, **columns)
    width = max(1, math.ceil(len(steps) / max_points))
    starts = np.arange(0, len(steps), width)
    points = len(starts)
    half_life = max(1, points // 100)
    raw = {}
    for name in COLUMNS:
        raw[name] = np.array([getattr(step, name) for step in steps], dtype=np.float64)
    numbers = np.array([step.step for step in steps], dtype=np.int64)
    last = np.minimum(starts + width - 1, len(steps) - 1)
    means = {name: _means(values, starts) for name, values in raw.items()}
    return Curves(
        steps_per_point=width,
        half_life_steps=half_life * width,
        step=numbers[last],
        low={name: np.fmin.reduceat(values, starts) for name, values in raw.items()},
        high={name: np.fmax.reduceat(values, starts) for name, values in raw.items()},
        loss_smooth=smoothed(means["loss"], half_life),
        held_out_loss=_newest([step.validation_loss for step in steps], starts),
        **means,
    )


def curves_csv(curves: Curves) -> str:
    """Return the curves as CSV: step, COLUMNS, held_out_loss; an unknown value is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = (*COLUMNS, "held_out_loss")
    writer.writerow(("step", *names))
    columns = [getattr(curves, name) for name in names]
    for step, *values in zip(curves.step, *columns, strict=True):
        row = [str(step)]
        for value in values:
            row.append("" if math.isnan(value) else f"{value:.7g}")
        writer.writerow(row)
    return text.getvalue()


def smoothed(values: Values, half_life: float) -> Values:
    """Return `values`, each replaced by a line fitted to its neighbours; NaN where none is known.

    A neighbour's weight halves every `half_life` places. A mean instead of a line would stand above
    all points where the curve falls from its first value.
    """
    places = np.arange(len(values), dtype=np.float64)
    away = places[None, :] - places[:, None]
    known = ~np.isnan(values)
    weights = 0.5 ** (np.abs(away) / half_life) * known
    filled = np.where(known, values, 0.0)
    total = weights.sum(axis=1)
    first = (weights * away).sum(axis=1)
    second = (weights * away**2).sum(axis=1)
    of_values = weights @ filled
    of_slopes = (weights * away) @ filled
    spread = total * second - first**2
    is_line = spread > _LEAST_SPREAD * total**2  # one known value has no slope
    with np.errstate(invalid="ignore", divide="ignore"):
        line = (second * of_values - first * of_slopes) / spread
        mean = of_values / total
    fitted: Values = np.where(is_line, line, mean)
    return fitted


def _newest(values: Sequence[float | None], starts: NDArray[np.int64]) -> Values:
    """Return the last known value from each of `starts` to the next; NaN where none is."""
    newest = np.full(len(starts), np.nan)
    for place, value in enumerate(values):
        if value is not None:
            newest[np.searchsorted(starts, place, side="right") - 1] = value
    return newest


def _means(values: Values, starts: NDArray[np.int64]) -> Values:
    """Return the mean from each of `starts` to the next without NaN; NaN where all are."""
    known = ~np.isnan(values)
    totals = np.add.reduceat(np.where(known, values, 0.0), starts)
    counts = np.add.reduceat(known.astype(np.int64), starts)
    means: Values = np.divide(totals, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    return means
