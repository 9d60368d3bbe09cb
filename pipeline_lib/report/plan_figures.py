"""The plan's figures: memory by strategy, a step's time by cause, and the step's timeline."""

from collections.abc import Mapping, Sequence
from itertools import chain, cycle

from bokeh.models import ColumnDataSource, NumeralTickFormatter
from bokeh.models.annotations import Span

from pipeline_lib.core import units
from pipeline_lib.core.language import N_, _
from pipeline_lib.core.units import GIB, MIB
from pipeline_lib.records.plan import PART_NAMES, Memory, PlanDocument, Segment
from pipeline_lib.report.charts import (
    AMBER,
    AMBERS,
    BLUE,
    GREEN,
    GREY,
    PALE_BLUE,
    RED,
    REDS,
    BarSeries,
    Chart,
    add_hover,
    empty_bars,
    short_names,
    stacked_bars,
)

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
    "recompute": N_("recomputed activations"),
    "exchange": N_("communication not hidden"),
    "offload": N_("copies to host memory"),
    "data": N_("waiting for data"),
    "rest": N_("between the phases"),
}
LANES = ("compute", "exchange", "host")
EXCHANGE_COLOURS = (*REDS, *AMBERS[1:])
# If the GPU's memory is at least this multiple of the longest bar, its line is omitted, since it
# would shrink the bars.
_FAR = 8
_MAX_SEGMENTS = 2000


def memory_figure(plan: PlanDocument | None) -> Chart | None:
    """Draw a rank's predicted memory under each strategy, part by part, against its GPU's."""
    if plan is None:
        return None
    chosen = plan.chosen.strategy
    limit = plan.gpu_memory_bytes
    ordered = sorted(plan.memory, key=lambda name: name != chosen)
    names = short_names(
        [
            _("{strategy}, chosen").format(strategy=name) if name == chosen else name
            for name in ordered
        ]
    )
    by_part = [_parts_of(plan.memory[name], plan.cluster.is_gpu) for name in ordered]
    longest = max(sum(parts.values()) for parts in by_part)
    scale, unit = (GIB, "GiB") if longest >= GIB else (MIB, "MiB")
    bars = []
    for part, colour in MEMORY_COLOURS.items():
        values = [parts.get(part, 0) / scale for parts in by_part]
        if any(values):
            bars.append(BarSeries(_(PART_NAMES.get(part, part)), colour, values, unit))
    if not bars:
        return None
    label = _("memory of one rank ({unit})").format(unit=unit)
    if not limit or limit >= _FAR * longest:
        return stacked_bars(names, bars, label, "0,0.00")
    chart = stacked_bars(names, bars, label, "0,0.00", reach=limit / scale)
    chart.plot.add_layout(
        Span(location=limit / scale, dimension="height", line_color=RED, line_width=2)
    )
    of_gpu = (RED, _("the GPU has {size}").format(size=units.gib(limit)))
    return Chart(chart.plot, (*chart.legend, of_gpu))


def phases_figure(plan: PlanDocument | None, measured: Mapping[str, float | None]) -> Chart | None:
    """Draw the seconds of a step: predicted by cause, predicted by phase, and measured by phase."""
    predicted = plan.prediction if plan else None
    if predicted is None:
        return None
    by_cause = {name: value for name, value in predicted.parts.items() if value > 0}
    phases = {
        "forward": predicted.forward_s.value,
        "backward": predicted.backward_s.value,
        "update": predicted.update_s.value,
    }
    of_phases = {name: measured.get(f"{name}_s") for name in phases}
    by_phase = _with_rest(of_phases, measured.get("step_s"))
    if measured.get("step_s"):
        by_phase["data"] = measured.get("data_wait_s") or 0.0
    bars = {
        _("predicted, by cause"): by_cause,
        _("predicted, by phase"): _with_rest(phases, predicted.step_s.value),
        _("measured, by phase"): by_phase,
    }
    bars = {name: parts for name, parts in bars.items() if sum(parts.values()) > 0}
    if not by_cause or not bars:
        return None
    scale, unit = _time_scale(max(sum(parts.values()) for parts in bars.values()))
    series = []
    for name in dict.fromkeys(chain(STEP_COLOURS, by_cause)):
        values = [parts.get(name, 0.0) / scale for parts in bars.values()]
        if any(values):
            colour = STEP_COLOURS.get(name, GREY)
            series.append(BarSeries(_(STEP_NAMES.get(name, name)), colour, values, unit))
    return stacked_bars(
        list(bars), series, _("time of one optimizer step ({unit})").format(unit=unit), "0,0.0[00]"
    )


def timeline_figure(plan: PlanDocument | None) -> Chart | None:
    """Draw a predicted step's timeline, with lanes for compute, communication and the host."""
    predicted = plan.prediction if plan else None
    if predicted is None:
        return None
    segments = predicted.segments[:_MAX_SEGMENTS]
    lanes = [lane for lane in LANES if any(one.lane == lane for one in segments)]
    if not lanes:
        return None
    end_s = max(one.start_s + one.duration_s for one in segments)
    scale, unit = _time_scale(end_s)
    plot = empty_bars(
        [PART_NAMES.get(lane, lane) for lane in lanes],
        _("time since the step began ({unit})").format(unit=unit),
        1.02 * end_s / scale,
    )
    plot.xaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    colours = _colours_of(segments)
    for name, colour in colours.items():
        mine = [one for one in segments if one.name == name and one.lane in lanes]
        starts = [one.start_s / scale for one in mine]
        lengths = [one.duration_s / scale for one in mine]
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
        length = f"@length{{0,0.0[00]}} {unit}"
        time = f"@left{{0,0.0[00]}} to @right{{0,0.0[00]}} {unit}"
        add_hover(plot, bars, (("", "@lane"), ("", "@name"), ("", length), ("", time)))
    return Chart(plot, tuple((colour, name) for name, colour in colours.items()))


def _parts_of(memory: Memory, is_gpu: bool) -> dict[str, int]:
    """Return bytes by part; the reserve belongs to CUDA and NCCL."""
    names = [name for name in MEMORY_COLOURS if is_gpu or name != "reserve"]
    return {name: getattr(memory, f"{name}_bytes") for name in names}


def _with_rest(phases: Mapping[str, float | None], step_s: float | None) -> dict[str, float]:
    """Return the seconds of the phases and the step's rest; nothing if either is unknown."""
    known = {name: value for name, value in phases.items() if value is not None}
    if not known or step_s is None:
        return {}
    return {**known, "rest": max(0.0, step_s - sum(known.values()))}


def _colours_of(segments: Sequence[Segment]) -> dict[str, str]:
    """Return the colour of each segment name: phases as in phases_figure, exchanges in rotation."""
    in_turns = cycle(EXCHANGE_COLOURS)
    colours: dict[str, str] = {}
    for one in segments:
        if one.name not in colours:
            colours[one.name] = STEP_COLOURS.get(one.name) or next(in_turns)
    return colours


def _time_scale(longest_s: float) -> tuple[float, str]:
    return (1.0, "s") if longest_s >= 1 else (1e-3, "ms")
