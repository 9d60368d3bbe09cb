"""What the stages tokenize and shard leave in files: the ledger, the preview, the block indexes."""

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from pipeline_lib.records.record import Record

LEDGER_NAME = "ledger.json"
PREVIEW_NAME = "preview.json"
INDEX_NAME = "index.json"


@dataclass(frozen=True, kw_only=True)
class SourceFile(Record):
    """A source's file: the number of unread values by column or key, and of further keys."""

    name: str
    format: str
    rows: int
    unread: dict[str, int]
    unread_others: int


@dataclass(frozen=True, kw_only=True)
class Counts(Record):
    """The counts of rows and samples, of a source or of all.

    rows = conversations + quarantined + duplicates_dropped, and samples = kept + dropped.
    `duplicates` are counted whether or not they are dropped. `turns` are the turns to be trained
    on; `prompts` counts the trained turns by their prompt's thinking switch, on or off.
    `repeated_tokens` are the tokens of all samples of a conversation but its longest.
    """

    name: str
    format: str
    rows: int
    conversations: int
    quarantined: dict[str, int]
    duplicates: dict[str, int]
    duplicates_dropped: int
    turns: int
    samples: int
    kept: int
    truncated: int
    split: int
    dropped: dict[str, int]
    prompts: dict[str, int]
    tokens: int
    repeated_tokens: int
    supervised_tokens: int


@dataclass(frozen=True, kw_only=True)
class Source(Counts):
    """A source's counts, its files, and the percentiles of its kept samples' lengths, in tokens."""

    files: tuple[SourceFile, ...]
    length_percentiles: dict[str, float]
    held_out: bool = False


@dataclass(frozen=True, kw_only=True)
class Histogram(Record):
    """Counts of samples between `edges`, in tokens."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Ledger(Record):
    """The ledger of the tokenize stage."""

    sources: tuple[Source, ...]
    total: Counts
    length_percentiles: dict[str, float]
    length_histogram: Histogram


@dataclass(frozen=True, kw_only=True)
class PreviewPiece(Record):
    """A stretch of a training sample that is or is not supervised."""

    text: str
    supervised: bool


@dataclass(frozen=True, kw_only=True)
class PreviewSample(Record):
    """A training sample as the model sees it, `tokens` long."""

    source: str
    tokens: int
    pieces: tuple[PreviewPiece, ...]


@dataclass(frozen=True)
class BlockGroup(Record):
    """Consecutive blocks that an epoch uses `weight` times each.

    The block ids of groups follow one another.
    """

    weight: float
    blocks: int

    @cached_property
    def per_epoch(self) -> Fraction:
        """The blocks of an average epoch: blocks x decimal weight, so that 0.1 is exactly 1/10."""
        return Fraction(str(self.weight)) * self.blocks

    def used(self, epochs: int) -> int:
        """Return how many blocks the first `epochs` epochs use in total, counting each use."""
        return math.floor(epochs * self.per_epoch)


@dataclass(frozen=True)
class BlockIndex(Record):
    """The index of a folder of blocks.

    `tokens` excludes padding; `shards` is the number of blocks in each file; `epoch_blocks` is the
    number of blocks that the first epoch uses over all `groups`, each use counted; `largest_token`
    is the largest token id.
    """

    blocks: int
    block_tokens: int
    tokens: int
    supervised_tokens: int
    documents: int
    largest_token: int
    epoch_blocks: int
    groups: list[BlockGroup]
    shards: list[int]

    @property
    def packing_efficiency(self) -> float:
        """The fraction of positions that are not padding; 1 without blocks, which have none."""
        return 1.0 if not self.blocks else self.tokens / (self.blocks * self.block_tokens)

    @property
    def padding_fraction(self) -> float | None:
        """The fraction of positions that are padding; None without blocks."""
        return 1 - self.packing_efficiency if self.blocks else None
