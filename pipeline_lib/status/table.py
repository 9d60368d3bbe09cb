"""What a look at a store found, as a table of at most 100 columns, lines below it, or JSON."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pipeline_lib.plan.units import gib, seconds
from pipeline_lib.status.rest import DONE, FAILED, INTERRUPTED, REQUEUED, RUNNING, UNREADABLE, WAITING
from pipeline_lib.status.survey import Status
from pipeline_lib.train.progress import clock

WIDTH = 100
UNKNOWN = "-"
STYLES = {
    **{RUNNING: "green", WAITING: "yellow", REQUEUED: "yellow", DONE: "dim"},
    **{FAILED: "bold red", INTERRUPTED: "red", UNREADABLE: "red"},
}
_NAMES_SHOWN = 5  # of experiments with the same stage, in a line below the table
_NAME_CHARS = 16  # of an experiment's name that always have a place; a longer one goes on in the next line


def render(found: Sequence[Status], where: str, width: int = WIDTH) -> Group:
    """The table and the lines below it; `where` is the folder that was looked at."""
    if not found:
        return Group(Text(f"{where}: no experiments yet; snakemake writes them there as soon as it is started"))
    parts: list[Table | Text | Padding] = [_table(found, width)]
    if notes := list(_notes(found)):
        parts += [Text(""), *notes]
    return Group(*parts)


def to_json(found: Sequence[Status]) -> str:
    """A list of flat objects, of keys that stay."""
    return json.dumps([status.to_json() for status in found], indent=2, ensure_ascii=False)


def _table(found: Sequence[Status], width: int) -> Table:
    """One row each. Columns that hold nothing are left out; where there is no room, the least important are."""
    fixed = [_column("stage", found, lambda status: status.stage or UNKNOWN), _column("state", found, _state)]
    others = [_column(name, found, show) for name, show in _SHOWN]
    columns = [*fixed, *(column for column in others if set(column.cells) != {UNKNOWN})]
    names = [status.experiment for status in found]
    columns, gap = _fitting(columns, width - min(_NAME_CHARS, max(map(len, ("experiment", *names)))), found)
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False)
    table.add_column("experiment", overflow="fold")
    for column in columns:
        table.add_column(column.name, justify="left" if column.name in ("stage", "state") else "right", no_wrap=True)
    for index, status in enumerate(found):
        cells = (Text(column.cells[index], _style(column.name, status)) for column in columns)
        table.add_row(Text(status.experiment), *cells)
    return table


@dataclass(frozen=True)
class _Column:
    name: str
    cells: Sequence[str]

    @property
    def width(self) -> int:
        return max(map(len, (self.name, *self.cells)))


def _column(name: str, found: Sequence[Status], show: Callable[[Status], str]) -> _Column:
    return _Column(name, [show(status) for status in found])


def _fitting(columns: list[_Column], width: int, found: Sequence[Status]) -> tuple[list[_Column], int]:
    """As many of `columns` as fit into `width`, and the gap between them."""
    gap = 2
    shorter = _column("saved", found, lambda status: _whole(status.numbers.checkpoint_step, UNKNOWN))
    for left_out in ("memory", "attempt", "elapsed", "age", "gap", "tokens/s", "job", "loss", "saved"):
        if sum(column.width + gap for column in columns) <= width:
            break
        if left_out == "age":
            columns = [shorter if column.name == "saved" else column for column in columns]
        elif left_out == "gap":
            gap = 1
        else:
            columns = [column for column in columns if column.name != left_out]
    return columns, gap


def _style(column: str, status: Status) -> str:
    return STYLES.get(status.state, "") if column == "state" else ""


def _state(status: Status) -> str:
    return status.state


def _step(status: Status) -> str:
    numbers = status.numbers
    if numbers.step is None and numbers.last_step is None:
        return UNKNOWN
    return f"{_whole(numbers.step)}/{_whole(numbers.last_step)}"


def _whole(value: int | None, unknown: str = "?") -> str:
    return unknown if value is None else str(value)


def _number(value: float | None, digits: str) -> str:
    return UNKNOWN if value is None else format(value, digits)


def _clock(value_s: float | None) -> str:
    return UNKNOWN if value_s is None else clock(value_s)


def _saved(status: Status) -> str:
    """The step that is saved, and how long ago: `120, 5 min`."""
    step, age_s = status.numbers.checkpoint_step, status.numbers.checkpoint_age_s
    return _whole(step, UNKNOWN) if step is None or age_s is None else f"{step}, {_ago(age_s)}"


def _attempt(status: Status) -> str:
    """Of runs that were begun more than once."""
    attempt, requeues = status.numbers.attempt, status.numbers.requeues
    if attempt is None or attempt < 2:
        return UNKNOWN
    return f"{attempt}, {requeues} by SLURM" if requeues else str(attempt)


_SHOWN: tuple[tuple[str, Callable[[Status], str]], ...] = (
    ("step", _step),
    ("loss", lambda status: _number(status.numbers.loss, ".4f")),
    ("tokens/s", lambda status: _number(status.numbers.tokens_per_s, ",.0f")),
    ("ETA", lambda status: _clock(status.numbers.eta_s)),
    ("elapsed", lambda status: _clock(status.numbers.elapsed_s)),
    ("attempt", _attempt),
    ("memory", lambda status: UNKNOWN if (peak := status.numbers.peak_memory_bytes) is None else gib(peak)),
    ("job", lambda status: status.job or UNKNOWN),
    ("saved", _saved),
)


def _ago(age_s: float) -> str:
    """How long ago, roughly: `12 s`, `5 min`, `3 h`, `2 d`."""
    for unit, size_s, limit in (("s", 1, 60), ("min", 60, 60), ("h", 3600, 48)):
        if age_s < size_s * limit:
            return f"{int(age_s // size_s)} {unit}"
    return f"{int(age_s // 86400)} d"


def _notes(found: Sequence[Status]) -> Iterator[Text | Padding]:
    """What is to be said of a stage, once for all experiments that wait for it."""
    told: dict[tuple[str | None, str, str | None], list[Status]] = {}
    for status in found:
        if status.reason or status.state in (FAILED, INTERRUPTED, UNREADABLE):
            told.setdefault((status.digest or status.frozen, status.state, status.reason), []).append(status)
    for group in told.values():
        first = group[0]
        stage = f" in {first.stage}" if first.stage else ""
        title = Text(f"{_names(group)}: ").append(f"{first.state}{stage}", STYLES.get(first.state, ""))
        yield title
        yield from (Padding.indent(Text(line), 2) for line in _lines(first))


def _lines(status: Status) -> Iterator[str]:
    numbers = status.numbers
    if status.reason:
        yield status.reason
    if numbers.attempt is not None and numbers.attempt > 1:
        requeues = f", queued again by SLURM {numbers.requeues} times" if numbers.requeues else ""
        yield f"attempt {numbers.attempt}{requeues}"
    logs = [path for path in (status.log, status.slurm_log) if path]
    if logs and status.state != WAITING:
        yield f"log: {', '.join(logs)}"
    if status.advice:
        yield f"then: {status.advice}"


def _names(group: Iterable[Status]) -> str:
    names = list(dict.fromkeys(status.experiment for status in group))
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def footer(found: Sequence[Status], every_s: float, took_s: float) -> Text:
    """What stands last while it is watched."""
    counts: dict[str, int] = {}
    for status in found:
        counts[status.state] = counts.get(status.state, 0) + 1
    said = ", ".join(f"{count} {state}" for state, count in counts.items())
    return Text(f"\n{said}; read in {seconds(took_s)}, again every {seconds(every_s)}, until Ctrl-C", "dim")
