"""The account of an imported config, as three tables."""

from collections.abc import Sequence
from typing import TextIO

from rich.table import Table

from pipeline_lib.config.import_draft import AccountPart, Row
from pipeline_lib.status.watch import console_on


def show(rows: Sequence[Row], stream: TextIO) -> None:
    """Print what became of each key: taken over, changed, without equivalent."""
    console = console_on(stream)
    for part in AccountPart:
        of_part = [row for row in rows if row.part == part]
        if not of_part:
            continue
        console.print(f"{part}" if part == AccountPart.TAKEN else f"\n{part}", style="bold")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
        table.add_column("there", ratio=3, overflow="fold")
        if part != AccountPart.NONE:
            table.add_column("here", ratio=3, overflow="fold")
        table.add_column("what it means", ratio=5, overflow="fold")
        for row in of_part:
            table.add_row(row.there, *([row.here] if part != AccountPart.NONE else []), row.why)
        console.print(table)
    console.print()
