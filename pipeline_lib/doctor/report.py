"""Report on one machine: a table of all facts, then what is wrong."""

from collections.abc import Iterator
from io import StringIO
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline_lib.doctor.facts import UNMEASURED, Facts

WIDTH = 110


def report(facts: Facts, wrong: list[str]) -> str:
    """Return the report as text for a terminal."""
    table = Table("part", "what", "value", title="what this machine has", title_justify="left")
    for name, section in facts.items():
        add_section(table, name, list(rows_of(section)))
    return page_of([table], [], wrong, "what is wrong, and what to set:")


def add_section(table: Table, name: str, rows: list[tuple[str, str]]) -> None:
    """Add `rows` to `table`, the first with the `name` of the section."""
    for number, (what, value) in enumerate(rows):
        table.add_row(name if number == 0 else "", escape(what), escape(value))
    if rows:
        table.add_section()


def page_of(parts: list[Table | str], lines: list[str], wrong: list[str], title: str) -> str:
    """Return `parts` as a terminal of WIDTH columns, then `lines`, then `wrong` with `title`."""
    console = Console(file=StringIO(), width=WIDTH)
    for part in parts:
        console.print(part)
    text = str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]
    page = [text, *lines]
    if wrong:
        page.append(title)
        page += [f"  - {line}" for line in wrong]
    else:
        page.append("nothing is wrong with what could be measured")
    return "\n".join(page)


def rows_of(section: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and displayed values of a section, including its nested sections."""
    for name, value in flat(section):
        if name.endswith(UNMEASURED):
            yield name, str(value)
        else:
            yield _with_unit(name, value)


def flat(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield a section's names and values; a nested section's name precedes its names."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", value


def _with_unit(name: str, value: Any) -> tuple[str, str]:
    if name.endswith("_bytes_per_s"):
        return name.removesuffix("_bytes_per_s"), f"{value / 1e9:.2f} GB/s"
    if name.startswith(("all_reduce.", "all_gather.", "all_to_all.")):
        kind, _, size = name.partition(".")
        collective = f"{kind.replace('_', '-')} of {_size(int(size))}"
        return collective, f"{value / 1e9:.2f} GB/s on the bus"
    if name.endswith("_bytes"):
        return name.removesuffix("_bytes"), _size(value)
    if name.endswith("_flops"):
        return name.removesuffix("_flops"), f"{value / 1e12:.0f} TFLOP/s"
    if isinstance(value, list):
        return name, ", ".join(map(str, value)) or "none"
    if isinstance(value, float):
        return name, f"{value:g}"
    return name, str(value)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
