"""Rendering of the statuses: a table of usually at most WIDTH columns, lines below it, or JSON."""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pipeline_lib.core.language import N_, _
from pipeline_lib.core.units import brief, count, gib
from pipeline_lib.status.at_rest import (
    DONE,
    FAILED,
    INTERRUPTED,
    REQUEUED,
    RUNNING,
    UNREADABLE,
    WAITING,
)
from pipeline_lib.status.survey import Status
from pipeline_lib.train.metrics import clock

WIDTH = 100
UNKNOWN = "-"
STYLES = {
    RUNNING: "green",
    WAITING: "yellow",
    REQUEUED: "yellow",
    DONE: "dim",
    FAILED: "bold red",
    INTERRUPTED: "red",
    UNREADABLE: "red",
}
_LEFT = ("stage", "state")  # columns that are always shown
# what a narrow terminal does without, first to last
_LEFT_OUT = (
    "GPU",
    "memory",
    "attempt",
    "elapsed",
    "age",
    "gap",
    "tokens/s",
    "job",
    "loss",
    "saved",
)
# of experiments with the same stage, in a line below the table; others are counted
_NAMES_SHOWN = 5
_NAME_CHARS = 16  # of an experiment's name that always fit; a longer name wraps


def render(found: Sequence[Status], where: str, width: int = WIDTH) -> Group:
    """Return the table and the lines below it; `where` is the folder that was looked at."""
    if not found:
        text = _("{folder}: no experiments yet; snakemake adds them when it starts")
        return Group(Text(text.format(folder=where)))
    parts: list[Table | Text | Padding] = [_table(found, width)]
    if notes := list(_notes(found)):
        parts += [Text(""), *notes]
    return Group(*parts)


def to_json(found: Sequence[Status]) -> str:
    """Return a JSON list of flat objects, whose keys are stable."""
    return json.dumps([status.to_json() for status in found], indent=2, ensure_ascii=False)


def plain_table(
    first: str, columns: Iterable[str], left: Collection[str] = (), gap: int = 2
) -> Table:
    """Return a table without lines: the `first` column wraps, only those in `left` align left."""
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, no_wrap=True, justify="left" if name in left else "right")
    return table


def _table(found: Sequence[Status], width: int) -> Table:
    """Return a table with a row per experiment, without empty columns and those that do not fit."""
    rows = [_cells(status) for status in found]
    columns = {}
    for name in rows[0]:
        cells = [row[name] for row in rows]
        if name in _LEFT or set(cells) != {UNKNOWN}:
            columns[name] = cells
    short_saved = columns.pop("saved, short", [])
    gap = 2
    names = [status.experiment for status in found]
    width -= min(_NAME_CHARS, _chars(_("experiment"), names))
    for left_out in _LEFT_OUT:
        if sum(_chars(_(name), cells) + gap for name, cells in columns.items()) <= width:
            break
        if left_out == "age" and "saved" in columns:
            columns["saved"] = short_saved
        elif left_out == "gap":
            gap = 1
        else:
            columns.pop(left_out, None)
    titles = [_(name) for name in columns]
    table = plain_table(_("experiment"), titles, [_(name) for name in _LEFT], gap)
    for index, status in enumerate(found):
        styles = {"state": STYLES.get(status.state, "")}
        row = [Text(cells[index], styles.get(name, "")) for name, cells in columns.items()]
        table.add_row(Text(status.experiment), *row)
    return table


def _chars(title: str, cells: Iterable[str]) -> int:
    """Return the width of a column."""
    return max(cell_len(title), max(map(cell_len, cells)))


def _cells(status: Status) -> dict[str, str]:
    """Return the cells of a row by column.

    A first attempt has no number; `saved, short` is without the age.
    """

    def known(value: Any, show: Callable[[Any], str] = str) -> str:
        return UNKNOWN if value is None else show(value)

    numbers = status.numbers
    step = UNKNOWN
    if numbers.step is not None or numbers.last_step is not None:
        at = "?" if numbers.step is None else numbers.step
        last = "?" if numbers.last_step is None else numbers.last_step
        step = f"{at}/{last}"
    attempt = UNKNOWN
    if numbers.attempt is not None and numbers.attempt > 1:
        attempt = str(numbers.attempt)
        if numbers.requeues:
            attempt += _(", {times} by SLURM").format(times=numbers.requeues)
    short_saved = known(numbers.checkpoint_step)
    saved = short_saved
    if numbers.checkpoint_step is not None and numbers.checkpoint_age_s is not None:
        saved += f", {_ago(numbers.checkpoint_age_s)}"
    return {
        N_("stage"): status.stage or UNKNOWN,
        N_("state"): _(status.state),
        N_("step"): step,
        N_("loss"): known(numbers.loss, "{:.4f}".format),
        "tokens/s": known(numbers.tokens_per_s, "{:,.0f}".format),
        "ETA": known(numbers.eta_s, clock),
        N_("elapsed"): known(numbers.elapsed_s, clock),
        N_("attempt"): attempt,
        N_("memory"): known(numbers.peak_memory_bytes, gib),
        "GPU": known(numbers.gpu_utilization, _range),
        N_("job"): status.job or UNKNOWN,
        N_("saved"): saved,
        "saved, short": short_saved,
    }


def _range(fractions: Sequence[float]) -> str:
    """Return the utilization of all GPUs: `97%`, or `61-97%` from the lowest to the highest."""
    low = round(100 * min(fractions))
    high = round(100 * max(fractions))
    return f"{low}%" if low == high else f"{low}-{high}%"


def _ago(age_s: float) -> str:
    """Return a rough age: `12 s`, `5 min`, `3 h`, `2 d`."""
    for unit, size_s, limit in (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48)):
        if age_s < size_s * limit:
            return f"{int(age_s // size_s)} {unit}"
    return f"{int(age_s // 86400)} d"


def _notes(found: Sequence[Status]) -> Iterator[Text | Padding]:
    """Yield lines on each stage with a reason or error, once for all waiting experiments."""
    groups: dict[tuple[str | None, str, str | None], list[Status]] = {}
    for status in found:
        is_wrong = status.state in (FAILED, INTERRUPTED, UNREADABLE)
        if is_wrong or status.reason or status.numbers.warnings:
            shared = (status.digest or status.frozen, status.state, status.reason)
            groups.setdefault(shared, []).append(status)
    for group in groups.values():
        yield _title(group)
        for line in _lines_below(group[0]):
            yield Padding.indent(Text(line), 2)
    for status in found:
        if status.finished is not None:
            text = _(
                "{experiment}: an earlier config is done ({digest}); to chat, summary and "
                "compare, the name means that one"
            )
            yield Text(text.format(experiment=status.experiment, digest=status.finished))


def _title(group: Sequence[Status]) -> Text:
    """Return which experiments wait for the same stage, and its state."""
    first = group[0]
    names = list(dict.fromkeys(status.experiment for status in group))
    who = ", ".join(names[:_NAMES_SHOWN])
    if len(names) > _NAMES_SHOWN:
        who += _(" and {number} more").format(number=len(names) - _NAMES_SHOWN)
    state = _(first.state)
    if first.stage:
        state = _("{state} in {stage}").format(state=state, stage=first.stage)
    return Text(f"{who}: ").append(state, STYLES.get(first.state, ""))


def _lines_below(status: Status) -> Iterator[str]:
    """Yield why a stage is in its state, where to read more, and what to do."""
    numbers = status.numbers
    if status.reason:
        yield status.reason
    for text in numbers.warnings:
        yield _("warning: {text}").format(text=text)
    if numbers.attempt is not None and numbers.attempt > 1:
        text = _("attempt {number}").format(number=numbers.attempt)
        if numbers.requeues:
            times = count(numbers.requeues, _("times"))
            text += _(", queued again by SLURM {times}").format(times=times)
        yield text
    logs = [path for path in (status.log, status.slurm_log) if path]
    if logs and status.state != WAITING:
        yield _("log: {paths}").format(paths=", ".join(logs))
    if status.advice:
        yield _("then: {advice}").format(advice=status.advice)


def footer(found: Sequence[Status], every_s: float, took_s: float) -> Text:
    """Return the last line while watching: counts by state, and when the next look is."""
    counts = Counter(status.state for status in found)
    states = ", ".join(f"{number} {_(state)}" for state, number in counts.items())
    text = _("{states}; read in {took}, again every {every}, until Ctrl-C").format(
        states=states, took=brief(took_s), every=brief(every_s)
    )
    return Text(f"\n{text}", "dim")
