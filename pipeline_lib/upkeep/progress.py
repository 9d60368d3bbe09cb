"""A bar with the time that is left, where somebody looks at a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def progress_on(stream: TextIO, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """A function that is told how many bytes more are verified; nothing is shown but on a terminal."""
    shown = (TextColumn("verify"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(file=stream)
    with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("verify", total=total_bytes)
        yield lambda more: progress.advance(task, more)
