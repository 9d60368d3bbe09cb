"""The figures of the report: of the data, of the evaluation, and all of them by their place."""

from collections.abc import Sequence

from bokeh.models import ColumnDataSource, NumeralTickFormatter

from pipeline_lib.publish import units
from pipeline_lib.publish.charts import (
    AMBERS,
    BLUE,
    FONT_SIZE,
    GREEN,
    GREY,
    RED,
    REDS,
    TEXT,
    Chart,
    Part,
    add_hover,
    empty_bars,
    empty_plot,
    short_names,
    stacked_bars,
)
from pipeline_lib.publish.curves import Curves
from pipeline_lib.publish.differences import estimate_of
from pipeline_lib.publish.facts import Facts
from pipeline_lib.publish.forecast import medians
from pipeline_lib.publish.plan_figures import memory_figure, phases_figure, timeline_figure
from pipeline_lib.publish.results import Ledger, Scores, Source
from pipeline_lib.publish.training_figures import training_figures

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
        **training_figures(curves, facts.restart_steps, facts.validations),
        "figure-scores": scores_figure(facts.evaluation.eval),
    }
    return {name: chart for name, chart in drawn.items() if chart is not None}


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


def scores_figure(scores: Scores) -> Chart | None:
    """Held-out loss of every model that was scored, with its interval of 95 % where the error is known."""
    named = {
        "base": scores.base,
        "unigram": scores.unigram,
        "shuffled prompts": scores.shuffled,
        "tuned": scores.tuned,
    }
    losses = {name: score.loss for name, score in named.items() if score.loss is not None}
    if not losses:
        return None
    estimates = {name: estimate_of(named[name]) for name in losses}
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
    tips = (("", "@name"), ("loss", "@loss{0.0000} nats/token"), ("95 %", "@low{0.0000} to @high{0.0000}"))
    add_hover(plot, bars, tips)
    is_known = any(one.standard_error for one in estimates.values() if one)
    return Chart(plot, ((RED, "interval of 95 %"),) if is_known else ())


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
