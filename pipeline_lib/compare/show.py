"""The comparison, at most as wide as the terminal: the verdict, numbers, and differences."""

from collections.abc import Callable, Sequence
from itertools import chain

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline_lib.compare.comparison import Comparison, ExperimentNumbers
from pipeline_lib.compare.differences import DifferingRow
from pipeline_lib.compare.ranking import BEST, PAIRED, UNKNOWN, Ranking, Versus
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
        parts.append(Text(""))
        parts += map(Text, notes)
    for name, title in SECTIONS:
        rows: list[DifferingRow] = getattr(comparison.differences, name)
        if rows:
            parts += [Text(""), Text(title, "bold"), _differences(rows, comparison, width)]
    if comparison.telling_texts:
        parts.append(Text(""))
        parts += map(Text, comparison.telling_texts)
    if comparison.notes:
        parts += [Text(""), Text("Damaged or unreadable, and not used", "bold red")]
        parts += map(Text, comparison.notes)
    return Group(*parts)


def footnotes(comparison: Comparison) -> list[str]:
    """Return notes on what intervals mean, and on their basis if documents are not the same."""
    ranking = comparison.ranking
    names = comparison.names
    found = []
    if any(one.low is not None for one in ranking.versus.values()):
        found.append(_of_intervals(ranking))
    names_by_note: dict[str, list[str]] = {}
    for place, one in ranking.versus.items():
        if one.kind == UNKNOWN:
            note = f"whether the difference is noise is unknown: {one.why}"
        elif one.low is not None and not ranking.shared:
            note = _of_documents(one)
        else:
            continue
        names_by_note.setdefault(note, []).append(names[place])
    found += [f"{listed(those)}: {text}." for text, those in names_by_note.items()]
    return found


def _of_intervals(ranking: Ranking) -> str:
    note = "Intervals are of 95%"
    if ranking.shared:
        note += f", by document on the {ranking.shared:,} that all were scored on"
    note += ". They cover the choice of held-out documents, not the choice of the seed."
    if ranking.pairs > 1:
        note += f" They hold together for all {ranking.pairs} pairs (Bonferroni)."
    return note


def _of_documents(one: Versus) -> str:
    how = "compared by document" if one.kind == PAIRED else "compared by the means alone"
    if not one.documents:
        return f"{how}; the best shares no held-out document"
    return f"{how}; the best shares {one.documents:,} held-out documents"


def loss_cells(numbers: ExperimentNumbers, versus: Versus | None) -> tuple[str, str, str]:
    """Return the held-out loss, its standard error, its excess over the best, and the meaning."""
    loss = UNKNOWN_CELL if numbers.loss is None else units.real(numbers.loss, "", 4)
    if numbers.standard_error is not None:
        loss += f" \u00b1 {numbers.standard_error:.4f}"
    if versus is None:
        return loss, UNKNOWN_CELL, UNKNOWN_CELL
    excess = UNKNOWN_CELL if versus.difference is None else interval(versus)
    return loss, excess, versus.meaning


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
        loss, excess, meaning = loss_cells(numbers, versus)
        style = ""
        if versus is None:
            style = "dim"
        elif meaning == BEST:
            style = "green"
        table.add_row(
            Text(comparison.names[place]),
            Text(loss, style),
            Text(excess, style),
            Text(meaning, style),
            Text(numbers.state, style),
        )
    return table


def _costs(comparison: Comparison) -> Table:
    """Return a table of the costs, without columns that are empty or 0 in every row."""
    rows = [cost_cells(comparison.measured[place]) for place in comparison.order]
    columns = {}
    for name in dict.fromkeys(chain(*rows)):
        cells = [row.get(name, UNKNOWN_CELL) for row in rows]
        if set(cells) - {UNKNOWN_CELL, "0"}:
            columns[name] = cells
    table = plain_table("experiment", columns)
    for index, place in enumerate(comparison.order):
        line = [Text(cells[index]) for cells in columns.values()]
        table.add_row(Text(comparison.names[place]), *line)
    return table


def _differences(
    rows: Sequence[DifferingRow], comparison: Comparison, width: int
) -> RenderableType:
    """Return a table with a column or row per experiment if it fits, else a line per value.

    Such a line names the experiments with that value.
    """
    names = [comparison.names[place] for place in comparison.order]
    upright = [["", *names]]
    for row in rows:
        values = [shown(row.values[place]) for place in comparison.order]
        upright.append([shown(row.name), *values])
    across = [list(column) for column in zip(*upright, strict=True)]
    by_preference = [upright, across]
    if len(names) > len(rows) + 2:
        by_preference.reverse()
    for cells in by_preference:
        widths = [max(map(len, column)) + GAP for column in zip(*cells, strict=True)]
        if sum(widths) <= width + GAP:
            table = plain_table(cells[0][0], cells[0][1:], left=("against it", "state"))
            for line in cells[1:]:
                table.add_row(*map(Text, line))
            return table
    texts = []
    for key, *values in upright[1:]:
        names_by_value: dict[str, list[str]] = {}
        for value, name in zip(values, names, strict=True):
            names_by_value.setdefault(value, []).append(name)
        texts.append(f"{key}:")
        texts += [f"  {value}: {', '.join(those)}" for value, those in names_by_value.items()]
    return Group(*map(Text, texts))
