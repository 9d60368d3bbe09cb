"""Report on several nodes: facts side by side, matrices between them, settings and problems."""

from itertools import chain
from statistics import median

from rich.markup import escape
from rich.table import Table

from pipeline_lib.doctor.node_advice import GBIT, grouped, to_set
from pipeline_lib.doctor.nodes import Findings
from pipeline_lib.doctor.report import add_section, page_of, rows_of

MOST_COLUMNS = 12  # of a matrix, to fit a terminal


def nodes_report(found: Findings, wrong: list[str], comparison: str | None = None) -> str:
    """Return the report for a terminal; `comparison` says whether one node would be faster."""
    parts: list[Table | str] = [_facts(found)]
    lines = []
    if found.pairs:
        rates = {}
        latencies = {}
        for pair in found.pairs:
            there = (pair.first, pair.second)
            back = (pair.second, pair.first)
            rates[there] = f"{pair.there * GBIT:.3g}"
            rates[back] = f"{pair.back * GBIT:.3g}"
            latencies[there] = f"{pair.latency_s * 1e6:.0f}"
            latencies[back] = latencies[there]
        parts += _matrix(found, "Gbit/s from the node of the row to that of the column", rates)
        parts += _matrix(found, "latency of one way in microseconds", latencies)
        worst = [pair.worst * GBIT for pair in found.pairs]
        lines.append(
            f"pairs of nodes: {median(worst):.3g} Gbit/s in the middle, {min(worst):.3g} to "
            f"{max(worst):.3g}"
        )
    for size_bytes, one in sorted(found.all_reduce.items()):
        lines.append(
            f"all-reduce of {size_bytes / 1e6:.3g} MB over all ranks ({found.device}):"
            f" {one['bus_bytes_per_s'] * GBIT:.3g} Gbit/s on the bus"
        )
    if settings := to_set(found):
        lines.append("what to set:")
        lines += [f"  - {line}" for line in settings]
    if comparison:
        lines.append(comparison)
    return page_of(parts, lines, wrong, "what is wrong, and what to do:")


def _facts(found: Findings) -> Table:
    """Return a table with a row for each fact: its value, or its values with their nodes."""
    names = [name for name in _in_order(found) if name in found.nodes]
    verb = "have" if len(names) > 1 else "has"
    title = f"what {', '.join(names[:MOST_COLUMNS])} {verb}"
    if found.job:
        title = f"job {found.job}: {title}"
    table = Table("part", "what", "value", title=title, title_justify="left")
    for section in dict.fromkeys(chain.from_iterable(found.nodes[name] for name in names)):
        facts = {name: dict(rows_of(found.nodes[name].get(section, {}))) for name in names}
        rows = []
        for label in dict.fromkeys(chain(*facts.values())):
            values = {name: own.get(label, "nothing") for name, own in facts.items()}
            distinct = set(values.values())
            rows.append((label, distinct.pop() if len(distinct) == 1 else grouped(values)))
        add_section(table, section, rows)
    return table


def _in_order(found: Findings) -> list[str]:
    """Return the nodes by their numbers in the job."""
    return [name for _, name in sorted(found.numbers.items())]


def _matrix(found: Findings, title: str, cells: dict[tuple[str, str], str]) -> list[Table | str]:
    names = _in_order(found)[:MOST_COLUMNS]
    if len(found.numbers) > MOST_COLUMNS:
        title += f"; the first {MOST_COLUMNS} of {len(found.numbers)} nodes, --json has all"
    table = Table()
    for name in ("", *names):
        table.add_column(escape(name), justify="right")
    for row in names:
        line = [escape(row)]
        for column in names:
            line.append("-" if row == column else cells.get((row, column), "?"))
        table.add_row(*line)
    return [f"\n{title}", table]
