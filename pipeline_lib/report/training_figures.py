"""The training figures: one curve each over the optimizer steps, with a shared zoom and pointer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, CrosshairTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span

from pipeline_lib.core.language import _
from pipeline_lib.report.charts import (
    AMBER,
    BLUE,
    FAINT_BLUE,
    GREEN,
    GREY,
    PURPLE,
    RED,
    TEAL,
    Chart,
    add_hover,
    empty_plot,
    tick_format,
)
from pipeline_lib.report.curves import GIB_OF_MB, Curves

_BAND_ALPHA = 0.18
_MOST_EPOCHS = 40  # more marks than that hide the curve
_NATS = "{0.0000} nats/token"


@dataclass(frozen=True)
class _StepAxis:
    """What the figures over steps share: the steps' range, and a vertical line at the pointer."""

    steps: Range1d
    pointer: Span

    def plot(self, height: int, label: str, is_log: bool) -> Any:
        """Return an empty figure."""
        scale = "log" if is_log else "linear"
        plot = empty_plot(height, _("optimizer step"), label, x_range=self.steps, y_axis_type=scale)
        plot.add_tools(CrosshairTool(overlay=self.pointer, visible=False))
        plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
        plot.xaxis.ticker.desired_num_ticks = plot.yaxis.ticker.desired_num_ticks = 5
        return plot


def training_figures(
    curves: Curves,
    restarts: Sequence[int],
    validations: Mapping[int, float],
    epochs: Sequence[int],
) -> dict[str, Chart]:
    """Return the training figures with data, by element id.

    `restarts` are the first steps of later attempts, `epochs` those of later epochs.
    """
    if not len(curves.step):
        return {}
    first = int(curves.step[0])
    last = int(curves.step[-1])
    margin = max(1.0, 0.01 * (last - first))
    limits = (first - margin, last + margin)
    axis = _StepAxis(
        Range1d(start=limits[0], end=limits[1], bounds=limits),
        Span(dimension="height", line_color=GREY, line_width=1, line_dash="dotted"),
    )
    drawn = {
        "figure-loss": _loss(curves, restarts, validations, epochs, axis),
        "figure-lr": _curve(curves, "lr", _("learning rate"), GREEN, "0.00e+0", axis),
        "figure-throughput": _curve(
            curves, "tokens_per_s", _("tokens/s, all ranks"), AMBER, "0,0", axis
        ),
        "figure-gradient": _curve(
            curves, "grad_norm", _("gradient norm (L2)"), PURPLE, "0.00", axis
        ),
        "figure-peak": _curve(
            curves, "peak_memory_mb", _("peak memory (GiB)"), TEAL, "0,0.0[0]", axis, GIB_OF_MB
        ),
    }
    if (gradient := drawn["figure-gradient"]) is not None:
        log = _curve(
            curves, "grad_norm", _("gradient norm (L2)"), PURPLE, "0.00", axis, is_log=True
        )
        drawn["figure-gradient"] = Chart(gradient.plot, log_plot=log.plot if log else None)
    return {name: chart for name, chart in drawn.items() if chart is not None}


def _loss(
    curves: Curves,
    restarts: Sequence[int],
    validations: Mapping[int, float],
    epochs: Sequence[int],
    axis: _StepAxis,
) -> Chart | None:
    """Draw raw, smoothed and held-out loss, epochs and restarts, on linear and logarithmic scales."""
    if not np.isfinite(curves.loss).any():
        return None
    each = _("each step")
    if curves.steps_per_point > 1:
        each = _("mean of {steps} steps, from lowest to highest").format(
            steps=curves.steps_per_point
        )
    legend = [
        (FAINT_BLUE, each),
        (BLUE, _("training loss, smoothed")),
    ]
    marked = epochs if len(epochs) <= _MOST_EPOCHS else ()
    if validations:
        legend.append((AMBER, _("held-out loss")))
    if marked:
        legend.append((GREY, _("start of an epoch")))
    if restarts:
        legend.append((RED, _("restart")))
    columns = {
        "step": curves.step,
        "loss": curves.loss,
        "smooth": curves.loss_smooth,
        "low": curves.low["loss"],
        "high": curves.high["loss"],
    }
    source = ColumnDataSource(columns)
    held_out = ColumnDataSource({"step": list(validations), "loss": list(validations.values())})
    plots = []
    for is_log in (False, True):
        plot = axis.plot(320, _("loss (nats per supervised token)"), is_log)
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[00]")
        if curves.steps_per_point > 1:
            plot.varea("step", "low", "high", color=BLUE, fill_alpha=_BAND_ALPHA, source=source)
        plot.line("step", "loss", color=FAINT_BLUE, line_width=1, source=source)
        line = plot.line("step", "smooth", color=BLUE, line_width=2, source=source)
        tips = (("step", "@step{0,0}"), ("loss", f"@loss{_NATS}"), ("average", f"@smooth{_NATS}"))
        add_hover(plot, line, tips, mode="vline")
        if validations:
            plot.line("step", "loss", color=AMBER, line_width=2, source=held_out)
            points = plot.scatter("step", "loss", color=AMBER, size=6, source=held_out)
            add_hover(plot, points, (("step", "@step{0,0}"), ("held-out loss", f"@loss{_NATS}")))
        for step in marked:
            plot.add_layout(_mark(step, GREY, "dotted"))
        for step in restarts:
            plot.add_layout(_mark(step, RED, "dashed"))
        plots.append(plot)
    return Chart(plots[0], tuple(legend), log_plot=plots[1])


def _mark(step: int, colour: str, dash: str) -> Span:
    """Return a vertical line at `step`."""
    return Span(location=step, dimension="height", line_color=colour, line_dash=dash, line_width=1)


def _curve(
    curves: Curves,
    column: str,
    label: str,
    colour: str,
    digits: str,
    axis: _StepAxis,
    scale: float = 1.0,
    is_log: bool = False,
) -> Chart | None:
    """Draw one column, with a band from lowest to highest where a point covers several steps.

    `digits` is a numeral.js format. The values of the column are multiplied by `scale`.
    """
    values = getattr(curves, column) * scale
    if not np.isfinite(values).any():
        return None
    plot = axis.plot(220, label, is_log)
    if not is_log:
        plot.y_range.start = 0
    band = {"low": curves.low[column] * scale, "high": curves.high[column] * scale}
    source = ColumnDataSource({"step": curves.step, "value": values, **band})
    if curves.steps_per_point > 1:
        plot.varea("step", "low", "high", color=colour, fill_alpha=_BAND_ALPHA, source=source)
    line = plot.line("step", "value", color=colour, line_width=1.5, source=source)
    add_hover(plot, line, (("step", "@step{0,0}"), (label, f"@value{{{digits}}}")), mode="vline")
    plot.yaxis.formatter = tick_format(digits, "00")
    return Chart(plot)
