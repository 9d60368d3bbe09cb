"""An append-only log of named events, one JSON object a line: what happened, when and where.

Where means in which process. Progress lines, reports and fault-injection tests subscribe to events,
so that production code needs no branches for tests.
"""

import json
import os
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any

from pipeline_lib.core.files import disk_full_named

Observer = Callable[[str, dict[str, Any]], None]


class EventName(StrEnum):
    """The names of all events."""

    RUN_LAUNCHED = "run.launched"  # an attempt began: the ranks are about to start
    RUN_START = "run.start"  # the first rank is ready to train
    # it has made its first pass, and loaded its checkpoint: the steps begin
    RUN_STEPS = "run.steps"
    RUN_RESUMED = "run.resumed"  # the run continues from a checkpoint
    RUN_PROCESSOR_CHANGED = "run.processor_changed"  # that was saved on another kind of CPU or GPU
    RUN_ROLLED_BACK = "run.rolled_back"  # weights and moments went back to a checkpoint
    # the checkpoints after a step are set aside: a user or the guards ask for it
    RUN_REWOUND = "run.rewound"
    RUN_END = "run.end"  # the last step is done
    # an attempt ended before the last step; the same command continues
    RUN_INTERRUPTED = "run.interrupted"
    # an attempt ended with an error that the same command would meet again
    RUN_FAILED = "run.failed"
    RUN_REQUEUED = "run.requeued"  # SLURM was asked to queue the job again
    RUN_REQUEUE_REFUSED = "run.requeue_refused"  # the job is not queued again, or SLURM refused to
    RANK_DOING = "rank.doing"  # observers only: what this rank does between steps, such as saving
    RANK_LOST = "rank.lost"  # a rank ended, or stopped answering
    STEP_BEGIN = "step.begin"  # observers only
    STEP_END = "step.end"  # observers only
    STEP_SKIPPED = "step.skipped"  # a step changed no weight
    STEP_PROFILED = "step.profiled"  # where the GPU's time of a step went
    PROFILE_LEFT_OUT = "profile.left_out"  # a step that was to be profiled was not
    SAMPLES_WRITTEN = "samples.written"  # answers to held-out prompts were written
    CHECKPOINT_SAVED = "checkpoint.saved"  # a checkpoint was sealed
    CHECKPOINT_REJECTED = "checkpoint.rejected"  # a checkpoint was set aside as damaged
    # copies for saves go through memory that is not page-locked
    CHECKPOINT_SLOW_COPIES = "checkpoint.slow_copies"


class EventLog:
    """An event log that appends each line to a file in one write, and notifies observers."""

    def __init__(
        self, path: Path | None, observers: tuple[Observer, ...] = (), **common: Any
    ) -> None:
        """Write to `path`, or only notify observers if it is None; each event gets `common`."""
        self._path = path
        self._observers = observers
        self._common = common
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            end_cut_line(path)

    def emit(self, name: str, **fields: Any) -> None:
        """Record the event `name`.

        `at` is wall-clock time; `monotonic_s` is for measuring durations.
        """
        if self._path is not None:
            event = {
                "at": time.time(),
                "monotonic_s": time.monotonic(),
                "event": name,
                **self._common,
                **fields,
            }
            line = json.dumps(event, ensure_ascii=False) + "\n"
            with disk_full_named(self._path):
                descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                try:
                    os.write(descriptor, line.encode())
                finally:
                    os.close(descriptor)
        self.notify(name, **fields)

    def notify(self, name: str, **fields: Any) -> None:
        """Notify the observers without writing: for step events that are recorded elsewhere."""
        for observer in self._observers:
            observer(name, fields)


def end_cut_line(path: Path) -> None:
    """End the last line of the file at `path` with a newline; create the file if it is missing.

    A kill can cut the last line short. Without a newline it would corrupt the next line too.
    """
    with disk_full_named(path), path.open("a+b") as file:
        if file.tell() and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
            file.write(b"\n")


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events in `path`, without lines that a kill cut short; empty without a file."""
    if not path.exists():
        return []
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events
