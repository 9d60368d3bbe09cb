"""A comparison as text of at most the terminal's width: the verdict, the numbers, and whatever differs."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline_lib.compare.comparison import Comparison, Measured
from pipeline_lib.compare.difference import Difference
from pipeline_lib.compare.verdict import interval, listed
from pipeline_lib.compare.versus import BEST, PAIRED, UNKNOWN, Versus
from pipeline_lib.plan.units import gib
from pipeline_lib.publish import units
from pipeline_lib.status.rest import shown

UNKNOWN_CELL = "-"
GAP = 2
SECTIONS = (
    ("changing", "Config: keys that can change the result"),
    ("placing", "Config: keys that only say where and how it runs"),
    ("software", "Software of the training"),
    ("data", "Data"),
    ("plan", "Plan"),
)


def render(comparison: Comparison, verdict: str, width: int) -> Group:
    """All of it."""
    parts: list[RenderableType] = [Text(comparison.title), Text(verdict, "bold"), Text("")]
    parts += [_losses(comparison), Text(""), _costs(comparison)]
    if told := footnotes(comparison):
        parts += [Text(""), *map(Text, told)]
    alike = []
    for name, title in SECTIONS:
        rows: list[Difference] = getattr(comparison.differences, name)
        if rows:
            parts += [Text(""), Text(title, "bold"), _differences(rows, comparison, width)]
        else:
            alike.append(title)
    if alike:
        parts += [Text(""), Text(f"No difference is known in: {'; '.join(alike)}.")]
    same = [] if comparison.is_identical and len(comparison.names) == 2 else comparison.same_told
    if same:
        parts += [Text(""), *map(Text, same)]
    if comparison.notes:
        parts += [Text(""), Text("Damaged or unreadable, and not used", "bold red"), *map(Text, comparison.notes)]
    return Group(*parts)


def footnotes(comparison: Comparison) -> list[str]:
    """What the intervals mean, and what they rest on where that is not the same documents."""
    ranking, names = comparison.ranking, comparison.names
    with_interval = [place for place, one in ranking.versus.items() if one.low is not None]
    found = []
    if with_interval:
        together = f" They hold together for all {ranking.pairs} pairs (Bonferroni)." if ranking.pairs > 1 else ""
        documents = f", by document on the {ranking.shared:,} that all were scored on" if ranking.shared else ""
        found.append(
            f"Intervals are of 95 %{documents}. They tell what other held-out documents might have changed, and "
            f"nothing of another seed.{together}"
        )
    told: dict[str, list[str]] = {}
    for place, one in ranking.versus.items():
        if one.kind == UNKNOWN:
            told.setdefault(f"whether the difference is noise cannot be told: {one.why}", []).append(names[place])
        elif one.low is not None and not ranking.shared:
            shared = f"{one.documents:,} held-out documents" if one.documents else "no held-out document"
            how = "compared by document" if one.kind == PAIRED else "compared by the means alone"
            told.setdefault(f"{how}; the best shares {shared}", []).append(names[place])
    found += [f"{listed(those)}: {text}." for text, those in told.items()]
    return found


def loss_cells(numbers: Measured, versus: Versus | None) -> tuple[str, str, str]:
    """The held-out loss with its standard error, how far it is above the best, and what that means."""
    loss = UNKNOWN_CELL if numbers.loss is None else units.real(numbers.loss, "", 4)
    if numbers.standard_error is not None:
        loss += f" \u00b1 {numbers.standard_error:.4f}"
    if versus is None:
        return loss, UNKNOWN_CELL, UNKNOWN_CELL
    return loss, UNKNOWN_CELL if versus.difference is None else interval(versus), versus.meaning


def cost_cells(numbers: Measured) -> dict[str, str]:
    """What it took, by the names of the columns."""
    memory = UNKNOWN_CELL if numbers.peak_memory_bytes is None else gib(numbers.peak_memory_bytes)
    return {
        "last loss": _known(numbers.final_loss, units.real(numbers.final_loss)),
        "steps": units.count(numbers.steps),
        "supervised": _known(numbers.supervised_tokens, units.compact(numbers.supervised_tokens)),
        "tokens/s": _known(numbers.tokens_per_s, units.compact(numbers.tokens_per_s)),
        "memory": memory,
        "time": _known(numbers.training_time_s, units.seconds(numbers.training_time_s)),
        f"{numbers.device.removeprefix('CPU ')}-hours": _known(numbers.device_hours, units.small(numbers.device_hours)),
        "restarts": units.count(numbers.restarts),
    }


def _known(value: float | None, text: str) -> str:
    return UNKNOWN_CELL if value is None else text


def _losses(comparison: Comparison) -> Table:
    table = _table("experiment", ("held-out loss", "above the best, 95 %", "against it", "state"))
    for place in comparison.order:
        numbers, versus = comparison.measured[place], comparison.ranking.versus.get(place)
        cells = (*loss_cells(numbers, versus), numbers.state)
        style = "green" if cells[2] == BEST else "dim" if versus is None else ""
        table.add_row(Text(comparison.names[place]), *(Text(cell, style) for cell in cells))
    return table


def _costs(comparison: Comparison) -> Table:
    rows = [cost_cells(comparison.measured[place]) for place in comparison.order]
    columns = [name for name in dict.fromkeys(name for row in rows for name in row) if _is_telling(name, rows)]
    table = _table("experiment", columns)
    for place, row in zip(comparison.order, rows, strict=True):
        table.add_row(Text(comparison.names[place]), *(Text(row.get(name, UNKNOWN_CELL)) for name in columns))
    return table


def _is_telling(name: str, rows: Sequence[Mapping[str, str]]) -> bool:
    """Whether there is anything in the column."""
    return bool({row.get(name, UNKNOWN_CELL) for row in rows} - {UNKNOWN_CELL, "0"})


def _table(first: str, columns: Sequence[str]) -> Table:
    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, no_wrap=True, justify="left" if name in ("against it", "state") else "right")
    return table


def _differences(rows: Sequence[Difference], comparison: Comparison, width: int) -> RenderableType:
    """One column or one row an experiment, where that fits; else a line for each value, with those that have it."""
    names = [comparison.names[place] for place in comparison.order]
    lines = [(shown(row.name), *(shown(row.values[place]) for place in comparison.order)) for row in rows]
    upright = [("", *names), *lines]
    across = list(zip(*upright, strict=True))
    for cells in (upright, across) if len(names) <= len(rows) + 2 else (across, upright):
        if sum(max(map(len, column)) + GAP for column in zip(*cells, strict=True)) <= width + GAP:
            table = _table(cells[0][0], cells[0][1:])
            for line in cells[1:]:
                table.add_row(*map(Text, line))
            return table
    return Group(*(Text(line) for name, *values in lines for line in _grouped(name, values, names)))


def _grouped(name: str, values: Sequence[str], names: Sequence[str]) -> Iterator[str]:
    by_value: dict[str, list[str]] = {}
    for value, who in zip(values, names, strict=True):
        by_value.setdefault(value, []).append(who)
    yield f"{name}:"
    for value, those in by_value.items():
        yield f"  {value}: {', '.join(those)}"
