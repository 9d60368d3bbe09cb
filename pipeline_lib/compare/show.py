"""A comparison as text: the verdict in a sentence, the numbers, and the differences."""

from collections.abc import Callable, Sequence
from itertools import chain

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from pipeline_lib.compare.comparison import Comparison, ExperimentNumbers
from pipeline_lib.compare.differences import DifferingRow
from pipeline_lib.compare.ranking import BEST, PAIRED, UNKNOWN, Versus
from pipeline_lib.core import units
from pipeline_lib.status.at_rest import shown
from pipeline_lib.status.survey import plain_table

# The verdict in a sentence or two: which experiment is best, by how much, and whether the difference may be noise.

UNIT = "nats/token"
_NAMED = 3  # experiments listed by name in a sentence


def verdict(comparison: Comparison) -> str:
    """Return the verdict of the comparison."""
    names, best = comparison.names, comparison.ranking.best
    if comparison.is_identical:
        if len(names) == 2:
            return comparison.same_texts[0]
        return f"All {len(names)} are identical: the same curves to the last bit, and the same model files."
    known = list(zip(names, comparison.found, strict=True))
    states = {name: one.state for name, one in known if one.loss is None and one.stop is None}
    reasons = [f"{name} ({'damaged' if state == 'done' else state})" for name, state in states.items()]
    stopped = [name for name, one in known if one.loss is None and one.stop is not None]
    versus = {place: one for place, one in comparison.ranking.versus.items() if place != best}
    if best is None:
        text = _of_none(comparison) if versus else "There are no results to compare yet."
    elif not versus and stopped:
        loss = units.real(comparison.ranking.loss, UNIT, 4)
        text = f"{names[best]} won its sweep, which stopped {listed(stopped)}: its held-out loss is {loss}."
    elif not versus:
        text = f"Only {names[best]} has a held-out loss, {units.real(comparison.ranking.loss, UNIT, 4)}."
    elif len(versus) == 1:
        text = _of_two(comparison, *next(iter(versus.items())))
    else:
        text = _of_many(comparison, versus)
    if versus and stopped:
        text += f" The sweep stopped {listed(stopped)} before."
    return f"{text} No held-out loss: {listed(reasons)}." if reasons else text


def interval(versus: Versus) -> str:
    """Return text like `0.0312 (0.0121 to 0.0503)`."""
    difference = units.real(versus.difference, "", 4)
    return difference if versus.low is None else f"{difference} ({_ends(versus)})"


def basis(versus: Versus) -> str:
    """Return the documents that the interval is based on, as the end of a sentence."""
    if versus.kind == PAIRED:
        return f", on the same {versus.documents:,} held-out documents"
    shared = f"only {versus.documents:,} held-out documents are" if versus.documents else "no held-out document is"
    return f"; {shared} shared, so the difference of the documents counts as noise"


def among(comparison: Comparison) -> str:
    """Return the number of ranked experiments: `3`, or `the 2 that can be compared`."""
    ranking = comparison.ranking
    count = len(ranking.ranked)
    return f"{count}" if count == len(ranking.versus) else f"the {count} that can be compared"


def lowest(comparison: Comparison) -> str:
    """Return the criterion of the best: lowest held-out loss, or lowest loss on the documents shared by all."""
    ranking = comparison.ranking
    if not ranking.is_part:
        return "lowest held-out loss"
    return f"lowest loss on the {ranking.shared:,} held-out documents that all were scored on"


def listed(names: Sequence[str]) -> str:
    """Return `a, b and c`, or for long lists the first names and the number of further ones."""
    if not names:
        return ""
    if len(names) > _NAMED + 1:
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _of_none(comparison: Comparison) -> str:
    places = list(comparison.ranking.versus)
    losses = [f"{comparison.names[place]} {units.real(comparison.found[place].loss, '', 4)}" for place in places]
    why = next(one.why for one in comparison.ranking.versus.values())
    return f"No two of them can be compared: {why}. Held-out losses, in {UNIT}: {listed(losses)}."


def _of_two(comparison: Comparison, place: int, versus: Versus) -> str:
    first = comparison.ranking.best or 0
    best, other = comparison.names[first], comparison.names[place]
    if versus.kind == UNKNOWN:
        losses = [units.real(comparison.measured[each].loss, UNIT, 4) for each in (first, place)]
        text = f"{best} has a held-out loss of {losses[0]}, {other} of {losses[1]}"
        return f"{text}; whether the difference is noise is unknown: {versus.why}."
    if not versus.difference:
        return f"No difference: {best} and {other} have the same held-out loss{basis(versus)}."
    gap = f"{units.real(versus.difference, UNIT, 4)} lower, 95% interval {_ends(versus)}{basis(versus)}"
    if versus.is_worse:
        return f"{best} is better than {other} by more than chance: its held-out loss is {gap}."
    return f"The difference between {best} and {other} is noise: the held-out loss of {best} is {gap}."


def _ends(versus: Versus) -> str:
    return f"{units.real(versus.low, '', 4)} to {units.real(versus.high, '', 4)}"


def _of_many(comparison: Comparison, versus: dict[int, Versus]) -> str:
    names, ranking = comparison.names, comparison.ranking
    best, loss = names[ranking.best or 0], units.real(ranking.loss, UNIT, 4)
    worse = [names[place] for place, one in versus.items() if one.is_worse]
    noise = [names[place] for place, one in versus.items() if one.is_noise]
    unknown = [names[place] for place, one in versus.items() if one.kind == UNKNOWN]
    if worse and len(worse) == len(ranking.ranked) - 1:
        nearest = min((one for one in versus.values() if one.is_worse), key=lambda one: one.difference or 0.0)
        text = (
            f"{best} is the best of {among(comparison)} by more than chance, at {loss}: the next is "
            f"{units.real(nearest.difference, UNIT, 4)} above it, 95% interval {_ends(nearest)}{basis(nearest)}."
        )
    else:
        text = f"{best} has the {lowest(comparison)} of {among(comparison)}, {loss}"
        text += f", but its lead over {listed(noise)} is within noise." if noise else "."
        text += f" It is better than {listed(worse)} by more than chance." if worse else ""
    if better := [names[place] for place, one in versus.items() if one.is_better]:
        text += f" On the documents that they share, {listed(better)} {'is' if len(better) == 1 else 'are'} better."
    if unknown:
        why = next(one.why for one in versus.values() if one.why)
        text += f" Whether it is better than {listed(unknown)} is unknown: {why}."
    return text


# The comparison for a terminal, at most as wide as it: the verdict, the numbers, and the differences.

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
        parts += [Text(""), Text("Damaged or unreadable, and not used", "bold red"), *map(Text, comparison.notes)]
    return Group(*parts)


def footnotes(comparison: Comparison) -> list[str]:
    """Return notes on what the intervals mean, and what they are based on where that is not the same documents."""
    ranking, names = comparison.ranking, comparison.names
    with_interval = [place for place, one in ranking.versus.items() if one.low is not None]
    found = []
    if with_interval:
        together = f" They hold together for all {ranking.pairs} pairs (Bonferroni)." if ranking.pairs > 1 else ""
        documents = f", by document on the {ranking.shared:,} that all were scored on" if ranking.shared else ""
        found.append(
            f"Intervals are of 95%{documents}. They cover the choice of held-out documents, not the choice "
            f"of the seed.{together}"
        )
    names_by_note: dict[str, list[str]] = {}
    for place, one in ranking.versus.items():
        if one.kind == UNKNOWN:
            note = f"whether the difference is noise is unknown: {one.why}"
        elif one.low is not None and not ranking.shared:
            shared = f"{one.documents:,} held-out documents" if one.documents else "no held-out document"
            how = "compared by document" if one.kind == PAIRED else "compared by the means alone"
            note = f"{how}; the best shares {shared}"
        else:
            continue
        names_by_note.setdefault(note, []).append(names[place])
    found += [f"{listed(those)}: {text}." for text, those in names_by_note.items()]
    return found


def loss_cells(numbers: ExperimentNumbers, versus: Versus | None) -> tuple[str, str, str]:
    """Return the held-out loss with its standard error, its excess over the best, and what that means."""
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
        numbers, versus = comparison.measured[place], comparison.ranking.versus.get(place)
        cells = (*loss_cells(numbers, versus), numbers.state)
        style = "dim" if versus is None else ""
        if cells[2] == BEST:
            style = "green"
        table.add_row(Text(comparison.names[place]), *(Text(cell, style) for cell in cells))
    return table


def _costs(comparison: Comparison) -> Table:
    """Return a table of the costs, without columns that are empty or 0 in every row."""
    rows = [cost_cells(comparison.measured[place]) for place in comparison.order]
    cells = {name: [row.get(name, UNKNOWN_CELL) for row in rows] for name in dict.fromkeys(chain(*rows))}
    cells = {name: column for name, column in cells.items() if set(column) - {UNKNOWN_CELL, "0"}}
    table = plain_table("experiment", cells)
    for index, place in enumerate(comparison.order):
        table.add_row(Text(comparison.names[place]), *(Text(column[index]) for column in cells.values()))
    return table


def _differences(rows: Sequence[DifferingRow], comparison: Comparison, width: int) -> RenderableType:
    """Return a table with one column or row per experiment if it fits, else a line per value with its experiments."""
    names = [comparison.names[place] for place in comparison.order]
    lines = [(shown(row.name), *(shown(row.values[place]) for place in comparison.order)) for row in rows]
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
        texts += [f"{key}:", *(f"  {value}: {', '.join(those)}" for value, those in by_value.items())]
    return Group(*map(Text, texts))
