"""The house style of the report's figures, on Bokeh.

Axes and grids take their colours from the page's style sheet, so that they follow its dark mode; the
colours of the data are chosen to stand on white and on black. Legends are the page's, since they wrap there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from bokeh.models import BoxZoomTool, ColumnDataSource, HoverTool, NumeralTickFormatter, ResetTool, WheelZoomTool
from bokeh.plotting import figure

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
