"""Shows a survey once or again and again: in place on a terminal, one below the other elsewhere."""

import time
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from pipeline_lib.status.survey import Survey
from pipeline_lib.status.table import WIDTH, footer, render, to_json


def show(survey: Survey, stream: TextIO, as_json: bool = False) -> None:
    """Write what there is now to `stream`."""
    if as_json:
        stream.write(to_json(survey.look()) + "\n")
        return
    console = console_on(stream)
    console.print(_looked(survey, console.width))


def watch(survey: Survey, stream: TextIO, every_s: float) -> None:
    """Show it every `every_s` seconds until Ctrl-C."""
    console = console_on(stream)
    survey.catalog.experiments(survey.names)  # a wrong name is told before the screen changes
    try:
        with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                shown = _looked(survey, console.width, every_s)
                if console.is_terminal:
                    live.update(shown, refresh=True)
                else:
                    console.print(shown)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return


def console_on(stream: TextIO) -> Console:
    """Plain text of WIDTH columns where nobody looks at a terminal."""
    is_terminal = stream.isatty()
    return Console(file=stream, highlight=False, markup=False, emoji=False, width=None if is_terminal else WIDTH)


def _looked(survey: Survey, width: int, every_s: float | None = None) -> Group:
    """What a look finds; with when the next one is, if it is watched."""
    start_s = time.monotonic()
    found = survey.look()
    parts: list[Group | Text] = [render(found, str(survey.catalog.folder), width)]
    if survey.is_slurm_silent:
        parts.append(Text("\nsqueue does not answer: which jobs wait is not known", "yellow"))
    if every_s is not None:
        parts.append(footer(found, every_s, time.monotonic() - start_s))
    return Group(*parts)
