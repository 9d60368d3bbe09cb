"""The house style of figures, and the one HTML file that every page is."""

import base64
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from bokeh.core.json_encoder import serialize_json
from bokeh.document import Document
from bokeh.models import BoxZoomTool, ColumnDataSource, HoverTool, NumeralTickFormatter, ResetTool, WheelZoomTool
from bokeh.plotting import figure
from bokeh.resources import Resources
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline_lib.core import units
from pipeline_lib.report.facts import beyond, unjudged

# The house style of the report's figures, on Bokeh.
#
# Axes and grids take their colours from the page's style sheet, so that they follow its dark mode; the
# colours of the data are chosen to stand on white and on black. Legends are the page's, since they wrap there.

BLUE, GREEN, AMBER, RED, PURPLE, TEAL = "#3d7fc4", "#3f9a73", "#d08a2e", "#c65a46", "#8a6fc0", "#2f95a3"
GREY, TEXT = "#8c959f", "#7d8590"
PALE_BLUE = "#9dbfe3"
FAINT_BLUE = f"{BLUE}99"  # lets the page through, so that BLUE stands out on white and on black
AMBERS = (AMBER, "#e3b06e", "#a86d1c", "#efcd9f")
REDS = (RED, "#df9484", "#9c3d2c", "#edbbb1")
FONT_SIZE = "12px"
MAX_NAME_CHARS = 24
HoverMode = Literal["mouse", "vline"]


@dataclass(frozen=True)
class Chart:
    """A Bokeh figure, the colours and names that explain it, and the same on a logarithmic scale, where that helps."""

    plot: Any
    legend: tuple[tuple[str, str], ...] = ()
    log_plot: Any = None


@dataclass(frozen=True)
class Part:
    """One colour of stacked bars: its value in each bar, and their unit."""

    name: str
    colour: str
    values: Sequence[float]
    unit: str


def empty_plot(height: int, x_label: str, y_label: str, zooms: bool = True, **options: Any) -> Any:
    """A figure with axes and nothing in it, as wide as the page lets it be.

    One that `zooms` does so by a box that is dragged, and by the wheel with ctrl: without, the wheel scrolls the page.
    """
    box, wheel = BoxZoomTool(), WheelZoomTool(modifiers="ctrl", visible=False)
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
    """A figure for horizontal bars from 0 to at most `x_end`, the first name on top."""
    ranges = {"y_range": list(reversed(names)), "x_range": (0, x_end or 1)}
    plot = empty_plot(72 + 34 * len(names), x_label, "", zooms=False, **ranges)
    plot.ygrid.grid_line_alpha = 0
    plot.xaxis.ticker.desired_num_ticks = 5
    return plot


def stacked_bars(names: Sequence[str], parts: Sequence[Part], x_label: str, digits: str, reach: float = 0.0) -> Chart:
    """One bar for each of `names`, made of `parts`; hovering shows a value with `digits`, as numeral.js.

    The axis reaches at least to `reach`.
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
            y="bar", left="left", right="right", height=0.6, color=part.colour, line_width=0, source=source
        )
        add_hover(plot, bars, (("", "@bar"), ("", "@part"), ("", f"@value{{{digits}}} {part.unit}")))
        left = right
    return Chart(plot, tuple((part.colour, part.name) for part in parts))


def add_hover(plot: Any, renderer: Any, tips: Sequence[tuple[str, str]], mode: HoverMode = "mouse") -> None:
    """Show `tips` over `renderer`, without a button of its own in the toolbar."""
    plot.add_tools(HoverTool(renderers=[renderer], tooltips=list(tips), mode=mode, visible=False))


def short_names(names: Sequence[str]) -> list[str]:
    """Names that fit an axis, numbered where two would be the same."""
    short = [name if len(name) <= MAX_NAME_CHARS else f"...{name[3 - MAX_NAME_CHARS :]}" for name in names]
    return [f"{index}: {name}" if short.count(name) > 1 else name for index, name in enumerate(short, start=1)]


# What every page is made of: one HTML file that needs no network and trusts nothing that it shows.
#
# Model output, user data and file names are hostile: Jinja escapes all of them, the figures' data is JSON that
# cannot close its element, and the page's content security policy runs only the two scripts hashed into it
# and lets the browser fetch nothing.

MAX_CHARS = 3000
_OWN_TEMPLATES = "pipeline_lib.report"


def render_page(package: str, template: str, figures: Mapping[str, Chart], values: Mapping[str, Any]) -> str:
    """The page that `template` of `package` makes of `values`, by extending frame.html.jinja.

    `figures` are by the id of their place in the page, which the macro `figure` of parts.html.jinja makes.
    """
    made = environment(package)
    run = scripts()
    return made.get_template(template).render(
        **values,
        figures=figures,
        figures_json=json_markup(figures_json(figures)),
        scripts=[Markup(script) for script in run],  # noqa: S704  Bokeh's and our own, no user's text in them
        script_hashes=[csp_hash(script) for script in run],
    )


def environment(package: str = _OWN_TEMPLATES) -> Environment:
    """The templates of `package`, then those that all pages share, with the units as filters."""
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
        *(units.brief, units.gib, units.signed, units.amount, units.rate, beyond, unjudged),
    )
    made.filters.update({show.__name__: show for show in filters})
    return made


def scripts() -> list[str]:
    """What a page runs: Bokeh, and what draws the figures with it."""
    bokeh = "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)
    return [bokeh, environment().get_template("embed.js.jinja").render()]


def figures_json(figures: Mapping[str, Chart]) -> str:
    """One Bokeh document of all plots, which may share ranges and data, and which of them goes to which place."""
    document = Document()
    places = {}
    for name, chart in figures.items():
        for place, plot in ((name, chart.plot), (f"{name}-log", chart.log_plot)):
            if plot is not None:
                document.add_root(plot)
                places[plot.id] = place
    return serialize_json({"document": document.to_json(deferred=False), "places": places})


def clip(text: str, limit: int = MAX_CHARS) -> str:
    """`text`, or its beginning and how much is not shown."""
    return text if len(text) <= limit else f"{text[:limit]} [... {len(text) - limit:,} more characters]"


def json_markup(text: str) -> Markup:
    """JSON that cannot end the script element around it."""
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)  # noqa: S704  no markup is left in it


def csp_hash(script: str) -> str:
    """How a content security policy names an inline script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
