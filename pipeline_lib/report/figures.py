"""The figures of data and evaluation, and the list of all figures by element id."""

from itertools import cycle

from bokeh.models import ColumnDataSource, NumeralTickFormatter

from pipeline_lib.core import units
from pipeline_lib.core.language import _
from pipeline_lib.records.data import Ledger, Source
from pipeline_lib.records.evaluation import Scores
from pipeline_lib.report.charts import (
    AMBERS,
    BLUE,
    FONT_SIZE,
    GREEN,
    GREY,
    RED,
    REDS,
    TEXT,
    BarSeries,
    Chart,
    add_hover,
    empty_bars,
    empty_plot,
    short_names,
    stacked_bars,
)
from pipeline_lib.report.curves import Curves
from pipeline_lib.report.facts import ReportFacts
from pipeline_lib.report.plan_check import medians
from pipeline_lib.report.plan_figures import memory_figure, phases_figure, timeline_figure
from pipeline_lib.report.statistics import estimate_of
from pipeline_lib.report.training_figures import training_figures

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
        **training_figures(curves, facts.restart_steps, facts.validations, facts.epoch_starts),
        "figure-scores": scores_figure(facts.scores),
    }
    return {name: chart for name, chart in drawn.items() if chart is not None}


def ledger_figure(ledger: Ledger) -> Chart | None:
    """Draw what happened to the rows of each source, as stacked bars; None if all were kept whole."""
    sources = ledger.sources[:MAX_BARS]
    by_source = [_fates(source) for source in sources]
    parts = []
    for kind, palette in FATE_COLOURS.items():
        fates: dict[str, None] = {}
        for each in by_source:
            fates |= {fate: None for (of, fate), number in each.items() if number and of == kind}
        for fate, colour in zip(fates, cycle(palette), strict=False):
            numbers = [each.get((kind, fate), 0) for each in by_source]
            unit = _("rows") if kind.startswith("rows") else _("samples")
            parts.append(BarSeries(fate, colour, numbers, unit))
    if not parts or (len(parts) == 1 and len(sources) == 1):
        return None
    return stacked_bars(
        short_names([source.name for source in sources]),
        parts,
        _("samples, or rows that gave no sample"),
        "0,0",
    )


def lengths_figure(ledger: Ledger) -> Chart | None:
    """Draw a histogram of the lengths of the kept samples."""
    edges = ledger.length_histogram.edges
    counts = ledger.length_histogram.counts
    plot = empty_plot(
        240,
        _("length of a sample (tokens)"),
        _("kept samples"),
        y_range=(0, 1.05 * max(1, *counts)),
    )
    source = ColumnDataSource({"left": edges[:-1], "right": edges[1:], "count": counts})
    bars = plot.quad(
        left="left", right="right", bottom=0, top="count", color=BLUE, line_width=0, source=source
    )
    add_hover(
        plot, bars, ((_("tokens"), "@left{0,0} - @right{0,0}"), (_("samples"), "@count{0,0}"))
    )
    plot.xaxis.formatter = plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
    plot.xgrid.grid_line_alpha = 0
    return Chart(plot)


def scores_figure(scores: Scores | None) -> Chart | None:
    """Draw the held-out loss of every scored model, with its 95 % interval if it is known."""
    if scores is None:
        return None
    losses = {_("base"): scores.base.loss, _("unigram"): scores.unigram.loss}
    estimates = {_("base"): estimate_of(scores.base), _("unigram"): None}
    if scores.shuffled is not None:
        losses[_("shuffled prompts")] = scores.shuffled.loss
        estimates[_("shuffled prompts")] = estimate_of(scores.shuffled)
    losses[_("tuned")] = scores.tuned.loss
    estimates[_("tuned")] = estimate_of(scores.tuned)
    plot = empty_bars(
        list(losses), _("held-out loss (nats per supervised token)"), 1.2 * max(losses.values())
    )
    source = ColumnDataSource(
        {
            "name": list(losses),
            "loss": list(losses.values()),
            "low": [one.low if one else losses[name] for name, one in estimates.items()],
            "high": [one.high if one else losses[name] for name, one in estimates.items()],
            "colour": [BLUE if name == _("tuned") else GREY for name in losses],
            "label": [f"  {units.real(loss)}" for loss in losses.values()],
        }
    )
    bars = plot.hbar(
        y="name", right="loss", height=0.6, color="colour", line_width=0, source=source
    )
    plot.segment("low", "name", "high", "name", color=RED, line_width=3, source=source)
    label = {
        "text": "label",
        "text_baseline": "middle",
        "text_font_size": FONT_SIZE,
        "text_color": TEXT,
    }
    plot.text(x="high", y="name", source=source, **label)
    tips = (
        ("", "@name"),
        (_("loss"), "@loss{0.0000} nats/token"),
        ("95%", "@low{0.0000} - @high{0.0000}"),
    )
    add_hover(plot, bars, tips)
    if any(one.standard_error for one in estimates.values() if one):
        return Chart(plot, ((RED, _("interval of 95%")),))
    return Chart(plot)


def _fates(source: Source) -> dict[tuple[str, str], int]:
    """Return how many samples or rows of `source` met each fate: kind in FATE_COLOURS, name."""
    cut = source.truncated
    pieces = source.split
    fates = {
        ("kept", _("kept whole")): source.kept - cut - pieces,
        ("kept", _("kept, cut")): cut,
        ("kept", _("kept, pieces of longer ones")): pieces,
        (
            "rows dropped",
            _("rows dropped: {reason}").format(reason=_("duplicates")),
        ): source.duplicates_dropped,
    }
    for reason, number in source.dropped.items():
        fates["dropped", _("dropped: {reason}").format(reason=reason)] = number
    for reason, number in source.quarantined.items():
        fates["rows quarantined", _("rows quarantined: {reason}").format(reason=reason)] = number
    return fates
