"""The metrics rows of a run, one for each step: the latest in memory, the others in files that never change.

A checkpoint holds all of them, in `metrics/`: hard links to the full files, and the latest in a file of its own. So
saving takes as long after a million steps as after a thousand. Only the first rank has rows.

Each full file is written twice, and checkpoints link the two copies in turns: a damaged block spoils every other
checkpoint, and resuming falls back to the one between. What is read back is compared with its hash first, and taken
from the second copy if the first one is damaged.
"""

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.base import fsio
from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.base.manifest import FileEntry, describe_file, read_manifest
from pipeline_lib.base.run_folder import METRICS_NAME
from pipeline_lib.train.guards import UNDONE

ROWS_FOLDER = "metrics"  # of a checkpoint, and of the run's folder
ROWS_OF_A_FILE = 1024
COPIES = ("a", "b")  # folders below the run's

Row = dict[str, Any]


@dataclass(frozen=True)
class RowFile:
    """A full file: the rows of `ROWS_OF_A_FILE` steps from `first_step` on, the same in all `copies`."""

    copies: tuple[Path, ...]
    first_step: int
    entry: FileEntry

    def rows(self) -> list[Row]:
        """Read back from the first copy that is whole. Raises IntegrityError if none is."""
        for path in self.copies:
            with suppress(OSError):
                if fsio.sha256_file(path) == self.entry.sha256:
                    return fsio.read_jsonl(path)
        raise IntegrityError(
            f"{self.copies[0]}: this file of metrics and its copy {self.copies[1]} are missing or damaged; "
            "check the disk, then run the same command again to continue from the last whole checkpoint"
        )


@dataclass(frozen=True)
class SavedRows:
    """The rows up to a step, for a checkpoint; nothing of it changes until it is written."""

    files: tuple[RowFile, ...] = ()
    latest: tuple[Row, ...] = ()
    copy: int = 0  # which one of each file is linked

    def write(self, checkpoint: Path) -> dict[str, FileEntry]:
        """Write them to the folder of a checkpoint: its new files."""
        folder = checkpoint / ROWS_FOLDER
        found = {}
        for file in self.files:
            name = _file_name(file.first_step)
            fsio.link_or_copy(file.copies[self.copy], folder / name)
            found[f"{ROWS_FOLDER}/{name}"] = file.entry
        if self.latest:
            name = _file_name(self.latest[0]["step"])
            fsio.write_jsonl(folder / name, list(self.latest))
            found[f"{ROWS_FOLDER}/{name}"] = describe_file(folder / name)
        return found


class Rows:
    """The rows of a run so far, of consecutive steps."""

    def __init__(self, folder: Path) -> None:
        """Begin with none. Full files go to `folder`, which nobody else uses."""
        self._folder = folder
        self._files: list[RowFile] = []
        self._latest: list[Row] = []
        self._next_copy = 0

    def add(self, row: Row) -> None:
        """Take in the row of the next step."""
        self._latest.append(row)
        if len(self._latest) == ROWS_OF_A_FILE:
            first_step = self._latest[0]["step"]
            copies = self._copies(_file_name(first_step))
            for path in copies:
                fsio.write_jsonl(path, self._latest)
            self._files.append(RowFile(copies, first_step, describe_file(copies[0])))
            self._latest = []

    def all(self) -> list[Row]:
        """All of them, read back. Raises IntegrityError."""
        return [row for file in self._files for row in file.rows()] + self._latest

    def saved(self) -> SavedRows:
        """What the next checkpoint writes of them: it links other copies than the one before."""
        copy, self._next_copy = self._next_copy, (self._next_copy + 1) % len(COPIES)
        return SavedRows(tuple(self._files), tuple(self._latest), copy)

    def undo_after(self, step: int) -> None:
        """Let the rows after `step` say that their update was taken back, unless they had none.

        Raises IntegrityError.
        """
        changed = [file for file in self._files if file.first_step + ROWS_OF_A_FILE - 1 > step]
        rows = [row for file in changed for row in file.rows()] + self._latest
        self._files, self._latest = self._files[: len(self._files) - len(changed)], []
        for row in rows:
            self.add({**row, "verdict": UNDONE} if row["step"] > step and "verdict" not in row else row)

    def restore(self, checkpoint: Path) -> None:
        """Take those of a verified checkpoint instead."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._files, self._latest = [], []
        entries = read_manifest(checkpoint).files
        files = _files_of(checkpoint)
        for path in files[:-1]:
            copies = self._copies(path.name)
            fsio.link_or_copy(path, copies[0])
            copies[1].parent.mkdir(exist_ok=True)
            with fsio.disk_full_named(copies[1]):
                shutil.copyfile(path, copies[1])
            self._files.append(RowFile(copies, _first_step(path), entries[f"{ROWS_FOLDER}/{path.name}"]))
        self._next_copy = 1  # not what `checkpoint` links
        for row in (row for path in files[-1:] for row in fsio.read_jsonl(path)):
            self.add(row)

    def _copies(self, name: str) -> tuple[Path, ...]:
        return tuple(self._folder / copy / name for copy in COPIES)


def read_rows(checkpoint: Path) -> list[Row]:
    """All rows that a verified checkpoint holds."""
    return [row for path in _files_of(checkpoint) for row in fsio.read_jsonl(path)]


def _files_of(checkpoint: Path) -> list[Path]:
    """In the order of their steps, the last one not full; earlier versions of the code wrote one file."""
    return sorted([*checkpoint.glob(METRICS_NAME), *(checkpoint / ROWS_FOLDER).glob("*.jsonl")])


def _file_name(first_step: int) -> str:
    return f"from-{first_step:08d}.jsonl"


def _first_step(path: Path) -> int:
    return int(path.stem.removeprefix("from-"))
