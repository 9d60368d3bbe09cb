"""The data sources of the tokenize stage: which files, how their rows are read, and the rows in batches.

A file whose format is `auto` is read as what its first usable row is. A batch is bounded in rows and in bytes,
so that long rows cost no more memory than short ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from pipeline_lib.base.stage import Job, Sealed
from pipeline_lib.config.schema import read_settings
from pipeline_lib.config.sources import Rows
from pipeline_lib.data.rows.corpus import CorpusFile, RawRow, value_of
from pipeline_lib.data.rows.layout import BadRow, Format, Layout, WrongFile, detect
from pipeline_lib.data.tokenize.batches import Batch, shown, wrong_file

BATCH_ROWS = 512
BATCH_BYTES = 1 << 20
LISTED_FILES = 3  # in the name of a source
MADE_HERE = ("pydoc",)


@dataclass
class Source:
    """An entry of data.train, and how far its files were read."""

    number: int
    name: str
    reading: Rows
    files: Sequence[CorpusFile]
    sizes: Sequence[int] = field(default_factory=list)  # of the files, in bytes
    file: int = 0  # the one in work

    def batches(self) -> Iterator[Batch]:
        """All rows, up to `max_rows`. Raises DataError for a file that cannot be read, or has several formats."""
        left = self.reading.max_rows
        for number, file in enumerate(self.files):
            if left == 0:
                return
            self.file = number
            for batch in self._batches_of(islice(file, left)):
                left = None if left is None else left - len(batch.rows)
                yield batch

    def _batches_of(self, file: Iterator[RawRow]) -> Iterator[Batch]:
        given = self.reading.format
        layout = None if given == "auto" else self._layout(given)
        first = None
        rows: list[RawRow] = []
        size_bytes = 0
        for row in file:
            if layout is None and (found := self._format_of(row)) is not None:
                layout, first = self._layout(found), shown(row)
            rows.append(row)
            size_bytes += _size(row)
            if len(rows) == BATCH_ROWS or size_bytes >= BATCH_BYTES:
                yield self._batch(rows, layout, first)
                rows, size_bytes = [], 0
        if rows:
            yield self._batch(rows, layout, first)

    def _batch(self, rows: list[RawRow], layout: Layout | None, first: str | None) -> Batch:
        return Batch(rows, self.number, self.file, layout, self.reading.columns, first)

    def _layout(self, row_format: Format) -> Layout:
        return Layout(row_format, self.reading.columns, self.reading.roles)

    def _format_of(self, row: RawRow) -> Format | None:
        try:
            return detect(value_of(row), self.reading.columns)
        except BadRow:
            return None
        except WrongFile as wrong:
            raise wrong_file(row, wrong, self.number) from wrong


def open_sources(job: Job, readings: Sequence[dict[str, Any]] | None) -> list[Source]:
    """The sources of the job, in the order of the config; `readings` are their settings of `Rows`."""
    names = sorted((name for name in job.inputs if name.startswith("data.")), key=lambda name: int(name[5:]))
    sources: list[Source] = []
    taken: set[str] = set()
    for number, input_name in enumerate(names):
        sealed = job.inputs[input_name]
        folder, files = sealed.folder(), []
        for name in sorted(sealed.manifest.files):
            shown_name = _shown_name(sealed, name)
            if shown_name in taken:  # two folders with a train.jsonl each
                shown_name = f"data.train[{number}]/{shown_name}"
            files.append(CorpusFile(folder / name, shown_name))
        taken.update(file.name for file in files)
        reading = read_settings(Rows, readings[number] if readings else {})
        sizes = [file.path.stat().st_size for file in files]
        sources.append(Source(number, _source_name(sealed, files), reading, files, sizes))
    return sources


def fraction_read(sources: Sequence[Source], current: int) -> float:
    """Of the bytes of all files, with source number `current` in work."""
    total = sum(sum(source.sizes) for source in sources)
    done = sum(sum(source.sizes) for source in sources[:current])
    source = sources[current]
    done += sum(source.sizes[: source.file])
    return (done + source.sizes[source.file] * source.files[source.file].fraction_read) / max(1, total)


def _shown_name(sealed: Sealed, name: str) -> str:
    """Users know their files by name, and those of a hub by its repository; what was made here goes by its source."""
    settings = sealed.manifest.spec["settings"]
    if settings["source"] in MADE_HERE:
        return str(settings["source"])
    return f"{settings['name']}/{name}" if "name" in settings else name


def _source_name(sealed: Sealed, files: Sequence[CorpusFile]) -> str:
    """No path of a user: the ledger is the same wherever the files lie."""
    settings = sealed.manifest.spec["settings"]
    if "name" in settings:  # of a hub
        return ":".join(str(settings[key]) for key in ("name", "subset", "split") if key in settings)
    names = [file.name for file in files]
    more = len(names) - LISTED_FILES
    return ", ".join(names[:LISTED_FILES]) + (f" and {more} more" if more > 0 else "")


def _size(row: RawRow) -> int:
    return len(row.text) if row.text is not None else _text_size(row.value)


def _text_size(value: Any) -> int:
    """About as many bytes as `value` takes."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_text_size, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_text_size, value))
    return 8
