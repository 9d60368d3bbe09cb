"""Times a call and shows what came of it: medians of several runs, the slowest beside them."""

import statistics
import time
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console
from rich.table import Table

REPEATS = 5


def seconds(call: Callable[[], object], repeats: int = REPEATS) -> list[float]:
    """Wall seconds of each of `repeats` calls."""
    taken = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start_s)
    return taken


def spread(values: Sequence[float], unit: str = "s") -> str:
    """The median and, in brackets, the range: `1.24 s (1.20-1.31)`."""
    return f"{statistics.median(values):.3g} {unit} ({min(values):.3g}-{max(values):.3g})"


def show(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, numbers to the right."""
    table = Table(*columns[:1], title=title, title_justify="left")
    for column in columns[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(width=140).print(table)
