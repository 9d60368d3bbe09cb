"""The figures of the training: one curve each over the optimizer steps, which zoom and point together."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.models import BasicTickFormatter, ColumnDataSource, CrosshairTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span

from pipeline_lib.publish.charts import (
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
)
from pipeline_lib.publish.curves import GIB_OF_MB, Curves

_STEP = "optimizer step"
_BAND_ALPHA = 0.18
_NATS = "{0.0000} nats/token"


def training_figures(curves: Curves, restarts: Sequence[int], validations: Mapping[int, float]) -> dict[str, Chart]:
    """Those that there are numbers for, by the id of their place; `restarts` are the first steps of later attempts."""
    if not len(curves.step):
        return {}
    first, last = int(curves.step[0]), int(curves.step[-1])
    margin = max(1.0, 0.01 * (last - first))
    limits = (first - margin, last + margin)
    common: dict[str, Any] = {
        "x_range": Range1d(start=limits[0], end=limits[1], bounds=limits),
        "pointer": Span(dimension="height", line_color=GREY, line_width=1, line_dash="dotted"),
    }
    drawn = {
        "figure-loss": _loss(curves, restarts, validations, common),
        "figure-lr": _curve(curves, "lr", "learning rate", GREEN, "0.00e+0", common),
        "figure-throughput": _curve(curves, "tokens_per_s", "tokens/s, all ranks", AMBER, "0,0", common),
        "figure-gradient": _curve(curves, "grad_norm", "gradient norm (L2)", PURPLE, "0.00", common),
        "figure-peak": _curve(curves, "peak_memory_mb", "peak memory (GiB)", TEAL, "0,0.0[0]", common, GIB_OF_MB),
    }
    if (gradient := drawn["figure-gradient"]) is not None:
        log = _curve(curves, "grad_norm", "gradient norm (L2)", PURPLE, "0.00", common, is_log=True)
        drawn["figure-gradient"] = Chart(gradient.plot, log_plot=log.plot if log else None)
    return {name: chart for name, chart in drawn.items() if chart is not None}


def _loss(
    curves: Curves, restarts: Sequence[int], validations: Mapping[int, float], common: Mapping[str, Any]
) -> Chart | None:
    """Raw, smoothed and held-out loss, and a line where an attempt began anew; on either scale."""
    if not np.isfinite(curves.loss).any():
        return None
    average = (BLUE, f"moving average, half-life {curves.half_life_steps} steps")
    mean = "each step"
    if curves.steps_per_point > 1:
        mean = f"mean of {curves.steps_per_point} steps, from lowest to highest"
    legend = [(FAINT_BLUE, mean), average]
    legend += [(AMBER, "held-out blocks")] * bool(validations) + [(RED, "restart")] * bool(restarts)
    columns = {"step": curves.step, "loss": curves.loss, "smooth": curves.loss_smooth}
    source = ColumnDataSource({**columns, "low": curves.low["loss"], "high": curves.high["loss"]})
    held_out = ColumnDataSource({"step": list(validations), "loss": list(validations.values())})
    plots = [_loss_plot(curves, source, held_out, restarts, common, is_log) for is_log in (False, True)]
    return Chart(plots[0], tuple(legend), log_plot=plots[1])


def _loss_plot(
    curves: Curves,
    source: ColumnDataSource,
    held_out: ColumnDataSource,
    restarts: Sequence[int],
    common: Mapping[str, Any],
    is_log: bool,
) -> Any:
    plot = _step_plot(320, "training loss (nats per supervised token)", common, is_log)
    plot.yaxis.formatter = NumeralTickFormatter(format="0.[00]")
    if curves.steps_per_point > 1:
        plot.varea("step", "low", "high", color=BLUE, fill_alpha=_BAND_ALPHA, source=source)
    plot.line("step", "loss", color=FAINT_BLUE, line_width=1, source=source)
    line = plot.line("step", "smooth", color=BLUE, line_width=2, source=source)
    tips = (("step", "@step{0,0}"), ("loss", f"@loss{_NATS}"), ("average", f"@smooth{_NATS}"))
    add_hover(plot, line, tips, mode="vline")
    if held_out.data["step"]:
        points = plot.scatter("step", "loss", color=AMBER, size=6, source=held_out)
        add_hover(plot, points, (("step", "@step{0,0}"), ("held-out loss", f"@loss{_NATS}")))
    for step in restarts:
        plot.add_layout(Span(location=step, dimension="height", line_color=RED, line_dash="dashed", line_width=1))
    return plot


def _curve(
    curves: Curves,
    column: str,
    label: str,
    colour: str,
    digits: str,
    common: Mapping[str, Any],
    scale: float = 1.0,
    is_log: bool = False,
) -> Chart | None:
    """One line, and the band from lowest to highest where a point is of several steps; `digits` as in numeral.js.

    The values of the column are multiplied by `scale`.
    """
    values = getattr(curves, column) * scale
    if not np.isfinite(values).any():
        return None
    plot = _step_plot(220, label, common, is_log)
    if not is_log:
        plot.y_range.start = 0
    band = {"low": curves.low[column] * scale, "high": curves.high[column] * scale}
    source = ColumnDataSource({"step": curves.step, "value": values, **band})
    if curves.steps_per_point > 1:
        plot.varea("step", "low", "high", color=colour, fill_alpha=_BAND_ALPHA, source=source)
    line = plot.line("step", "value", color=colour, line_width=1.5, source=source)
    add_hover(plot, line, (("step", "@step{0,0}"), (label, f"@value{{{digits}}}")), mode="vline")
    scientific = BasicTickFormatter(use_scientific=True, power_limit_low=0, precision=1)
    plot.yaxis.formatter = scientific if "e" in digits else NumeralTickFormatter(format=digits.replace(".00", ".[00]"))
    return Chart(plot)


def _step_plot(height: int, label: str, common: Mapping[str, Any], is_log: bool) -> Any:
    """An empty figure over the steps, which shares its range and its pointer with the others."""
    plot = empty_plot(height, _STEP, label, x_range=common["x_range"], y_axis_type="log" if is_log else "linear")
    plot.add_tools(CrosshairTool(overlay=common["pointer"], visible=False))
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.xaxis.ticker.desired_num_ticks = plot.yaxis.ticker.desired_num_ticks = 5
    return plot
