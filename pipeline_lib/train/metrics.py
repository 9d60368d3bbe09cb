"""A run's metrics, a row per step: printed, appended to metrics.jsonl, kept in checkpoints."""

import json
import shutil
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.events import EventName, Observer, end_cut_line
from pipeline_lib.core.files import (
    disk_full_named,
    link_or_copy,
    read_jsonl,
    sha256_file,
    write_jsonl,
)
from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import FileEntry, describe_file, read_manifest
from pipeline_lib.core.units import gib
from pipeline_lib.train.guards import UNDONE

EVERY_S = 5.0
_NOTABLE_WAIT = 0.02  # of the step's time
_RECENT_STEPS = 20


def print_progress(say: Say, last_step: int) -> Observer:
    """Return an observer that prints every EVERY_S seconds and at the last step.

    It prints special events at once.
    """
    printed_s = -EVERY_S
    # of the last steps, including the time between them
    ends_s: deque[float] = deque(maxlen=_RECENT_STEPS + 1)

    def observe(name: str, fields: dict[str, Any]) -> None:
        nonlocal printed_s
        if (special := _special_line(name, fields)) is not None:
            say(special)
        if name != EventName.STEP_END:
            return
        ends_s.append(fields["elapsed_s"])
        if time.monotonic() - printed_s < EVERY_S and fields["step"] != last_step:
            return
        printed_s = time.monotonic()
        each_s = (
            (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) if len(ends_s) > 1 else fields["elapsed_s"]
        )
        left_s = (last_step - fields["step"]) * each_s
        say(f"step {fields['step']}/{last_step}  {'  '.join(_values(fields))}  ETA {clock(left_s)}")

    return observe


def _values(fields: dict[str, Any]) -> list[str]:
    values = [
        f"loss {number(fields['loss'], '.4f')}",
        f"lr {fields['lr']:.2e}",
        f"grad {number(fields['grad_norm'], '.2f')}",
        f"{fields['tokens_per_s']:,.0f} tokens/s",
    ]
    if "mfu" in fields:
        values.append(f"MFU {fields['mfu']:.1%}")
    values.append(gib(fields["peak_memory_bytes"]))
    if "gpu_power_w" in fields:
        values.append(f"{fields['gpu_power_w']:.0f} W")
    for what in ("data", "checkpoint"):
        wait_s = fields.get(f"{what}_wait_s", 0.0)
        if wait_s > _NOTABLE_WAIT * fields["step_s"]:
            values.append(f"{what} wait {wait_s:.2f} s")
    return values


def _special_line(name: str, fields: dict[str, Any]) -> str | None:
    """Return the line of an event printed at once: validation, refused step, rollback, profile."""
    if name == EventName.STEP_END and "validation_loss" in fields:
        return f"step {fields['step']}: held-out loss {number(fields['validation_loss'], '.4f')}"
    if name == EventName.STEP_SKIPPED:
        return f"step {fields['step']}: not applied: {fields['reason']}"
    if name == EventName.RUN_ROLLED_BACK:
        return f"step {fields['step']}: back to what was learned by step {fields['to_step']}"
    if name == EventName.RUN_PROCESSOR_CHANGED:
        return (
            f"warning: continuing on {fields['now']}; the checkpoint was saved on "
            f"{fields['before']}: the result can "
            "differ in the last bits from that of a run on one kind of processor"
        )
    if name == EventName.PROFILE_LEFT_OUT:
        return f"train.profile_every_steps: {fields['reason']}"
    if name != EventName.STEP_PROFILED:
        return None
    if "problem" in fields:
        return f"step {fields['step']}: {fields['problem']}"
    return (
        f"step {fields['step']}: {fields['step_s']:.3f} s profiled: "
        f"{fields['compute_fraction']:.1%} computing, "
        f"{fields['exposed_communication_fraction']:.1%} exchanging, "
        f"{fields['exposed_copy_fraction']:.1%} copying, {fields['idle_fraction']:.1%} idle"
    )


def append_metrics(path: Path) -> Observer:
    """Return an observer that appends each step's row to the file at `path`."""
    if path.exists():
        end_cut_line(path)

    def observe(name: str, fields: dict[str, Any]) -> None:
        if name == EventName.STEP_END:
            with disk_full_named(path), path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(fields) + "\n")

    return observe


def number(value: float | None, digits: str) -> str:
    """Format `value` by the format spec `digits`; None stands for a value that is not finite."""
    return "not finite" if value is None else format(value, digits)


def clock(seconds: float) -> str:
    """Format `seconds` as h:mm:ss or m:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


# The rows of a run, one per step: the latest in memory, the others in files that never change.
#
# A checkpoint holds all of them, in `metrics/`: hard links to the full files, and the latest in a
# file of its own. So saving takes as long after a million steps as after a thousand. Only the first
# rank has rows.
#
# Each full file is written twice, and checkpoints link the two copies in turn: a damaged block
# spoils every other checkpoint, and resuming falls back to the one between. Rows that are read back
# are compared with their hash first, and taken from the second copy if the first one is damaged.

ROWS_FOLDER = "metrics"  # of a checkpoint, and of the run's folder
ROWS_OF_A_FILE = 1024
COPIES = ("a", "b")  # folders below the run's

Row = dict[str, Any]


@dataclass(frozen=True)
class RowFile:
    """A full file: rows of `ROWS_OF_A_FILE` steps from `first_step` on, equal in all `copies`."""

    copies: tuple[Path, ...]
    first_step: int
    entry: FileEntry

    def rows(self) -> list[Row]:
        """Read the rows from the first copy that is whole. Raises IntegrityError if none is."""
        for path in self.copies:
            with suppress(OSError):
                if sha256_file(path) == self.entry.sha256:
                    return read_jsonl(path)
        raise IntegrityError(
            f"{self.copies[0]}: this file of metrics and its copy {self.copies[1]} are missing or "
            "damaged; check the disk, then run the same command again to continue from the last "
            "whole checkpoint"
        )


@dataclass(frozen=True)
class SavedRows:
    """An immutable snapshot of the rows up to a step, for a checkpoint."""

    files: tuple[RowFile, ...] = ()
    latest: tuple[Row, ...] = ()
    copy: int = 0  # index of the copy of each file that is linked

    def write(self, checkpoint: Path) -> dict[str, FileEntry]:
        """Write the rows to a checkpoint's folder; return new files' entries by relative path."""
        entries = {}
        for file in self.files:
            name = f"{ROWS_FOLDER}/{_file_name(file.first_step)}"
            link_or_copy(file.copies[self.copy], checkpoint / name)
            entries[name] = file.entry
        if self.latest:
            name = f"{ROWS_FOLDER}/{_file_name(self.latest[0]['step'])}"
            write_jsonl(checkpoint / name, list(self.latest))
            entries[name] = describe_file(checkpoint / name)
        return entries


class MetricsRows:
    """The rows of a run so far, of consecutive steps."""

    def __init__(self, folder: Path) -> None:
        """Start empty. Full files go to `folder`, which nothing else may use."""
        self._folder = folder
        self._files: list[RowFile] = []
        self._latest: list[Row] = []
        self._next_copy = 0

    def add(self, row: Row) -> None:
        """Append the row of the next step."""
        self._latest.append(row)
        if len(self._latest) == ROWS_OF_A_FILE:
            first_step = self._latest[0]["step"]
            copies = self._copies(_file_name(first_step))
            for path in copies:
                write_jsonl(path, self._latest)
            self._files.append(RowFile(copies, first_step, describe_file(copies[0])))
            self._latest = []

    def all(self) -> list[Row]:
        """Return all rows, read back from the files. Raises IntegrityError if a file is damaged."""
        return [row for file in self._files for row in file.rows()] + self._latest

    def saved(self) -> SavedRows:
        """Return what the next checkpoint writes; it links other copies than the one before."""
        copy = self._next_copy
        self._next_copy = (self._next_copy + 1) % len(COPIES)
        return SavedRows(tuple(self._files), tuple(self._latest), copy)

    def undo_after(self, step: int) -> None:
        """Mark the rows after `step` as undone, except those that have a verdict already.

        Raises IntegrityError if a file is damaged.
        """
        changed = [file for file in self._files if file.first_step + ROWS_OF_A_FILE - 1 > step]
        rows = [row for file in changed for row in file.rows()] + self._latest
        self._files = self._files[: len(self._files) - len(changed)]
        self._latest = []
        for row in rows:
            self.add(
                {**row, "verdict": UNDONE} if row["step"] > step and "verdict" not in row else row
            )

    def restore(self, checkpoint: Path) -> None:
        """Replace the rows by those of a verified checkpoint."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._files, self._latest = [], []
        entries = read_manifest(checkpoint).files
        files = _files_of(checkpoint)
        for path in files[:-1]:
            copies = self._copies(path.name)
            link_or_copy(path, copies[0])
            copies[1].parent.mkdir(exist_ok=True)
            with disk_full_named(copies[1]):
                shutil.copyfile(path, copies[1])
            first_step = int(path.stem.removeprefix("from-"))
            self._files.append(RowFile(copies, first_step, entries[f"{ROWS_FOLDER}/{path.name}"]))
        self._next_copy = 1  # not the copy that `checkpoint` links
        for row in (row for path in files[-1:] for row in read_jsonl(path)):
            self.add(row)

    def _copies(self, name: str) -> tuple[Path, ...]:
        return tuple(self._folder / copy / name for copy in COPIES)


def _files_of(checkpoint: Path) -> list[Path]:
    """Return the row files by step, the last one not full."""
    return sorted((checkpoint / ROWS_FOLDER).glob("*.jsonl"))


def _file_name(first_step: int) -> str:
    return f"from-{first_step:08d}.jsonl"
