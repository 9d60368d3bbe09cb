"""The report on several nodes: their facts side by side, the matrix between them, what is wrong and what to set."""

from io import StringIO
from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline_lib.doctor.compare import GBIT, grouped, to_set
from pipeline_lib.doctor.nodes import Findings
from pipeline_lib.doctor.report import rows_of

MOST_COLUMNS = 12  # of a matrix that fits a terminal


def nodes_report(found: Findings, wrong: list[str], width: int = 110) -> str:
    """Text for a terminal."""
    console = Console(file=StringIO(), width=width)
    console.print(_facts(found))
    if found.pairs:
        _print_matrix(console, found, "Gbit/s from the node of the row to that of the column", _rates(found))
        _print_matrix(console, found, "latency of one way in microseconds", _latencies(found))
    text = str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]
    lines = [text, *_summary(found)]
    if settings := to_set(found):
        lines += ["what to set:", *(f"  - {line}" for line in settings)]
    if not wrong:
        return "\n".join([*lines, "nothing is wrong with what could be measured"])
    return "\n".join([*lines, "what is wrong, and what to do:", *(f"  - {line}" for line in wrong)])


def _facts(found: Findings) -> Table:
    """A row for each fact: its value, or which nodes have which."""
    names = [found.numbers[number] for number in sorted(found.numbers) if found.numbers[number] in found.nodes]
    title = f"job {found.job}: what {', '.join(names[:MOST_COLUMNS])} {'have' if len(names) > 1 else 'has'}"
    table = Table("part", "what", "value", title=title, title_justify="left")
    sections = list(dict.fromkeys(section for name in names for section in found.nodes[name]))
    for section in sections:
        shown = {name: dict(rows_of(found.nodes[name].get(section, {}))) for name in names}
        labels = list(dict.fromkeys(label for rows in shown.values() for label in rows))
        for place, label in enumerate(labels):
            values = {name: shown[name].get(label, "nothing") for name in names}
            equal = len(set(values.values())) == 1
            text = next(iter(values.values())) if equal else grouped(values)
            table.add_row(section if place == 0 else "", escape(label), escape(text))
        if labels:
            table.add_section()
    return table


def _rates(found: Findings) -> dict[tuple[str, str], str]:
    there = {(pair.first, pair.second): f"{pair.there * GBIT:.3g}" for pair in found.pairs}
    return there | {(pair.second, pair.first): f"{pair.back * GBIT:.3g}" for pair in found.pairs}


def _latencies(found: Findings) -> dict[tuple[str, str], str]:
    there = {(pair.first, pair.second): f"{pair.latency_s * 1e6:.0f}" for pair in found.pairs}
    return there | {(second, first): text for (first, second), text in there.items()}


def _print_matrix(console: Console, found: Findings, title: str, cells: dict[tuple[str, str], str]) -> None:
    names = [found.numbers[number] for number in sorted(found.numbers)][:MOST_COLUMNS]
    more = f"; the first {MOST_COLUMNS} of {len(found.numbers)} nodes, --json has all"
    console.print(f"\n{title}{more if len(found.numbers) > MOST_COLUMNS else ''}")
    table = Table()
    for name in ("", *names):
        table.add_column(escape(name), justify="right")
    for row in names:
        table.add_row(escape(row), *("-" if row == column else cells.get((row, column), "?") for column in names))
    console.print(table)


def _summary(found: Findings) -> list[str]:
    """One line for the pairs, one for each size of the all-reduce."""
    lines = []
    if found.pairs:
        rates = [pair.worst * GBIT for pair in found.pairs]
        lines.append(f"pairs of nodes: {median(rates):.3g} Gbit/s in the middle, {min(rates):.3g} to {max(rates):.3g}")
    for size_bytes, one in sorted(found.all_reduce.items()):
        bus = one["bus_bytes_per_s"]
        lines.append(
            f"all-reduce of {size_bytes / 1e6:.3g} MB over all ranks ({found.device}): {bus * GBIT:.3g} Gbit/s on the"
            " bus"
        )
    return lines
