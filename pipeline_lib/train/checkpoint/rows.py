"""The metrics rows of a run, one for each step: the latest in memory, the others in files that never change.

A checkpoint holds all of them, in `metrics/`: hard links to the full files, and the latest in a file of its own. So
saving takes as long after a million steps as after a thousand. Only the first rank has rows.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_lib.base import fsio
from pipeline_lib.base.manifest import FileEntry, describe_file, read_manifest
from pipeline_lib.base.run_folder import METRICS_NAME
from pipeline_lib.train.guards import UNDONE

ROWS_FOLDER = "metrics"  # of a checkpoint, and of the run's folder
ROWS_OF_A_FILE = 1024

Row = dict[str, Any]


@dataclass(frozen=True)
class RowFile:
    """A full file: the rows of `ROWS_OF_A_FILE` steps from `first_step` on."""

    path: Path
    first_step: int
    entry: FileEntry


@dataclass(frozen=True)
class SavedRows:
    """The rows up to a step, for a checkpoint; nothing of it changes until it is written."""

    files: tuple[RowFile, ...] = ()
    latest: tuple[Row, ...] = ()

    def write(self, checkpoint: Path) -> dict[str, FileEntry]:
        """Write them to the folder of a checkpoint: its new files."""
        folder = checkpoint / ROWS_FOLDER
        for file in self.files:
            fsio.link_or_copy(file.path, folder / file.path.name)
        found = {f"{ROWS_FOLDER}/{file.path.name}": file.entry for file in self.files}
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

    def add(self, row: Row) -> None:
        """Take in the row of the next step."""
        self._latest.append(row)
        if len(self._latest) == ROWS_OF_A_FILE:
            first_step = self._latest[0]["step"]
            path = self._folder / _file_name(first_step)
            fsio.write_jsonl(path, self._latest)
            self._files.append(RowFile(path, first_step, describe_file(path)))
            self._latest = []

    def all(self) -> list[Row]:
        """All of them, read back."""
        return [row for file in self._files for row in fsio.read_jsonl(file.path)] + self._latest

    def saved(self) -> SavedRows:
        """What a checkpoint writes of them."""
        return SavedRows(tuple(self._files), tuple(self._latest))

    def undo_after(self, step: int) -> None:
        """Let the rows after `step` say that their update was taken back, unless they had none."""
        changed = [file for file in self._files if file.first_step + ROWS_OF_A_FILE - 1 > step]
        rows = [row for file in changed for row in fsio.read_jsonl(file.path)] + self._latest
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
            own = self._folder / path.name
            fsio.link_or_copy(path, own)
            self._files.append(RowFile(own, _first_step(path), entries[f"{ROWS_FOLDER}/{path.name}"]))
        for row in (row for path in files[-1:] for row in fsio.read_jsonl(path)):
            self.add(row)


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
