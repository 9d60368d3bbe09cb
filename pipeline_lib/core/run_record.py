"""The record of a training run: its events, steps and attempts, read from appended files.

A line that cannot be read, such as one that is being written or that a kill cut short, is left out.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline_lib.core.errors import CONTINUES
from pipeline_lib.core.events import EventName, read_events
from pipeline_lib.core.run_folder import EVENTS_NAME, METRICS_NAME
from pipeline_lib.core.units import count

METRICS_BYTES = 64 * 1024  # some hundred steps
EVENTS_BYTES = 1024 * 1024  # several thousand events
READ_STEPS = 40  # more than a speed needs, to find a loss even if the guards refused a few steps
_TOO_LARGE = 2**53  # at and above this, a number is ignored
_ENDS = (
    EventName.RUN_END,
    EventName.RUN_INTERRUPTED,
    EventName.RUN_FAILED,
    EventName.RUN_REQUEUED,
    EventName.RUN_REQUEUE_REFUSED,
)

_DONE = "done"

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Attempt:
    """One start of a training's ranks, in SLURM `job` if set.

    `first_step` is the step resumed from, or 0.
    """

    number: int
    place: str
    first_step: int
    end: str
    job: str = ""

    @property
    def is_completed(self) -> bool:
        """Whether it came to the step at which it was to end."""
        return self.end == _DONE


@dataclass(frozen=True)
class RunRecord:
    """What a run has written so far.

    `rows` are steps, as in metrics.jsonl; only `read_ends` reads them, and `folder`.
    `damaged_events` counts the lines that `read_sound` left out. `is_whole` is false if `events` do
    not go back to the start of the run.
    """

    events: Sequence[Event] = ()
    rows: Sequence[Event] = ()
    damaged_events: int = 0
    is_whole: bool = True
    folder: Path = Path()

    @staticmethod
    def read(events: Path) -> "RunRecord":
        """Read the file `events`, which need not exist."""
        return RunRecord([event for event in read_events(events) if isinstance(event, dict)])

    @staticmethod
    def read_sound(events: Path) -> "RunRecord":
        """Read the file `events`, without events that lack a name or a valid time or attempt."""
        if not events.exists():
            return RunRecord()
        lines = sum(not line.isspace() for line in events.read_bytes().splitlines())
        sound = [event for event in RunRecord.read(events).events if _is_sound(event)]
        return RunRecord(sound, damaged_events=lines - len(sound))

    @staticmethod
    def read_ends(folder: Path) -> "RunRecord":
        """Read the ends of files in the run's `folder`: last steps, and events of the run."""
        metrics, _ = tail(folder / METRICS_NAME, METRICS_BYTES)
        events, is_whole = tail(folder / EVENTS_NAME, EVENTS_BYTES)
        last = objects(metrics, last=READ_STEPS)
        rows = [row for row in last if whole(row.get("step")) is not None]
        return RunRecord(objects(events, b'"run.'), rows, is_whole=is_whole, folder=folder)

    def named(self, name: str) -> list[Event]:
        """Return the events called `name`, in order."""
        return [event for event in self.events if event.get("event") == name]

    @property
    def is_rewound(self) -> bool:
        """Whether nothing has happened to the run since it was rewound."""
        return self.last_event.get("event") == EventName.RUN_REWOUND

    def newest(self, name: str) -> Event:
        """Return the last event called `name`; empty if there is none."""
        named = self.named(name)
        return named[-1] if named else {}

    @property
    def last_event(self) -> Event:
        """The last event; empty if there is none."""
        return self.events[-1] if self.events else {}

    @property
    def attempt(self) -> int | None:
        """The number of the newest attempt."""
        launched = whole(self.newest(EventName.RUN_LAUNCHED).get("attempt"))
        if launched or not self.rows:
            return launched
        return whole(self.rows[-1].get("attempt"))

    @property
    def job(self) -> str | None:
        """The SLURM job of the newest attempt."""
        return text_of(self.newest(EventName.RUN_LAUNCHED).get("job"))

    @cached_property
    def starts(self) -> dict[int, Event]:
        """The event `run.start` by attempt."""
        return self._by_attempt(EventName.RUN_START)

    @cached_property
    def completed(self) -> frozenset[int]:
        """The attempts that reached the step at which to end: continuing one is no restart."""
        return frozenset(self._by_attempt(EventName.RUN_END))

    def _by_attempt(self, name: str) -> dict[int, Event]:
        """Return the last event called `name` of each attempt."""
        found = {}
        for event in self.named(name):
            attempt = event.get("attempt")
            if isinstance(attempt, int):
                found[attempt] = event
        return found

    @cached_property
    def held_s(self) -> dict[int, float]:
        """Seconds from each attempt's first to its last event, without attempts of invalid time."""
        spans: dict[int, tuple[float, float]] = {}
        for event in self.events:
            attempt = event.get("attempt")
            at = event.get("at")
            if isinstance(attempt, int) and isinstance(at, (int, float)) and math.isfinite(at):
                begin, end = spans.get(attempt, (at, at))
                spans[attempt] = min(begin, at), max(end, at)
        return {attempt: end - begin for attempt, (begin, end) in spans.items()}

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts that logged `run.launched`, in order: place, first step and end's reason."""
        found = []
        for launched in self.named(EventName.RUN_LAUNCHED):
            number = launched.get("attempt")
            if not isinstance(number, int):
                continue
            own = RunRecord([event for event in self.events if event.get("attempt") == number])
            resumed = own.named(EventName.RUN_RESUMED)
            step = resumed[0].get("step") if resumed else 0
            first_step = step if isinstance(step, int) else 0
            place = _place(launched, self.starts.get(number, {}))
            job = str(launched.get("job") or "")
            found.append(Attempt(number, place, first_step, _end(own.events), job))
        return found


def _place(launched: Event, start: Event) -> str:
    """Return where an attempt's ranks ran: their number, launcher, nodes, job and processor."""
    ranks = whole(launched.get("ranks"))
    number_of_ranks = "? ranks" if ranks is None else count(ranks, "ranks")
    place = f"{number_of_ranks} by {launched.get('launcher', '?')}"
    nodes = launched.get("nodes")
    if isinstance(nodes, list) and nodes:
        place += f" on {', '.join(map(str, nodes))}"
    if launched.get("job"):
        place += f" in SLURM job {launched['job']}"
    processor = text_of(start.get("processor"))
    if processor:
        place += f" ({processor})"
    return place


def _end(own: Sequence[Event]) -> str:
    """Describe an attempt's end by its last ending event and the launcher's reason.

    The reason names lost ranks.
    """
    ends = [event for event in own if event.get("event") in _ENDS]
    last = ends[-1].get("event") if ends else None
    if last == EventName.RUN_END:
        return _DONE
    reason = _reason(ends) or "interrupted without a word: killed, or its node lost"
    if last == EventName.RUN_REQUEUED:
        return f"{reason}; queued again at step {ends[-1].get('step', '?')}"
    if last == EventName.RUN_REQUEUE_REFUSED:
        return f"{reason}; not queued again: {_first_line(ends[-1])}"
    return reason


def _reason(ends: Sequence[Event]) -> str:
    """Return the first reason that the launcher gave; empty if it gave none."""
    for event in ends:
        if event.get("event") not in (EventName.RUN_END, EventName.RUN_REQUEUE_REFUSED):
            return _first_line(event).replace(f"; {CONTINUES}", "")
    return ""


def _first_line(event: Event) -> str:
    return str(event.get("reason") or "interrupted").splitlines()[0]


def _is_sound(event: Event) -> bool:
    at = event.get("at", 0.0)
    attempt = event.get("attempt", 0)
    has_time = isinstance(at, (int, float)) and math.isfinite(at)
    return isinstance(event.get("event"), str) and has_time and isinstance(attempt, int)


def tail(path: Path, limit_bytes: int) -> tuple[bytes, bool]:
    """Return up to `limit_bytes` of a file's end, from a line's start, and whether that is all."""
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - limit_bytes)
            file.seek(start)
            text = file.read(limit_bytes)
    except OSError:
        return b"", not path.exists()
    if start == 0:
        return text, True
    return text[text.find(b"\n") + 1 :], False


def objects(text: bytes, holding: bytes = b"", last: int = 0) -> list[dict[str, Any]]:
    """Return the JSON objects of complete lines in `text` with `holding`, or its `last` ones."""
    found = []
    complete, _, _ = text.rpartition(b"\n")
    lines = [line for line in complete.split(b"\n") if line and holding in line]
    for line in lines[-last:]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def number(value: Any) -> float | None:
    """Return `value` if it is a finite number of plausible size, else None."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if abs(value) < _TOO_LARGE else None


def whole(value: Any) -> int | None:
    """Return `value` if it is a whole number that is not negative, else None."""
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 <= value < _TOO_LARGE else None


def text_of(value: Any) -> str | None:
    """Return `value` as text if it is non-blank text or a whole number, as job ids are, or None."""
    if isinstance(value, str):
        return value.strip() or None
    return str(value) if whole(value) is not None else None
