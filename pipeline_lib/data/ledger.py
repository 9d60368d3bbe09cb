"""Account for each row and sample of the tokenize stage; no inconsistent ledger is written.

The ledgers of files and sources make ledger.json, and the tables for the log.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from io import StringIO

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline_lib.config.schema import Tokenize
from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.units import count
from pipeline_lib.data.encoded import Encoded
from pipeline_lib.data.how_to_call import THINKING_OFF, THINKING_ON
from pipeline_lib.data.keys import KeyCounts
from pipeline_lib.records.data import Counts, Histogram, Ledger, Source, SourceFile

PERCENTILES = (1, 10, 50, 90, 99)
HISTOGRAM_BINS = 40
LISTED_KEYS = 20
TABLE_COLUMNS = (
    "rows",
    "quarantined",
    "duplicates",
    "samples",
    "dropped",
    "kept",
    "truncated",
    "split",
    "tokens",
    "supervised_tokens",
)


@dataclass
class FileLedger:
    """The counts of one file of a source."""

    name: str
    format: str = ""
    rows: int = 0
    keys: KeyCounts = field(default_factory=KeyCounts)

    def record(self) -> SourceFile:
        """Return the entry for ledger.json."""
        return SourceFile(
            name=self.name,
            format=self.format,
            rows=self.rows,
            unread=sorted_counts(self.keys.unread),
            unread_others=self.keys.others,
        )


@dataclass
class SourceLedger:
    """The counts of one source.

    rows = conversations + quarantined + duplicates_dropped, and samples = kept + dropped.
    `duplicates` are counted whether or not they are dropped. A text counts as a conversation of one
    turn, a piece of a split sample as a sample. `turns` are the turns to be trained on; `prompts`
    counts the trained turns by their prompt's thinking switch, on or off. `repeated_tokens` are the
    tokens of all samples of a conversation but its longest.
    """

    name: str
    files: list[FileLedger] = field(default_factory=list)
    rows: int = 0
    conversations: int = 0
    quarantined: Counter[str] = field(default_factory=Counter)
    duplicates: Counter[str] = field(default_factory=Counter)
    duplicates_dropped: int = 0
    turns: int = 0
    kept: int = 0
    truncated: int = 0
    split: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    prompts: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    repeated_tokens: int = 0
    supervised_tokens: int = 0

    @property
    def format(self) -> str:
        """The distinct formats of the files; empty if no row was understood."""
        return ", ".join(sorted({file.format for file in self.files if file.format}))

    @property
    def samples(self) -> int:
        """The number of samples, kept and dropped."""
        return self.kept + self.dropped.total()

    def count_samples(self, encoded: Encoded) -> None:
        """Add a batch's conversations and samples, from which duplicates were removed."""
        self.conversations += len(encoded.content)
        self.dropped.update(reason for _, reason in encoded.drops)
        self.turns += int(encoded.turns.sum())
        self.kept += len(encoded.lengths)
        self.truncated += int(encoded.truncated.sum())
        self.split += int(encoded.split.sum())
        off, on = encoded.asked_to_think.sum(axis=0).tolist()
        self.prompts.update({THINKING_OFF: off, THINKING_ON: on})
        self.tokens += len(encoded.tokens)
        self.repeated_tokens += encoded.repeated_tokens
        self.supervised_tokens += int(encoded.supervised.sum())

    def check(self) -> None:
        """Raise IntegrityError unless every row is accounted for.

        `Encoded.check` does the same for turns.
        """
        added = self.conversations + self.quarantined.total() + self.duplicates_dropped
        if self.rows != added:
            found = f"{self.rows} rows, and {added} accounted for"
            raise IntegrityError(
                f"{self.name}: the ledger does not add up ({found}); this is a bug, report it"
            )
        if self.files and self.rows != sum(file.rows for file in self.files):
            raise IntegrityError(
                f"{self.name}: the files do not add up to {self.rows} rows; this is a bug, report "
                "it"
            )

    def counts(self) -> Counts:
        """Return the counts for ledger.json."""
        return Counts(
            name=self.name,
            format=self.format,
            rows=self.rows,
            conversations=self.conversations,
            quarantined=sorted_counts(self.quarantined),
            duplicates=sorted_counts(self.duplicates),
            duplicates_dropped=self.duplicates_dropped,
            turns=self.turns,
            samples=self.samples,
            kept=self.kept,
            truncated=self.truncated,
            split=self.split,
            dropped=sorted_counts(self.dropped),
            prompts=sorted_counts(self.prompts),
            tokens=self.tokens,
            repeated_tokens=self.repeated_tokens,
            supervised_tokens=self.supervised_tokens,
        )

    def record(self, lengths: NDArray[np.int64], held_out: bool) -> Source:
        """Return the entry for ledger.json; `lengths` are those of the kept samples, in tokens."""
        return Source(
            **vars(self.counts()),
            files=tuple(file.record() for file in self.files),
            length_percentiles=percentiles(lengths),
            held_out=held_out,
        )


def sorted_counts(counter: Counter[str]) -> dict[str, int]:
    """Return the counts that are not zero, sorted by name."""
    return {name: number for name, number in sorted(counter.items()) if number}


def total_of(sources: Sequence[SourceLedger]) -> SourceLedger:
    """Return the sum of `sources`."""
    total = SourceLedger("total")
    for source in sources:
        for key, value in vars(source).items():
            if not isinstance(value, str):
                setattr(total, key, getattr(total, key) + value)
    return total


def ledger_of(
    sources: Sequence[SourceLedger],
    lengths: Sequence[NDArray[np.int64]],
    trained: int | None = None,
) -> Ledger:
    """Return ledger.json's content: the sources, their sum, and the sample-length distribution.

    `lengths` are the lengths of the kept samples of each source, in tokens. The sources after the
    first `trained`, if given, are held out. Raises IntegrityError if the counts are inconsistent.
    """
    for source, found in zip(sources, lengths, strict=True):
        source.check()
        if len(found) != source.kept or int(found.sum()) != source.tokens:
            raise IntegrityError(
                f"{source.name}: the arrays do not hold what the ledger says; this is a bug, "
                "report it"
            )
    every = np.concatenate(lengths)
    longest = int(every.max())
    counts, edges = np.histogram(every, bins=min(HISTOGRAM_BINS, longest), range=(0, longest))
    first_held_out = len(sources) if trained is None else trained
    records = [
        source.record(found, held_out=number >= first_held_out)
        for number, (source, found) in enumerate(zip(sources, lengths, strict=True))
    ]
    return Ledger(
        sources=tuple(records),
        total=total_of(sources).counts(),
        length_percentiles=percentiles(every),
        length_histogram=Histogram(edges=tuple(edges.tolist()), counts=tuple(counts.tolist())),
    )


def too_many_left_out(ledger: Ledger, limits: Tokenize) -> Iterator[str]:
    """Yield what a sealed tokenize stage has left out, if that is more than `limits` allow."""
    if problem := too_many_unusable(ledger.total, limits):
        yield f"tokenize.max_quarantined_fraction: {problem}; raise it or fix the rows"
    for source in ledger.sources:
        if problem := too_many_lost(source, limits):
            yield f"tokenize.max_dropped_fraction: {problem}; raise it, or tokenize.max_tokens"


def too_many_unusable(total: SourceLedger | Counts, limits: Tokenize) -> str | None:
    """Return how many rows of `total` cannot be used, if those are more than `limits` allow."""
    unusable = sum(total.quarantined.values())
    allowed = limits.max_quarantined_fraction
    if unusable <= allowed * total.rows:
        return None
    return (
        f"{unusable:,} of {count(total.rows, 'rows')} cannot be used "
        f"({unusable / total.rows:.2%}), and tokenize.max_quarantined_fraction allows {allowed:.2%}"
    )


def too_many_lost(source: SourceLedger | Counts, limits: Tokenize) -> str | None:
    """Return how many of `source`'s samples are not trained as they are, if above `limits`."""
    lost = sum(source.dropped.values()) + source.truncated
    allowed = limits.max_dropped_fraction
    if lost <= allowed * source.samples:
        return None
    return (
        f"{source.name}: {lost:,} of {count(source.samples, 'samples')} "
        f"({lost / source.samples:.2%}) are dropped or "
        f"cut, and tokenize.max_dropped_fraction allows {allowed:.2%}"
    )


def percentiles(lengths: NDArray[np.int64]) -> dict[str, float]:
    """Return p1, p10, p50, p90, p99 and max of `lengths` in tokens; empty without samples."""
    if not len(lengths):
        return {}
    found = {f"p{q}": float(np.percentile(lengths, q)) for q in PERCENTILES}
    return {**found, "max": float(lengths.max())}


def table(sources: Sequence[SourceLedger]) -> list[str]:
    """Return the sources and their sum as lines of aligned text."""
    drawn = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    drawn.add_column("source", overflow="fold")
    drawn.add_column("format")
    for column in TABLE_COLUMNS:
        drawn.add_column(column.replace("_tokens", ""), justify="right")
    ledgers = list(sources)
    if len(sources) > 1:
        ledgers.append(total_of(sources))
    for ledger in ledgers:
        values = [getattr(ledger, column) for column in TABLE_COLUMNS]
        numbers = [value.total() if isinstance(value, Counter) else value for value in values]
        drawn.add_row(ledger.name, ledger.format, *(f"{number:,}" for number in numbers))
    text = StringIO()
    Console(
        file=text, width=300, no_color=True, force_terminal=False, highlight=False, markup=False
    ).print(drawn)
    return [line.rstrip() for line in text.getvalue().splitlines() if line.strip()]


def unread_lines(sources: Sequence[SourceLedger]) -> list[str]:
    """Return a line on unread keys for each group of a source's files with the same ones."""
    alike: dict[tuple[int, frozenset[str]], list[FileLedger]] = {}
    for number, source in enumerate(sources):
        for file in source.files:
            if file.keys.unread:
                alike.setdefault((number, frozenset(file.keys.unread)), []).append(file)
    lines = []
    for files in alike.values():
        counts = Counter[str]()
        others = sum(file.keys.others for file in files)
        for file in files:
            counts.update(file.keys.unread)
        keys = [f"{name!r} in {number:,}" for name, number in sorted(counts.items())]
        listed = ", ".join(keys[:LISTED_KEYS])
        left_out = len(keys) - LISTED_KEYS
        more = f" and {left_out:,} more" if left_out > 0 else ""
        if others:
            more += f", and {count(others, 'values')} of further keys"
        name = files[0].name
        if len(files) > 1:
            name += f" and {count(len(files) - 1, 'files')} like it"
        lines.append(f"tokenize: {name}: columns and keys that are not read: {listed}{more}")
    return lines
