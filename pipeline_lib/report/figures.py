"""The figures of the report, in the order of the page."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, CrosshairTool, NumeralTickFormatter, Range1d
from bokeh.models.annotations import Span
from numpy.typing import NDArray

from pipeline_lib.core import units
from pipeline_lib.core.units import GIB, MIB
from pipeline_lib.records.plan import PART_NAMES, Memory, PlanDocument, Segment
from pipeline_lib.records.results import Ledger, Scores, Source, Step
from pipeline_lib.report.charts import (
    AMBER,
    AMBERS,
    BLUE,
    FAINT_BLUE,
    FONT_SIZE,
    GREEN,
    GREY,
    PALE_BLUE,
    PURPLE,
    RED,
    REDS,
    TEAL,
    TEXT,
    BarSeries,
    Chart,
    add_hover,
    empty_bars,
    empty_plot,
    short_names,
    stacked_bars,
    tick_format,
)
from pipeline_lib.report.facts import ReportFacts, medians
from pipeline_lib.report.statistics import estimate_of

# The training curves, reduced to at most a given number of points.

MAX_POINTS = 2000
COLUMNS = ("loss", "lr", "tokens_per_s", "grad_norm", "peak_memory_mb")
GIB_OF_MB = 1e6 / 2**30
Values = NDArray[np.float64]


@dataclass(frozen=True)
class Curves:
    """The training curves; each value is the mean of `steps_per_point` steps, NaN where it is unknown.

    The last point may cover fewer steps. `step` is the last step of each point; `low` and `high` are its smallest and
    largest value, by column. `loss_smooth` is the exponential moving average over all steps with a half-life of
    `half_life_steps`.
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
    """Return the curves of `steps`: exact up to `max_points` steps, averaged over runs of equal length above that."""
    if not steps:
        none: Any = np.empty(0)
        columns = dict.fromkeys(COLUMNS, none)
        return Curves(1, 1, np.empty(0, np.int64), columns, columns, loss_smooth=none, **columns)
    width = max(1, math.ceil(len(steps) / max_points))
    starts = np.arange(0, len(steps), width)
    half_life = max(1, len(steps) // 50)
    raw = {name: np.array([getattr(step, name) for step in steps], dtype=np.float64) for name in COLUMNS}
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
    for step, *values in zip(curves.step, *(getattr(curves, name) for name in COLUMNS), strict=True):
        writer.writerow((step, *("" if math.isnan(value) else f"{value:.7g}" for value in values)))
    return text.getvalue()


def smoothed(values: Values, half_life: float) -> Values:
    """Return the bias-corrected exponential moving average; NaN values leave the average unchanged."""
    keep = 0.5 ** (1 / half_life)
    total = weight = 0.0
    averages = np.full(len(values), np.nan)
    for index, value in enumerate(values):
        if not math.isnan(value):
            total, weight = keep * total + value, keep * weight + 1.0
        if weight:
            averages[index] = total / weight
    return averages


def _means(values: Values, starts: NDArray[np.int64]) -> Values:
    """Return the mean of the values from each of `starts` to the next, ignoring NaN; NaN where all are NaN."""
    known = ~np.isnan(values)
    totals = np.add.reduceat(np.where(known, values, 0.0), starts)
    counts = np.add.reduceat(known.astype(np.int64), starts)
    means: Values = np.divide(totals, counts, out=np.full(len(starts), np.nan), where=counts > 0)
    return means


# The figures of the plan: memory by strategy, the time of a step by cause, and the step's timeline.

MEMORY_COLOURS = {
    "weights": BLUE,
    "gradients": AMBER,
    "optimizer": GREEN,
    "gathered": PALE_BLUE,
    "exchanged": "#e3b06e",
    "activations": GREY,
    "loss": "#b4bbc3",
    "reserve": "#d5d9de",
}
_WORKING = "activations and buffers"
STEP_COLOURS = {
    "forward": BLUE,
    "recompute": PALE_BLUE,
    "backward": GREEN,
    "exchange": RED,
    "offload": "#e3b06e",
    "update": AMBER,
    "data": GREY,
    "rest": "#b4bbc3",
}
STEP_NAMES = {
    "recompute": "recomputed activations",
    "exchange": "communication not hidden",
    "offload": "copies to host memory",
    "data": "waiting for data",
    "rest": "between the phases",
}
LANES = ("compute", "exchange", "host")
EXCHANGE_COLOURS = (*REDS, *AMBERS[1:])
# If the GPU's memory is at least this multiple of the longest bar, its line is omitted, since it would shrink the bars.
_FAR = 8
_MAX_SEGMENTS = 2000


def memory_figure(plan: PlanDocument) -> Chart | None:
    """Draw the predicted memory of a rank under each strategy, part by part, against the memory of its GPU."""
    if not plan.memory:
        return None
    chosen, limit = plan.chosen.strategy, plan.machine.gpu_memory_bytes if plan.cluster.is_gpu else None
    ordered = sorted(plan.memory, key=lambda name: name != chosen)
    names = short_names([f"{name}, chosen" if name == chosen else name for name in ordered])
    by_part = [_parts_of(plan.memory[name], plan.cluster.is_gpu) for name in ordered]
    used = [part for part in (*MEMORY_COLOURS, _WORKING) if any(parts.get(part) for parts in by_part)]
    longest = max(sum(parts.values()) for parts in by_part)
    scale, unit = (GIB, "GiB") if longest >= GIB else (MIB, "MiB")
    bars = [
        BarSeries(
            PART_NAMES.get(part, part),
            MEMORY_COLOURS.get(part, GREY),
            [parts.get(part, 0) / scale for parts in by_part],
            unit,
        )
        for part in used
    ]
    if not bars:
        return None
    drawn = limit is not None and limit < _FAR * longest
    label = f"memory of one rank ({unit})"
    chart = stacked_bars(names, bars, label, "0,0.00", reach=limit / scale if limit and drawn else 0.0)
    if not limit or not drawn:
        return chart
    chart.plot.add_layout(Span(location=limit / scale, dimension="height", line_color=RED, line_width=2))
    return Chart(chart.plot, (*chart.legend, (RED, f"the GPU has {units.gib(limit)}")))


def phases_figure(plan: PlanDocument, measured: Mapping[str, float | None]) -> Chart | None:
    """Draw the seconds of a step: predicted by cause, predicted by phase, and measured by phase."""
    predicted = plan.prediction
    by_cause = {name: value for name, value in predicted.parts.items() if value and value > 0}
    phases = {name: getattr(predicted, f"{name}_s").value for name in ("forward", "backward", "update")}
    bars = {
        "predicted, by cause": by_cause,
        "predicted, by phase": _with_rest(phases, predicted.step_s.value),
        "measured, by phase": _with_rest({name: measured.get(f"{name}_s") for name in phases}, measured.get("step_s"))
        | ({"data": measured.get("data_wait_s") or 0.0} if measured.get("step_s") else {}),
    }
    bars = {name: parts for name, parts in bars.items() if sum(parts.values()) > 0}
    if not by_cause or not bars:
        return None
    scale, unit = _time_scale(max(sum(parts.values()) for parts in bars.values()))
    known = (*STEP_COLOURS, *(name for name in by_cause if name not in STEP_COLOURS))
    parts = [
        BarSeries(
            STEP_NAMES.get(name, name),
            STEP_COLOURS.get(name, GREY),
            [bar.get(name, 0.0) / scale for bar in bars.values()],
            unit,
        )
        for name in known
        if any(bar.get(name) for bar in bars.values())
    ]
    return stacked_bars(list(bars), parts, f"time of one optimizer step ({unit})", "0,0.0[00]")


def timeline_figure(plan: PlanDocument) -> Chart | None:
    """Draw the timeline of one predicted step, with a lane each for compute, communication and the host."""
    segments = [one for one in plan.prediction.segments[:_MAX_SEGMENTS] if one.duration_s and one.start_s is not None]
    lanes = [lane for lane in LANES if any(one.lane == lane for one in segments)]
    if not lanes:
        return None
    end_s = max((one.start_s or 0.0) + (one.duration_s or 0.0) for one in segments)
    scale, unit = _time_scale(end_s)
    plot = empty_bars(
        [PART_NAMES.get(lane, lane) for lane in lanes], f"time since the step began ({unit})", 1.02 * end_s / scale
    )
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    colours = _colours_of(segments)
    for name, colour in colours.items():
        mine = [one for one in segments if one.name == name and one.lane in lanes]
        starts, lengths = ([getattr(one, field) / scale for one in mine] for field in ("start_s", "duration_s"))
        columns = {
            "lane": [PART_NAMES.get(one.lane, one.lane) for one in mine],
            "name": [name] * len(mine),
            "left": starts,
            "right": [start + length for start, length in zip(starts, lengths, strict=True)],
            "length": lengths,
        }
        bars = plot.hbar(
            y="lane",
            left="left",
            right="right",
            height=0.6,
            color=colour,
            line_width=0,
            source=ColumnDataSource(columns),
        )
        time = f"@left{{0,0.0[00]}} to @right{{0,0.0[00]}} {unit}"
        add_hover(plot, bars, (("", "@lane"), ("", "@name"), ("", f"@length{{0,0.0[00]}} {unit}"), ("", time)))
    return Chart(plot, tuple((colour, name) for name, colour in colours.items()))


def _parts_of(memory: Memory, is_gpu: bool) -> dict[str, int]:
    """Return bytes by part; plans without the finer parts have their working memory as one part."""
    parts = {name: getattr(memory, f"{name}_bytes") for name in MEMORY_COLOURS}
    if not is_gpu:
        parts["reserve"] = None  # belongs to CUDA and NCCL
    known = {name: size for name, size in parts.items() if size}
    working = (memory.allocated_bytes or 0) - sum(size for name, size in known.items() if name != "reserve")
    return known | ({_WORKING: working} if working > 0 else {})


def _with_rest(phases: Mapping[str, float | None], step_s: float | None) -> dict[str, float]:
    """Return the seconds of the phases and the rest of the step; nothing if the phases or the step are unknown."""
    known = {name: value for name, value in phases.items() if value is not None}
    if not known or step_s is None:
        return {}
    return {**known, "rest": max(0.0, step_s - sum(known.values()))}


def _colours_of(segments: Sequence[Segment]) -> dict[str, str]:
    """Return the colour of each segment name: phases as in phases_figure, exchanges in rotation."""
    names = list(dict.fromkeys(one.name for one in segments))
    others = [name for name in names if name not in STEP_COLOURS]
    in_turns = {name: EXCHANGE_COLOURS[turn % len(EXCHANGE_COLOURS)] for turn, name in enumerate(others)}
    return {name: STEP_COLOURS.get(name) or in_turns[name] for name in names}


def _time_scale(longest_s: float) -> tuple[float, str]:
    return (1.0, "s") if longest_s >= 1 else (1e-3, "ms")


# The training figures: one curve each over the optimizer steps, with a shared zoom and pointer.

_BAND_ALPHA = 0.18
_NATS = "{0.0000} nats/token"


@dataclass(frozen=True)
class _StepAxis:
    """What the figures over the steps share: the range of steps, and the vertical line at the pointer."""

    steps: Range1d
    pointer: Span

    def plot(self, height: int, label: str, is_log: bool) -> Any:
        """Return an empty figure."""
        scale = "log" if is_log else "linear"
        plot = empty_plot(height, "optimizer step", label, x_range=self.steps, y_axis_type=scale)
        plot.add_tools(CrosshairTool(overlay=self.pointer, visible=False))
        plot.xaxis.formatter = NumeralTickFormatter(format="0,0")
        plot.xaxis.ticker.desired_num_ticks = plot.yaxis.ticker.desired_num_ticks = 5
        return plot


def training_figures(curves: Curves, restarts: Sequence[int], validations: Mapping[int, float]) -> dict[str, Chart]:
    """Return the training figures that have data, by element id; `restarts` are the first steps of later attempts."""
    if not len(curves.step):
        return {}
    first, last = int(curves.step[0]), int(curves.step[-1])
    margin = max(1.0, 0.01 * (last - first))
    limits = (first - margin, last + margin)
    axis = _StepAxis(
        Range1d(start=limits[0], end=limits[1], bounds=limits),
        Span(dimension="height", line_color=GREY, line_width=1, line_dash="dotted"),
    )
    drawn = {
        "figure-loss": _loss(curves, restarts, validations, axis),
        "figure-lr": _curve(curves, "lr", "learning rate", GREEN, "0.00e+0", axis),
        "figure-throughput": _curve(curves, "tokens_per_s", "tokens/s, all ranks", AMBER, "0,0", axis),
        "figure-gradient": _curve(curves, "grad_norm", "gradient norm (L2)", PURPLE, "0.00", axis),
        "figure-peak": _curve(curves, "peak_memory_mb", "peak memory (GiB)", TEAL, "0,0.0[0]", axis, GIB_OF_MB),
    }
    if (gradient := drawn["figure-gradient"]) is not None:
        log = _curve(curves, "grad_norm", "gradient norm (L2)", PURPLE, "0.00", axis, is_log=True)
        drawn["figure-gradient"] = Chart(gradient.plot, log_plot=log.plot if log else None)
    return {name: chart for name, chart in drawn.items() if chart is not None}


def _loss(curves: Curves, restarts: Sequence[int], validations: Mapping[int, float], axis: _StepAxis) -> Chart | None:
    """Draw raw, smoothed and held-out loss, with a line at each restart, on a linear and a logarithmic scale."""
    if not np.isfinite(curves.loss).any():
        return None
    each = "each step"
    if curves.steps_per_point > 1:
        each = f"mean of {curves.steps_per_point} steps, from lowest to highest"
    legend = [(FAINT_BLUE, each), (BLUE, f"moving average, half-life {curves.half_life_steps} steps")]
    legend += [(AMBER, "held-out blocks")] * bool(validations) + [(RED, "restart")] * bool(restarts)
    columns = {"step": curves.step, "loss": curves.loss, "smooth": curves.loss_smooth}
    source = ColumnDataSource({**columns, "low": curves.low["loss"], "high": curves.high["loss"]})
    held_out = ColumnDataSource({"step": list(validations), "loss": list(validations.values())})
    plots = []
    for is_log in (False, True):
        plot = axis.plot(320, "training loss (nats per supervised token)", is_log)
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[00]")
        if curves.steps_per_point > 1:
            plot.varea("step", "low", "high", color=BLUE, fill_alpha=_BAND_ALPHA, source=source)
        plot.line("step", "loss", color=FAINT_BLUE, line_width=1, source=source)
        line = plot.line("step", "smooth", color=BLUE, line_width=2, source=source)
        tips = (("step", "@step{0,0}"), ("loss", f"@loss{_NATS}"), ("average", f"@smooth{_NATS}"))
        add_hover(plot, line, tips, mode="vline")
        if validations:
            points = plot.scatter("step", "loss", color=AMBER, size=6, source=held_out)
            add_hover(plot, points, (("step", "@step{0,0}"), ("held-out loss", f"@loss{_NATS}")))
        for step in restarts:
            plot.add_layout(Span(location=step, dimension="height", line_color=RED, line_dash="dashed", line_width=1))
        plots.append(plot)
    return Chart(plots[0], tuple(legend), log_plot=plots[1])


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


# The figures of data and evaluation, and the list of all figures by element id.

MAX_BARS = 12
# Colours by what happened to samples and rows, in the order of the bars.
FATE_COLOURS = {
    "kept": (GREEN, "#86c5a9", "#b9dccb"),
    "dropped": AMBERS,
    "rows dropped": (GREY,),
    "rows quarantined": REDS,
}


def figures_of(facts: ReportFacts, curves: Curves) -> dict[str, Chart]:
    """Return the figures that have data, by the id of their place in the page."""
    drawn = {
        "figure-phases": phases_figure(facts.plan, medians(facts.planned_steps)),
        "figure-timeline": timeline_figure(facts.plan),
        "figure-memory": memory_figure(facts.plan),
        "figure-ledger": ledger_figure(facts.ledger),
        "figure-lengths": lengths_figure(facts.ledger),
        **training_figures(curves, facts.restart_steps, facts.validations),
        "figure-scores": scores_figure(facts.evaluation.eval),
    }
    return {name: chart for name, chart in drawn.items() if chart is not None}


def ledger_figure(ledger: Ledger) -> Chart | None:
    """Draw what happened to the rows of each source, as stacked bars."""
    sources = ledger.sources[:MAX_BARS]
    by_source = [_fates(source) for source in sources]
    parts = []
    for kind, palette in FATE_COLOURS.items():
        fates = dict.fromkeys(
            fate for each in by_source for (of, fate), number in each.items() if number and of == kind
        )
        for turn, fate in enumerate(fates):
            numbers = [each.get((kind, fate), 0) for each in by_source]
            parts.append(
                BarSeries(fate, palette[turn % len(palette)], numbers, "rows" if fate[0] == "r" else "samples")
            )
    if not parts:
        return None
    return stacked_bars(
        short_names([source.name for source in sources]), parts, "samples, or rows that gave no sample", "0,0"
    )


def lengths_figure(ledger: Ledger) -> Chart | None:
    """Draw a histogram of the lengths of the kept samples."""
    edges, counts = ledger.length_histogram.edges, ledger.length_histogram.counts
    if not counts or len(edges) != len(counts) + 1:
        return None
    plot = empty_plot(240, "length of a sample (tokens)", "kept samples", y_range=(0, 1.05 * max(1, *counts)))
    source = ColumnDataSource({"left": edges[:-1], "right": edges[1:], "count": counts})
    bars = plot.quad(left="left", right="right", bottom=0, top="count", color=BLUE, line_width=0, source=source)
    add_hover(plot, bars, (("tokens", "@left{0,0} to @right{0,0}"), ("samples", "@count{0,0}")))
    plot.xaxis.formatter = plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.xgrid.grid_line_alpha = 0
    return Chart(plot)


def scores_figure(scores: Scores) -> Chart | None:
    """Draw the held-out loss of every scored model, with its 95 % interval where the standard error is known."""
    known = {"base": scores.base, "unigram": scores.unigram, "shuffled prompts": scores.shuffled, "tuned": scores.tuned}
    losses = {name: score.loss for name, score in known.items() if score.loss is not None}
    if not losses:
        return None
    estimates = {name: estimate_of(known[name]) for name in losses}
    plot = empty_bars(list(losses), "held-out loss (nats per supervised token)", 1.2 * max(losses.values()))
    source = ColumnDataSource(
        {
            "name": list(losses),
            "loss": list(losses.values()),
            "low": [one.low if one else losses[name] for name, one in estimates.items()],
            "high": [one.high if one else losses[name] for name, one in estimates.items()],
            "colour": [BLUE if name == "tuned" else GREY for name in losses],
            "label": [f"  {units.real(loss)}" for loss in losses.values()],
        }
    )
    bars = plot.hbar(y="name", right="loss", height=0.6, color="colour", line_width=0, source=source)
    plot.segment("low", "name", "high", "name", color=RED, line_width=3, source=source)
    label = {"text": "label", "text_baseline": "middle", "text_font_size": FONT_SIZE, "text_color": TEXT}
    plot.text(x="high", y="name", source=source, **label)
    tips = (("", "@name"), ("loss", "@loss{0.0000} nats/token"), ("95%", "@low{0.0000} to @high{0.0000}"))
    add_hover(plot, bars, tips)
    is_known = any(one.standard_error for one in estimates.values() if one)
    return Chart(plot, ((RED, "interval of 95%"),) if is_known else ())


def _fates(source: Source) -> dict[tuple[str, str], int]:
    """Return the number of samples or rows of `source` by what happened to them: the kind in FATE_COLOURS, the name."""
    cut, pieces = source.truncated or 0, source.split or 0
    fates = {
        ("kept", "kept whole"): (source.kept or 0) - cut - pieces,
        ("kept", "kept, cut"): cut,
        ("kept", "kept, pieces of longer ones"): pieces,
        ("rows dropped", "rows dropped: duplicates"): source.duplicates_dropped or 0,
    }
    fates |= {("dropped", f"dropped: {reason}"): number for reason, number in source.dropped.items()}
    quarantined = {f"rows quarantined: {reason}": number for reason, number in source.quarantined.items()}
    return fates | {("rows quarantined", name): number for name, number in quarantined.items()}
