"""The report: a table of all facts, then what is wrong, in words."""

from collections.abc import Iterator
from io import StringIO
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline_lib.doctor.facts import UNMEASURED, Facts


def report(facts: Facts, wrong: list[str], width: int = 110) -> str:
    """Text for a terminal."""
    table = Table("part", "what", "value", title="what this machine has", title_justify="left")
    for name, section in facts.items():
        for number, (what, value) in enumerate(rows_of(section)):
            table.add_row(name if number == 0 else "", escape(what), escape(value))
        if section:
            table.add_section()
    console = Console(file=StringIO(), width=width)
    console.print(table)
    text = str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]
    if not wrong:
        return f"{text}\nnothing is wrong with what could be measured"
    return "\n".join([text, "what is wrong, and what to set:", *(f"  - {line}" for line in wrong)])


def rows_of(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of a section as people read them, those of sections within it too."""
    for name, value in section.items():
        if isinstance(value, dict):
            yield from rows_of(value, f"{prefix}{name} ")
        elif name == UNMEASURED:
            yield f"{prefix}{UNMEASURED}", str(value)
        else:
            yield _row(f"{prefix}{name}", value)


def _row(name: str, value: Any) -> tuple[str, str]:
    """Name and value with a unit that people read."""
    if name.endswith("_bytes_per_s"):
        return name.removesuffix("_bytes_per_s"), f"{value / 1e9:.2f} GB/s"
    if name.startswith(("all_reduce.", "all_gather.")):
        kind, _, size = name.partition(".")
        return f"{kind.replace('_', '-')} of {_size(int(size))}", f"{value / 1e9:.2f} GB/s on the bus"
    if name.endswith("_bytes"):
        return name.removesuffix("_bytes"), _size(value)
    if name.endswith("_flops"):
        return name.removesuffix("_flops"), f"{value / 1e12:.0f} TFLOP/s"
    if isinstance(value, list):
        return name, ", ".join(map(str, value)) or "none"
    return name, f"{value:g}" if isinstance(value, float) else str(value)


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
