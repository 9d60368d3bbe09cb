"""The visual style of figures, and the rendering of a page as one self-contained HTML file.

Pages need no network and escape everything they show.
"""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from bokeh.core.json_encoder import serialize_json
from bokeh.document import Document
from bokeh.models import (
    BasicTickFormatter,
    BoxZoomTool,
    ColumnDataSource,
    HoverTool,
    NumeralTickFormatter,
    ResetTool,
    WheelZoomTool,
)
from bokeh.plotting import figure
from bokeh.resources import Resources
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline_lib.core import units
from pipeline_lib.core.language import _
from pipeline_lib.report.plan_check import beyond

# Visual style of the figures, drawn with Bokeh. Axes and grids take their colours from the page's
# style sheet, so that they follow its dark mode; data colours are legible on white and on black.
# The page draws the legends, because there they wrap.

BLUE, GREEN, AMBER, RED, PURPLE, TEAL = (
    "#3d7fc4",
    "#3f9a73",
    "#d08a2e",
    "#c65a46",
    "#8a6fc0",
    "#2f95a3",
)
GREY, TEXT = "#8c959f", "#7d8590"
PALE_BLUE = "#9dbfe3"
FAINT_BLUE = f"{BLUE}99"  # translucent, so that BLUE stands out on white and on black
AMBERS = (AMBER, "#e3b06e", "#a86d1c", "#efcd9f")
REDS = (RED, "#df9484", "#9c3d2c", "#edbbb1")
FONT_SIZE = "12px"
MAX_NAME_CHARS = 24
HoverMode = Literal["mouse", "vline"]


@dataclass(frozen=True)
class Chart:
    """A Bokeh figure, its legend as (colour, name) pairs, and an optional logarithmic version."""

    plot: Any
    legend: tuple[tuple[str, str], ...] = ()
    log_plot: Any = None


@dataclass(frozen=True)
class BarSeries:
    """One series of stacked bars: its colour, its value in each bar, and the unit of the values."""

    name: str
    colour: str
    values: Sequence[float]
    unit: str


def empty_plot(height: int, x_label: str, y_label: str, zooms: bool = True, **options: Any) -> Any:
    """Return an empty figure with axes, stretched to the width of the page.

    With `zooms`, the figure zooms by dragging a box, and by the wheel with ctrl; without ctrl, the
    wheel scrolls the page.
    """
    box = BoxZoomTool()
    wheel = WheelZoomTool(modifiers="ctrl", visible=False)
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        tools=[box, wheel, ResetTool()] if zooms else [],
        active_drag=box if zooms else None,
        active_scroll=wheel if zooms else None,
        toolbar_location="right" if zooms else None,
        background_fill_alpha=0,
        border_fill_alpha=0,
        outline_line_alpha=0,
        x_axis_label=x_label,
        y_axis_label=y_label,
        min_border_right=20,
        **options,
    )
    plot.toolbar.logo = None
    plot.toolbar.autohide = True
    for axis in plot.axis:
        axis.axis_label_text_font_style = "normal"
        axis.axis_label_text_font_size = axis.major_label_text_font_size = FONT_SIZE
        axis.axis_line_alpha = axis.major_tick_line_alpha = axis.minor_tick_line_alpha = 0
    return plot


def empty_bars(names: Sequence[str], x_label: str, x_end: float) -> Any:
    """Return an empty figure for horizontal bars from 0 to `x_end`, with the first name on top."""
    ranges = {"y_range": list(reversed(names)), "x_range": (0, x_end or 1)}
    plot = empty_plot(72 + 34 * len(names), x_label, "", zooms=False, **ranges)
    plot.ygrid.grid_line_alpha = 0
    plot.xaxis.ticker.desired_num_ticks = 5
    return plot


def stacked_bars(
    names: Sequence[str], parts: Sequence[BarSeries], x_label: str, digits: str, reach: float = 0.0
) -> Chart:
    """Return one bar for each of `names`, stacked from `parts`.

    `digits` is the numeral.js format of the values in tooltips. The axis extends at least to
    `reach`.
    """
    totals = np.sum([part.values for part in parts], axis=0)
    plot = empty_bars(names, x_label, 1.02 * max(float(totals.max()), reach))
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    left = np.zeros(len(names))
    for part in parts:
        right = left + np.asarray(part.values, dtype=np.float64)
        columns = {"bar": list(names), "left": left, "right": right, "value": list(part.values)}
        source = ColumnDataSource({**columns, "part": [part.name] * len(names)})
        bars = plot.hbar(
            y="bar",
            left="left",
            right="right",
            height=0.6,
            color=part.colour,
            line_width=0,
            source=source,
        )
        add_hover(
            plot, bars, (("", "@bar"), ("", "@part"), ("", f"@value{{{digits}}} {part.unit}"))
        )
        left = right
    return Chart(plot, tuple((part.colour, part.name) for part in parts))


def add_hover(
    plot: Any, renderer: Any, tips: Sequence[tuple[str, str]], mode: HoverMode = "mouse"
) -> None:
    """Show `tips` when the pointer is over `renderer`, without adding a toolbar button."""
    plot.add_tools(HoverTool(renderers=[renderer], tooltips=list(tips), mode=mode, visible=False))


def tick_format(digits: str, zeros: str) -> Any:
    """Return an axis format for values in the numeral.js format `digits`, where e is scientific.

    `zeros` after the point are left out.
    """
    if "e" in digits:
        return BasicTickFormatter(use_scientific=True, power_limit_low=0, precision=1)
    return NumeralTickFormatter(format=digits.replace(f".{zeros}", ".[00]"))


def short_names(names: Sequence[str]) -> list[str]:
    """Return names shortened to fit an axis, numbered where two would be the same."""
    short = []
    for name in names:
        is_short = len(name) <= MAX_NAME_CHARS
        short.append(name if is_short else f"...{name[3 - MAX_NAME_CHARS :]}")
    numbered = []
    for index, name in enumerate(short, start=1):
        numbered.append(f"{index}: {name}" if short.count(name) > 1 else name)
    return numbered


# Rendering of pages: one HTML file that needs no network. Model output, user data and file names
# are untrusted: Jinja escapes all of them, the figures' data is JSON that cannot close its element,
# and the page's content security policy runs only the two scripts whose hashes it lists and lets
# the browser fetch nothing.

MAX_CHARS = 3000
_OWN_TEMPLATES = "pipeline_lib.report"


def render_page(
    package: str, template: str, figures: Mapping[str, Chart], values: Mapping[str, Any]
) -> str:
    """Render `template` of `package`, which extends frame.html.jinja, with `values`.

    `figures` maps element ids to charts; the macro `figure` of parts.html.jinja creates these
    elements.
    """
    run = scripts()
    return (
        environment(package)
        .get_template(template)
        .render(
            **values,
            figures=figures,
            figures_json=json_markup(figures_json(figures)),
            scripts=[Markup(script) for script in run],  # noqa: S704  Bokeh's and our own, no user's text in them
            script_hashes=[csp_hash(script) for script in run],
        )
    )


def environment(package: str = _OWN_TEMPLATES) -> Environment:
    """Return a Jinja environment over `package` and the shared templates, with unit filters."""
    made = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader(_OWN_TEMPLATES)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: tuple[Callable[..., str], ...] = (
        *(units.count, units.compact, units.rounded, units.real, units.small),
        *(units.size, units.seconds, units.percent, clip),
        *(units.brief, units.gib, units.signed, units.amount, units.rate, beyond),
    )
    made.globals["_"] = lambda message: Markup(_(message))  # noqa: S704  no user's text in it
    made.filters.update({show.__name__: show for show in filters})
    return made


def scripts() -> list[str]:
    """Return the page's two scripts: Bokeh, and the code that embeds the figures."""
    bokeh = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
    return [bokeh, environment().get_template("embed.js.jinja").render()]


def figures_json(figures: Mapping[str, Chart]) -> str:
    """Return JSON: a Bokeh document of all plots, which may share data, and each plot's place."""
    document = Document()
    places = {}
    with document.models.freeze():  # else each plot makes it walk through all of them again
        for name, chart in figures.items():
            for place, plot in ((name, chart.plot), (f"{name}-log", chart.log_plot)):
                if plot is not None:
                    document.add_root(plot)
                    places[plot.id] = place
    return serialize_json({"document": document.to_json(deferred=False), "places": places})


def clip(text: str, limit: int = MAX_CHARS) -> str:
    """Return `text`, or its first `limit` characters and the number of characters omitted."""
    return (
        text
        if len(text) <= limit
        else f"{text[:limit]} [... {len(text) - limit:,} more characters]"
    )


def json_markup(text: str) -> Markup:
    """Return `text`, which is JSON, escaped so that it cannot end the script element around it."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704  no markup is left in it


def csp_hash(script: str) -> str:
    """Return the source expression that allows an inline script in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
