"""The data sources: their files, the settings for their rows, and the rows in batches.

A file with format `auto` has the format of its first usable row. A batch is bounded in rows and in
bytes, so that long rows need no more memory than short ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pipeline_lib.config.schema import Rows, source_key
from pipeline_lib.config.section import read_settings
from pipeline_lib.core.stage import Job
from pipeline_lib.data.batches import RowBatch, shown, size_of, wrong_file
from pipeline_lib.data.conversations import BadRow, WrongFile
from pipeline_lib.data.layouts import Layout, layout_of
from pipeline_lib.data.read_files import CorpusFile, value_of
from pipeline_lib.data.read_json import RawRow

BATCH_ROWS = 512
BATCH_BYTES = 1 << 20
LISTED_FILES = 3  # files that the name of a source lists
MADE_HERE = ("pydoc",)


@dataclass
class DataSource:
    """An entry of data.train or data.validation by its `key`, with its files' progress."""

    number: int
    key: str
    name: str
    reading: Rows
    files: Sequence[CorpusFile]
    sizes: Sequence[int] = field(default_factory=list)  # size of each file in bytes
    file: int = 0  # number of the file in work

    @property
    def is_held_out(self) -> bool:
        """Whether it is a source of data.validation."""
        return self.key.startswith("data.validation")

    def batches(self) -> Iterator[RowBatch]:
        """Yield the rows in batches, up to `max_rows`.

        Raises DataError if a file is unreadable or not usable.
        """
        left = self.reading.max_rows
        for number, file in enumerate(self.files):
            if left == 0:
                return
            self.file = number
            file.refuse_media(self.reading.ignored)
            for batch in self._batches_of(islice(file, left)):
                left = None if left is None else left - len(batch.rows)
                yield batch

    def _batches_of(self, file: Iterator[RawRow]) -> Iterator[RowBatch]:
        reading = self.reading
        layout = None
        if reading.format != "auto":
            layout = Layout(reading.format, reading.columns, reading.roles)
        first = None
        rows: list[RawRow] = []
        size_bytes = 0
        for row in file:
            if layout is None:
                try:
                    layout = layout_of(value_of(row), reading)
                    first = shown(row)
                except BadRow:
                    pass  # a worker detects the format again and rejects the row
                except WrongFile as wrong:
                    raise wrong_file(row, wrong, self.key) from wrong
            rows.append(row)
            size_bytes += size_of(row)
            if len(rows) == BATCH_ROWS or size_bytes >= BATCH_BYTES:
                yield RowBatch(
                    rows, self.number, self.key, self.file, layout, reading.columns, first
                )
                rows, size_bytes = [], 0
        if rows:
            yield RowBatch(rows, self.number, self.key, self.file, layout, reading.columns, first)


def open_sources(
    job: Job, readings: Sequence[dict[str, Any]] | None, validation_sources: int = 0
) -> list[DataSource]:
    """Return the job's sources in the config's order; `readings` are their `Rows` settings.

    The last `validation_sources` are those of data.validation.
    """
    names = sorted(
        (name for name in job.inputs if name.startswith("data.")), key=lambda name: int(name[5:])
    )
    sources: list[DataSource] = []
    taken: set[str] = set()
    for number, input_name in enumerate(names):
        sealed = job.inputs[input_name]
        key = source_key(number, len(names) - validation_sources)
        origin = sealed.manifest.spec["settings"]
        reading = read_settings(Rows, readings[number] if readings else {})
        own_keys = reading.columns.values()
        folder = sealed.folder()
        files = []
        for name in sorted(sealed.manifest.files):
            if origin["source"] in MADE_HERE:
                shown_name = str(origin["source"])
            else:
                shown_name = f"{origin['name']}/{name}" if "name" in origin else name
            if shown_name in taken:  # two folders with a train.jsonl each
                shown_name = f"{key}/{shown_name}"
            files.append(CorpusFile(folder / name, shown_name, own_keys))
        taken.update(file.name for file in files)
        # Without local paths: the ledger must not depend on where the files are.
        if "name" in origin:  # of a hub
            parts = [str(origin[key]) for key in ("name", "subset", "split") if key in origin]
            source_name = ":".join(parts)
        else:
            source_name = ", ".join(file.name for file in files[:LISTED_FILES])
            if len(files) > LISTED_FILES:
                source_name += f" and {len(files) - LISTED_FILES} more"
        sizes = [file.path.stat().st_size for file in files]
        sources.append(DataSource(number, key, source_name, reading, files, sizes))
    return sources


def fraction_read(sources: Sequence[DataSource], current: int) -> float:
    """Return the fraction of all files' bytes that was read, with source `current` in work."""
    total = sum(sum(source.sizes) for source in sources)
    done = sum(sum(source.sizes) for source in sources[:current])
    source = sources[current]
    done += sum(source.sizes[: source.file])
    return (done + source.sizes[source.file] * source.files[source.file].fraction_read) / max(
        1, total
    )
