"""Accounts for every row and every sample of the tokenize stage; a ledger that does not add up is never written."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.data.encode import Drop, Sample

PERCENTILES = (1, 10, 50, 90, 99)
HISTOGRAM_BINS = 40


@dataclass
class SourceLedger:
    """What became of the rows of one file."""

    name: str
    format: str = ""
    rows: int = 0
    conversations: int = 0
    quarantined: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    kept: int = 0
    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    supervised_tokens: int = 0

    def count_sample(self, sample: Sample | Drop) -> None:
        """Book one outcome of the encoder."""
        self.samples += 1
        if isinstance(sample, Drop):
            self.dropped[sample.value] += 1
            return
        self.kept += 1
        self.truncated += sample.truncated
        self.tokens += len(sample.tokens)
        self.supervised_tokens += int(sample.supervised.sum())

    def check(self) -> None:
        """Raise IntegrityError unless every row and every sample is accounted for."""
        if self.rows != self.conversations + self.quarantined.total():
            raise IntegrityError(f"{self.name}: {self.rows} rows do not add up in the ledger; this is a bug, report it")
        if self.samples != self.kept + self.dropped.total():
            raise IntegrityError(f"{self.name}: {self.samples} samples do not add up in the ledger; report this bug")

    def to_json(self) -> dict[str, Any]:
        """The form in which ledger.json holds it."""
        counters = {"quarantined": sorted_counts(self.quarantined), "dropped": sorted_counts(self.dropped)}
        return {**vars(self), **counters}


def sorted_counts(counter: Counter[str]) -> dict[str, int]:
    """The counts by name, the same for equal counters."""
    return dict(sorted(counter.items()))


def total_of(sources: list[SourceLedger]) -> SourceLedger:
    """The sum of `sources`."""
    total = SourceLedger("total", ", ".join(sorted({source.format for source in sources if source.format})))
    for source in sources:
        for key, value in vars(source).items():
            if not isinstance(value, str):
                setattr(total, key, getattr(total, key) + value)
    return total


def ledger_json(sources: list[SourceLedger], lengths: NDArray[np.int64]) -> dict[str, Any]:
    """ledger.json: the sources, their sum, and how long the kept samples are (`lengths`, in tokens)."""
    total = total_of(sources)
    for source in (*sources, total):
        source.check()
    if len(lengths) != total.kept or int(lengths.sum()) != total.tokens:
        raise IntegrityError("the arrays do not hold what the ledger says; this is a bug, report it")
    percentiles = {f"p{q}": float(np.percentile(lengths, q)) for q in PERCENTILES}
    counts, edges = np.histogram(lengths, bins=min(HISTOGRAM_BINS, int(lengths.max())), range=(0, int(lengths.max())))
    return {
        "sources": [source.to_json() for source in sources],
        "total": total.to_json(),
        "length_percentiles": {**percentiles, "max": int(lengths.max())},
        "length_histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
    }
