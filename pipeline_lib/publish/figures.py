"""The figures of the report, and the JSON that the page draws them from without a network."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.core.json_encoder import serialize_json
from bokeh.core.types import ID
from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, NumeralTickFormatter
from bokeh.models.annotations import Span

from pipeline_lib.publish import units
from pipeline_lib.publish.charts import (
    AMBER,
    AMBERS,
    BLUE,
    FONT_SIZE,
    GREEN,
    GREY,
    PALE_BLUE,
    RED,
    REDS,
    TEXT,
    Chart,
    Part,
    add_hover,
    empty_bars,
    empty_plot,
    line_chart,
    short_names,
    stacked_bars,
)
from pipeline_lib.publish.curves import Curves
from pipeline_lib.publish.facts import Facts
from pipeline_lib.publish.forecast import medians
from pipeline_lib.publish.plan_figures import memory_figure, phases_figure, timeline_figure
from pipeline_lib.publish.results import Ledger, Scores, Source

MAX_BARS = 12
# By what became of samples and rows, in the order of the bars.
FATE_COLOURS = {
    "kept": (GREEN, "#86c5a9", "#b9dccb"),
    "dropped": AMBERS,
    "rows dropped": (GREY,),
    "rows quarantined": REDS,
}


def figures_of(facts: Facts, curves: Curves) -> dict[str, Chart]:
    """The figures that there is data for, by the id of their place in the page."""
    drawn = {
        "figure-phases": phases_figure(facts.plan, medians(facts.planned_steps)),
        "figure-timeline": timeline_figure(facts.plan),
        "figure-memory": memory_figure(facts.plan),
        "figure-ledger": ledger_figure(facts.ledger),
        "figure-lengths": lengths_figure(facts.ledger),
        "figure-loss": loss_figure(curves, facts.restart_steps, facts.validations),
        "figure-lr": _curve(curves, curves.lr, "learning rate", GREEN, "0.00e+0"),
        "figure-throughput": _curve(curves, curves.tokens_per_s, "tokens/s, all ranks", AMBER, "0,0"),
        "figure-gradient": _curve(curves, curves.grad_norm, "gradient norm (L2)", GREY, "0.00"),
        "figure-scores": scores_figure(facts.evaluation.eval),
    }
    return {name: chart for name, chart in drawn.items() if chart is not None}


def figures_json(figures: dict[str, Chart]) -> str:
    """One JSON object: the id of a place in the page -> what Bokeh embeds there."""
    return serialize_json({name: json_item(chart.plot, ID(name)) for name, chart in figures.items()})


def ledger_figure(ledger: Ledger) -> Chart | None:
    """What became of the rows of each source, as stacked bars."""
    sources = ledger.sources[:MAX_BARS]
    by_source = [_fates(source) for source in sources]
    fates = list(dict.fromkeys(fate for each in by_source for fate, number in each.items() if number))
    if not fates:
        return None
    ordered = sorted(fates, key=lambda fate: tuple(FATE_COLOURS).index(_kind(fate)))
    parts = [
        Part(fate, colour, [each.get(fate, 0) for each in by_source], "rows" if fate[0] == "r" else "samples")
        for fate, colour in zip(ordered, _fate_colours(ordered), strict=True)
    ]
    names = short_names([source.name for source in sources])
    return stacked_bars(names, parts, "samples; of what made none, rows", "0,0")


def lengths_figure(ledger: Ledger) -> Chart | None:
    """Histogram of the lengths of the kept samples."""
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


def loss_figure(curves: Curves, restart_steps: Sequence[int], validations: Mapping[int, float]) -> Chart | None:
    """Training loss against the step, raw and smoothed, the held-out loss, and a line where an attempt began anew."""
    if not np.isfinite(curves.loss).any():
        return None
    plot = empty_plot(320, "optimizer step", "training loss (nats per supervised token)")
    columns = ("step", "loss", "loss_low", "loss_high", "loss_smooth")
    source = ColumnDataSource({name: getattr(curves, name) for name in columns})
    average = (BLUE, f"moving average, half-life {curves.half_life_steps} steps")
    if curves.steps_per_point == 1:
        legend = [(PALE_BLUE, "each step"), average]
    else:
        plot.varea("step", "loss_low", "loss_high", color=BLUE, fill_alpha=0.12, source=source)
        legend = [(PALE_BLUE, f"mean of {curves.steps_per_point} steps, from lowest to highest"), average]
    plot.line("step", "loss", color=PALE_BLUE, line_width=1, source=source)
    line = plot.line("step", "loss_smooth", color=BLUE, line_width=2, source=source)
    nats = "{0.0000} nats/token"
    tips = (("step", "@step{0,0}"), ("loss", f"@loss{nats}"), ("average", f"@loss_smooth{nats}"))
    add_hover(plot, line, tips, mode="vline")
    if validations:
        held_out = ColumnDataSource({"step": list(validations), "loss": list(validations.values())})
        points = plot.scatter("step", "loss", color=AMBER, size=6, source=held_out)
        add_hover(plot, points, (("step", "@step{0,0}"), ("held-out loss", f"@loss{nats}")))
        legend.append((AMBER, "held-out blocks"))
    for step in restart_steps:
        plot.add_layout(Span(location=step, dimension="height", line_color=RED, line_dash="dashed", line_width=1))
    return Chart(plot, tuple(legend + [(RED, "restart")] * bool(restart_steps)))


def scores_figure(scores: Scores) -> Chart | None:
    """Held-out loss of every model that was scored."""
    losses = {
        "base": scores.base.loss,
        "unigram": scores.unigram.loss,
        "shuffled prompts": scores.shuffled.loss,
        "tuned": scores.tuned.loss,
    }
    known = {name: loss for name, loss in losses.items() if loss is not None}
    if not known:
        return None
    plot = empty_bars(list(known), "held-out loss (nats per supervised token)", 1.2 * max(known.values()))
    columns = {"name": list(known), "loss": list(known.values())}
    colours = [BLUE if name == "tuned" else GREY for name in known]
    labels = [f" {units.real(loss)}" for loss in known.values()]
    source = ColumnDataSource({**columns, "colour": colours, "label": labels})
    bars = plot.hbar(y="name", right="loss", height=0.6, color="colour", line_width=0, source=source)
    plot.text(
        x="loss",
        y="name",
        text="label",
        text_baseline="middle",
        text_font_size=FONT_SIZE,
        text_color=TEXT,
        source=source,
    )
    add_hover(plot, bars, (("", "@name"), ("loss", "@loss{0.0000} nats/token")))
    return Chart(plot)


def _curve(curves: Curves, values: Any, label: str, colour: str, digits: str) -> Chart | None:
    if not np.isfinite(values).any():
        return None
    chart = line_chart({"optimizer step": curves.step}, {label: values}, colour, digits)
    chart.plot.y_range.start = 0
    return chart


def _fates(source: Source) -> dict[str, int]:
    """What became of the samples and rows of `source`: how many met which end."""
    cut, pieces = source.truncated or 0, source.split or 0
    fates = {"kept whole": (source.kept or 0) - cut - pieces, "kept, cut": cut, "kept, pieces of longer ones": pieces}
    fates |= {f"dropped: {reason}": number for reason, number in source.dropped.items()}
    fates |= {"rows dropped: duplicates": source.duplicates_dropped or 0}
    return fates | {f"rows quarantined: {reason}": number for reason, number in source.quarantined.items()}


def _kind(fate: str) -> str:
    """`kept`, `dropped`, `rows dropped` or `rows quarantined`."""
    return fate.partition(":")[0].partition(",")[0].removesuffix(" whole")


def _fate_colours(fates: Sequence[str]) -> list[str]:
    """The colours of FATE_COLOURS in turns, by kind."""
    used = dict.fromkeys(FATE_COLOURS, 0)
    colours = []
    for fate in fates:
        palette = FATE_COLOURS[_kind(fate)]
        colours.append(palette[used[_kind(fate)] % len(palette)])
        used[_kind(fate)] += 1
    return colours
