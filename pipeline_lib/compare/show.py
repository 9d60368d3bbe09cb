"""The comparison, at most as wide as the terminal: the verdict, numbers, and differences."""

from collections.abc import Callable, Sequence
from itertools import chain

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline_lib.compare.comparison import Comparison, ExperimentNumbers
from pipeline_lib.compare.differences import DifferingRow
from pipeline_lib.compare.ranking import BEST, PAIRED, UNKNOWN, Versus
from pipeline_lib.compare.verdict import interval, listed
from pipeline_lib.core import units
from pipeline_lib.status.at_rest import shown
from pipeline_lib.status.table import plain_table

UNKNOWN_CELL = "-"
GAP = 2
SECTIONS = (
    ("sources", "Held-out loss by source"),
    ("changing", "Config: keys that can change the result"),
    ("placing", "Config: keys that only change where and how it runs"),
    ("software", "Software of the training"),
    ("data", "Data"),
    ("plan", "Plan"),
)


def render(comparison: Comparison, verdict: str, width: int) -> Group:
    """Return the whole comparison for a terminal."""
    parts: list[RenderableType] = [Text(comparison.title), Text(verdict, "bold"), Text("")]
    parts += [_losses(comparison), Text(""), _costs(comparison)]
    if notes := footnotes(comparison):
        parts += [Text(""), *map(Text, notes)]
    alike = []
    for name, title in SECTIONS:
        rows: list[DifferingRow] = getattr(comparison.differences, name)
        if rows:
            parts += [Text(""), Text(title, "bold"), _differences(rows, comparison, width)]
        elif name != "sources":  # most evaluations have no such losses
            alike.append(title)
    if alike:
        parts += [Text(""), Text(f"No known difference in: {'; '.join(alike)}.")]
    same = [] if comparison.is_identical and len(comparison.names) == 2 else comparison.same_texts
    if same:
        parts += [Text(""), *map(Text, same)]
    if comparison.notes:
        parts += [
            Text(""),
            Text("Damaged or unreadable, and not used", "bold red"),
            *map(Text, comparison.notes),
        ]
    return Group(*parts)


def footnotes(comparison: Comparison) -> list[str]:
    """Return notes on what intervals mean, and on their basis if documents are not the same."""
    ranking = comparison.ranking
    names = comparison.names
    with_interval = [place for place, one in ranking.versus.items() if one.low is not None]
    found = []
    if with_interval:
        together = (
            f" They hold together for all {ranking.pairs} pairs (Bonferroni)."
            if ranking.pairs > 1
            else ""
        )
        documents = (
            f", by document on the {ranking.shared:,} that all were scored on"
            if ranking.shared
            else ""
        )
        found.append(
            f"Intervals are of 95%{documents}. They cover the choice of held-out documents, not "
            f"the choice of the seed.{together}"
        )
    names_by_note: dict[str, list[str]] = {}
    for place, one in ranking.versus.items():
        if one.kind == UNKNOWN:
            note = f"whether the difference is noise is unknown: {one.why}"
        elif one.low is not None and not ranking.shared:
            shared = (
                f"{one.documents:,} held-out documents" if one.documents else "no held-out document"
            )
            how = "compared by document" if one.kind == PAIRED else "compared by the means alone"
            note = f"{how}; the best shares {shared}"
        else:
            continue
        names_by_note.setdefault(note, []).append(names[place])
    found += [f"{listed(those)}: {text}." for text, those in names_by_note.items()]
    return found


def loss_cells(numbers: ExperimentNumbers, versus: Versus | None) -> tuple[str, str, str]:
    """Return the held-out loss, its standard error, its excess over the best, and the meaning."""
    loss = UNKNOWN_CELL if numbers.loss is None else units.real(numbers.loss, "", 4)
    if numbers.standard_error is not None:
        loss += f" \u00b1 {numbers.standard_error:.4f}"
    if versus is None:
        return loss, UNKNOWN_CELL, UNKNOWN_CELL
    return loss, UNKNOWN_CELL if versus.difference is None else interval(versus), versus.meaning


def cost_cells(numbers: ExperimentNumbers) -> dict[str, str]:
    """Return the cost cells by the names of their columns."""

    def cell(show: Callable[[float | None], str], value: float | None) -> str:
        return UNKNOWN_CELL if value is None else show(value)

    return {
        "last loss": cell(units.real, numbers.final_loss),
        "steps": units.count(numbers.steps),
        "supervised": cell(units.compact, numbers.supervised_tokens),
        "tokens/s": cell(units.compact, numbers.tokens_per_s),
        "memory": cell(units.gib, numbers.peak_memory_bytes),
        "time": cell(units.seconds, numbers.training_time_s),
        f"{numbers.device.removeprefix('CPU ')}-hours": cell(units.small, numbers.device_hours),
        "restarts": units.count(numbers.restarts),
    }


def _losses(comparison: Comparison) -> Table:
    columns = ("held-out loss", "above the best, 95%", "against it", "state")
    table = plain_table("experiment", columns, left=("against it", "state"))
    for place in comparison.order:
        numbers = comparison.measured[place]
        versus = comparison.ranking.versus.get(place)
        cells = (*loss_cells(numbers, versus), numbers.state)
        style = "dim" if versus is None else ""
        if cells[2] == BEST:
            style = "green"
        table.add_row(Text(comparison.names[place]), *(Text(cell, style) for cell in cells))
    return table


def _costs(comparison: Comparison) -> Table:
    """Return a table of the costs, without columns that are empty or 0 in every row."""
    rows = [cost_cells(comparison.measured[place]) for place in comparison.order]
    cells = {
        name: [row.get(name, UNKNOWN_CELL) for row in rows] for name in dict.fromkeys(chain(*rows))
    }
    cells = {name: column for name, column in cells.items() if set(column) - {UNKNOWN_CELL, "0"}}
    table = plain_table("experiment", cells)
    for index, place in enumerate(comparison.order):
        table.add_row(
            Text(comparison.names[place]), *(Text(column[index]) for column in cells.values())
        )
    return table


def _differences(
    rows: Sequence[DifferingRow], comparison: Comparison, width: int
) -> RenderableType:
    """Return a table with a column or row per experiment if it fits, else a line per value.

    Such a line names the experiments with that value.
    """
    names = [comparison.names[place] for place in comparison.order]
    lines = [
        (shown(row.name), *(shown(row.values[place]) for place in comparison.order)) for row in rows
    ]
    upright = [("", *names), *lines]
    across = list(zip(*upright, strict=True))
    for cells in (upright, across) if len(names) <= len(rows) + 2 else (across, upright):
        if sum(max(map(len, column)) + GAP for column in zip(*cells, strict=True)) <= width + GAP:
            table = plain_table(cells[0][0], cells[0][1:], left=("against it", "state"))
            for line in cells[1:]:
                table.add_row(*map(Text, line))
            return table
    texts = []
    for key, *values in lines:
        by_value: dict[str, list[str]] = {}
        for value, name in zip(values, names, strict=True):
            by_value.setdefault(value, []).append(name)
        texts += [
            f"{key}:",
            *(f"  {value}: {', '.join(those)}" for value, those in by_value.items()),
        ]
    return Group(*map(Text, texts))
