"""Showing a survey, once or repeatedly: in place on a terminal, one below the other elsewhere."""

import time
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pipeline_lib.core.language import N_, _
from pipeline_lib.status.survey import Survey
from pipeline_lib.status.table import WIDTH, footer, render, to_json

SILENT_QUEUE = N_("squeue does not answer, so it is unknown which jobs are in the queue")


def show(survey: Survey, stream: TextIO, as_json: bool = False) -> None:
    """Write the present state to `stream`, as a table or JSON."""
    if as_json:
        stream.write(to_json(survey.statuses()) + "\n")
        return
    console = console_on(stream)
    console.print(_page(survey, console.width))


def watch(survey: Survey, stream: TextIO, every_s: float) -> None:
    """Show the state every `every_s` seconds until Ctrl-C."""
    console = console_on(stream)
    survey.chosen()  # raises for a wrong name before the screen changes
    try:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                page = _page(survey, console.width, every_s)
                if console.is_terminal:
                    live.update(page, refresh=True)
                else:
                    console.print(page)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return


def console_on(stream: TextIO) -> Console:
    """Return a console for `stream`: plain text of WIDTH columns unless it is a terminal."""
    is_terminal = stream.isatty()
    return Console(
        file=stream,
        highlight=False,
        markup=False,
        emoji=False,
        width=None if is_terminal else WIDTH,
    )


def _page(survey: Survey, width: int, every_s: float | None = None) -> Group:
    """Read the state, and return what to show; `every_s` is the interval while watching."""
    start_s = time.monotonic()
    found = survey.statuses()
    parts: list[Group | Text] = [
        render(found, str(survey.selector.catalog(survey.store).folder), width)
    ]
    if survey.is_slurm_silent:
        parts.append(Text(f"\n{_(SILENT_QUEUE)}", "yellow"))
    if every_s is not None:
        parts.append(footer(found, every_s, time.monotonic() - start_s))
    return Group(*parts)
