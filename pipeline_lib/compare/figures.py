"""The figures of a comparison: the distance of each experiment from the best, and all curves."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter
from bokeh.models.annotations import Span
from numpy.typing import NDArray

from pipeline_lib.compare.comparison import Comparison
from pipeline_lib.records.training import Step
from pipeline_lib.report.charts import (
    AMBER,
    BLUE,
    GREEN,
    GREY,
    RED,
    TEXT,
    Chart,
    add_hover,
    empty_bars,
    empty_plot,
    short_names,
    tick_format,
)
from pipeline_lib.report.curves import GIB_OF_MB, Curves, curves_of

# Legible on white and on black, and distinct. Experiments beyond these repeat the colours with
# dashed lines.
COLOURS = (BLUE, AMBER, GREEN, RED, "#8b6bc2", "#2f9fae", "#c763a0", "#8f9a35", "#9a6b4b", GREY)
ALL_POINTS = 10_000  # per figure, over all experiments
MAX_POINTS = 2000  # per experiment
MAX_SWEPT = 6  # keys that have a figure
MIN_SWEPT = 2  # values of a key that make a figure
DECADE = 10
RATE = "train.lr"
Values = NDArray[np.float64]


@dataclass(frozen=True)
class LineStyle:
    """The colour and style of an experiment's lines."""

    colour: str
    is_dashed: bool


@dataclass(frozen=True)
class Course:
    """One experiment's training curves, with supervised tokens and seconds up to each point."""

    name: str
    style: LineStyle
    curves: Curves
    tokens: Values
    seconds: Values
    held_out: Mapping[int, float]


def line_styles(comparison: Comparison) -> list[LineStyle]:
    """Return the style of each experiment, in their order; the best get the most distinct ones."""
    styles = {}
    for turn, place in enumerate(comparison.order):
        colour = COLOURS[turn % len(COLOURS)]
        styles[place] = LineStyle(colour, is_dashed=turn >= len(COLOURS))
    return [styles[place] for place in range(len(comparison.found))]


def figures_of(comparison: Comparison) -> dict[str, Chart]:
    """Return the figures that have data, by the id of their place in the page."""
    styles = line_styles(comparison)
    courses = [course_of(comparison, place, styles[place]) for place in comparison.order]
    found = [course for course in courses if course is not None]
    unit, size_s = _time_unit(found)
    drawn = {
        "figure-versus": versus_figure(comparison, styles),
        "figure-loss": loss_figure(
            found, "optimizer step", lambda course: course.curves.step, "0,0", 340
        ),
        "figure-held-out": held_out_figure(found),
        "figure-loss-tokens": loss_figure(
            found, "supervised tokens", lambda course: course.tokens, "0.[00]a", 240
        ),
        "figure-loss-time": loss_figure(
            found, f"{unit} of training", lambda course: course.seconds / size_s, "0,0.[00]", 240
        ),
        "figure-lr": _curves(found, "learning rate", lambda course: course.curves.lr, "0.00e+0"),
        "figure-throughput": _curves(
            found, "tokens/s, all ranks", lambda course: course.curves.tokens_per_s, "0,0"
        ),
        "figure-gradient": _curves(
            found, "gradient norm (L2)", lambda course: course.curves.grad_norm, "0.00"
        ),
        "figure-memory": _curves(
            found,
            "peak memory, GiB",
            lambda course: course.curves.peak_memory_mb * GIB_OF_MB,
            "0,0.0[0]",
        ),
    }
    for key in swept_keys(comparison):
        drawn[swept_id(key)] = swept_figure(comparison, key, styles)
    return {name: chart for name, chart in drawn.items() if chart is not None}


def _time_unit(courses: Sequence[Course]) -> tuple[str, float]:
    """Return the largest unit that the longest training takes at least two of, and its seconds."""
    longest = [float(np.nanmax(course.seconds, initial=0.0)) for course in courses]
    longest_s = max(longest, default=0.0)
    for unit, size_s in (("hours", 3600.0), ("minutes", 60.0)):
        if longest_s >= 2 * size_s:
            return unit, size_s
    return "seconds", 1.0


def swept_keys(comparison: Comparison) -> list[str]:
    """Return the keys that get a figure: the learning rate first, and at most MAX_SWEPT."""
    return sorted(comparison.swept, key=lambda key: key != RATE)[:MAX_SWEPT]


def swept_id(key: str) -> str:
    """Return the id of the place in the page of a key's figure."""
    return f"figure-swept-{re.sub('[^a-z0-9]+', '-', key.lower())}"


def swept_figure(comparison: Comparison, key: str, styles: Sequence[LineStyle]) -> Chart | None:
    """Draw the held-out loss against a key's values: dots if finished, triangles if stopped.

    A stopped one has the loss of its last rung. The axis of the values is logarithmic for the
    learning rate, and for any other key whose values span a decade.
    """
    finished = []
    stopped = []
    for place, value in enumerate(comparison.swept[key]):
        if value is None:
            continue
        numbers = comparison.measured[place]
        name = comparison.names[place]
        colour = styles[place].colour
        if numbers.loss is not None:
            finished.append(Point(value, numbers.loss, name, "finished", colour))
        elif numbers.rung_loss is not None:
            told = f"stopped after step {numbers.stopped_at}"
            stopped.append(Point(value, numbers.rung_loss, name, told, colour))
    values = {point.value for point in finished + stopped}
    if len(values) < MIN_SWEPT:
        return None
    spans_decades = min(values) > 0 and (key == RATE or max(values) >= DECADE * min(values))
    x_scale = "log" if spans_decades else "linear"
    is_only = len(comparison.swept) == 1  # else another key changes along the line
    linear = _swept_plot(key, finished, stopped, is_only, (x_scale, "linear"))
    log = _swept_plot(key, finished, stopped, is_only, (x_scale, "log"))
    return Chart(linear, log_plot=log)


@dataclass(frozen=True)
class Point:
    """The held-out loss of an experiment against its value of a swept key."""

    value: float
    loss: float
    name: str
    told: str
    colour: str


def _swept_plot(
    key: str,
    finished: Sequence[Point],
    stopped: Sequence[Point],
    is_only: bool,
    scales: tuple[str, str],
) -> Any:
    x_scale, y_scale = scales
    plot = empty_plot(
        280, key, "held-out loss (nats/token)", x_axis_type=x_scale, y_axis_type=y_scale
    )
    if is_only:
        along = sorted(finished, key=lambda point: point.value)
        plot.line(
            [point.value for point in along],
            [point.loss for point in along],
            color=GREY,
            line_width=1,
        )
    tips = (
        ("", "@name"),
        (key, "@value{0.[00000000]}"),
        ("held-out loss", "@loss{0.0000}"),
        ("", "@told"),
    )
    for points, marker, alpha in ((finished, "circle", 1.0), (stopped, "triangle", 0.0)):
        columns = {}
        for field in fields(Point):
            columns[field.name] = [getattr(point, field.name) for point in points]
        look = {"color": "colour", "fill_alpha": alpha, "line_width": 2, "size": 11}
        drawn = plot.scatter(
            "value", "loss", marker=marker, source=ColumnDataSource(columns), **look
        )
        add_hover(plot, drawn, tips)
    return plot


def course_of(comparison: Comparison, place: int, style: LineStyle) -> Course | None:
    """Return the course of the experiment in `place`; None if it has no steps."""
    rows = comparison.found[place].steps
    if not rows:
        return None
    curves = curves_of(rows, min(MAX_POINTS, ALL_POINTS // len(comparison.found)))
    at = np.searchsorted([row.step for row in rows], curves.step)
    tokens = np.cumsum([row.supervised_tokens or 0 for row in rows], dtype=np.float64)
    held_out = {}
    for row in rows:
        if row.validation_loss is not None:
            held_out[row.step] = row.validation_loss
    return Course(
        name=comparison.names[place],
        style=style,
        curves=curves,
        tokens=tokens[at],
        seconds=seconds_of(rows)[at],
        held_out=held_out,
    )


def seconds_of(rows: Sequence[Step]) -> Values:
    """Return the seconds of training up to each step, over all attempts; NaN if unknown."""
    before_s = 0.0
    last_s = 0.0
    attempt = None
    found = []
    for row in rows:
        if row.attempt != attempt:
            before_s += last_s
            attempt = row.attempt
        last_s = np.nan if row.elapsed_s is None else row.elapsed_s
        found.append(before_s + last_s)
    return np.array(found)


def versus_figure(comparison: Comparison, styles: Sequence[LineStyle]) -> Chart | None:
    """Draw how far the loss of each experiment is above that of the best (0), with its interval."""
    ranking = comparison.ranking
    ranked = [place for place in comparison.order if place in ranking.versus]
    others = [place for place in ranked if ranking.versus[place].low is not None]
    if not others or ranking.best is None:
        return None
    places = [ranking.best, *others]
    names = short_names([comparison.names[place] for place in places])
    versus = [ranking.versus[place] for place in places]
    low = [one.low or 0.0 for one in versus]
    middle = [one.difference or 0.0 for one in versus]
    high = [one.high or 0.0 for one in versus]
    plot = empty_bars(names, "above the best (nats per supervised token)", 1.0)
    reach = max(high) - min(low)
    if not reach:  # all the same
        return None
    plot.x_range.start = min(0.0, min(low)) - 0.06 * reach
    plot.x_range.end = max(high) + 0.06 * reach
    columns = {
        "name": names,
        "low": low,
        "middle": middle,
        "high": high,
        "is": [one.meaning for one in versus],
        "colour": [styles[place].colour for place in places],
    }
    source = ColumnDataSource(columns)
    plot.add_layout(
        Span(location=0, dimension="height", line_color=TEXT, line_dash="dashed", line_width=1)
    )
    plot.segment("low", "name", "high", "name", color="colour", line_width=3, source=source)
    points = plot.scatter("middle", "name", color="colour", size=10, source=source)
    digits = "{0.0000}"
    tips = (
        ("", "@name"),
        ("above the best", f"@middle{digits}"),
        ("95%", f"@low{digits} to @high{digits}"),
        ("", "@is"),
    )
    add_hover(plot, points, tips)
    return Chart(plot)


def loss_figure(
    courses: Sequence[Course], x_label: str, x_of: Callable[[Course], Any], digits: str, height: int
) -> Chart | None:
    """Draw smoothed training losses against `x_of`; `digits` is its values' numeral.js format."""
    with_loss = [course for course in courses if np.isfinite(course.curves.loss_smooth).any()]
    known = [course for course in with_loss if np.nanmax(x_of(course), initial=0.0) > 0]
    if not known:
        return None

    def drawn(scale: str) -> Any:
        plot = _lines(
            known,
            (x_label, digits),
            ("training loss", "0.0000"),
            x_of,
            lambda course: course.curves.loss_smooth,
            height,
            y_axis_type=scale,
        )
        plot.yaxis.axis_label = "loss (nats/token)"
        return plot

    return Chart(drawn("linear"), log_plot=drawn("log"))


def held_out_figure(courses: Sequence[Course]) -> Chart | None:
    """Draw the losses on held-out blocks during training, for the experiments that validated."""
    known = [course for course in courses if course.held_out]
    if not known:
        return None
    plot = _lines(
        known,
        ("optimizer step", "0,0"),
        ("held-out loss (nats/token)", "0.0000"),
        lambda course: list(course.held_out),
        lambda course: list(course.held_out.values()),
        240,
        has_points=True,
    )
    return Chart(plot)


def _curves(
    courses: Sequence[Course], label: str, y_of: Callable[[Course], Any], digits: str
) -> Chart | None:
    known = [course for course in courses if np.isfinite(y_of(course)).any()]
    if not known:
        return None
    plot = _lines(
        known,
        ("optimizer step", "0,0"),
        (label, digits),
        lambda course: course.curves.step,
        y_of,
        220,
    )
    plot.y_range.start = 0
    return Chart(plot)


def _lines(
    courses: Sequence[Course],
    x: tuple[str, str],
    y: tuple[str, str],
    x_of: Callable[[Course], Any],
    y_of: Callable[[Course], Any],
    height: int,
    has_points: bool = False,
    **options: Any,
) -> Any:
    """Draw a line per course; `x` and `y` are label and numeral.js format (e+ is scientific)."""
    plot = empty_plot(height, x[0], y[0], **options)
    lines = []
    for course in courses:
        values = {
            "x": np.asarray(x_of(course), np.float32),
            "y": np.asarray(y_of(course), np.float32),
        }
        source = ColumnDataSource(values)
        dash = "dashed" if course.style.is_dashed else "solid"
        options_of_line = {"color": course.style.colour, "source": source, "name": course.name}
        lines.append(plot.line("x", "y", line_width=1.8, line_dash=dash, **options_of_line))
        if has_points:
            lines.append(plot.scatter("x", "y", size=5, **options_of_line))
    tips = [("", "$name"), (x[0], f"@x{{{x[1]}}}"), (y[0], f"@y{{{y[1]}}}")]
    plot.add_tools(HoverTool(renderers=lines, tooltips=tips, mode="mouse", visible=False))
    plot.xaxis.ticker.desired_num_ticks = 5
    plot.xaxis.formatter = NumeralTickFormatter(format=x[1])
    if "y_axis_type" not in options:
        plot.yaxis.ticker.desired_num_ticks = 5
        plot.yaxis.formatter = tick_format(y[1], "0000")
    return plot
