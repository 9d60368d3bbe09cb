"""Which samples are held out, and which share a block: pure functions of tokenize's arrays.

So the evaluation knows from which source a held-out document comes, though blocks do not record it.

Documents are packed into bins of constant capacity: best-fit decreasing within random windows of
documents. Windows bound the work and mix the documents; only the last few bins of a window are not
nearly full. The result is two flat arrays, because Python objects for ten million documents would
need too much memory.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.config.schema import VALIDATION_SOURCES, Data, Shard
from pipeline_lib.config.section import read_settings
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.documents import Samples, key_of, mix, permutation

WINDOW_DOCUMENTS = 1 << 17


@dataclass(frozen=True)
class Bins:
    """Bins of documents: bin b is `documents[offsets[b]:offsets[b + 1]]`, the longest first."""

    documents: NDArray[np.int64]  # [documents]
    offsets: NDArray[np.int64]  # [bins + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        if not 0 <= number < len(self):
            raise IndexError(f"bin {number} of {len(self)}")
        return self.documents[self.offsets[number] : self.offsets[number + 1]]


def pack(lengths: NDArray[np.integer], capacity: int, seed: int) -> Bins:
    """Pack documents of `lengths` (int[documents], tokens) into bins of at most `capacity` tokens.

    Each document is in exactly one bin and is never cut. Raises DataError if one is longer than
    `capacity`.
    """
    if len(lengths) and int(lengths.max()) > capacity:
        number = int(lengths.argmax())
        raise DataError(
            f"document {number} has {lengths[number]} tokens, more than the {capacity} of a block"
        )
    shuffled = permutation(key_of(seed), len(lengths))
    documents = [shuffled[:0]]
    sizes = [shuffled[:0]]
    for window in np.array_split(shuffled, max(1, -(-len(lengths) // WINDOW_DOCUMENTS))):
        longest_first = window[np.argsort(-lengths[window].astype(np.int64), kind="stable")]
        bin_of = np.array(_best_fit(lengths[longest_first].tolist(), capacity), dtype=np.int64)
        documents.append(longest_first[np.argsort(bin_of, kind="stable")])
        sizes.append(np.bincount(bin_of))
    return Bins(np.concatenate(documents), np.cumsum(np.concatenate([[0], *sizes]), dtype=np.int64))


def _best_fit(lengths: Iterable[int], capacity: int) -> list[int]:
    """Return the bin of each document: the fullest bin that has room for it, else a new one."""
    bin_of: list[int] = []
    count = 0
    by_room: dict[int, list[int]] = {}  # bins by the room they have left
    rooms: list[int] = []  # the keys of `by_room`, sorted
    for length in lengths:
        position = bisect_left(rooms, length)
        if position == len(rooms):
            chosen, room = count, capacity
            count += 1
        else:
            room = rooms[position]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[position]
        bin_of.append(chosen)
        left = room - length
        if left not in by_room:
            by_room[left] = []
            insort(rooms, left)
        by_room[left].append(chosen)
    return bin_of


DEFAULT_FRACTION = Data.model_fields["validation_fraction"].default


@dataclass(frozen=True)
class Split:
    """A shard stage's settings: its section, and what it holds out, of which sources' weights.

    All samples of the last `validation_sources` sources are held out, and `fraction` of those of
    the others. `weights` are those of the others, None if all are 1.
    """

    layout: Shard
    fraction: float
    validation_sources: int
    weights: tuple[float, ...] | None

    @staticmethod
    def of(settings: Mapping[str, Any], where: Mapping[str, Any]) -> "Split":
        """Return the settings in a spec of the shard stage. Raises IntegrityError."""
        left = dict(settings)
        fraction = float(left.pop("validation_fraction", DEFAULT_FRACTION))
        validation_sources = int(left.pop(VALIDATION_SOURCES, 0))
        weights = left.pop("weights", None)
        layout = read_settings(Shard, {**left, **where})
        return Split(
            layout, fraction, validation_sources, None if weights is None else tuple(weights)
        )

    def held_out(self, samples: Samples) -> NDArray[np.bool_]:
        """Return the mask of the samples that belong to validation: bool[samples]."""
        mask = choose_held_out(samples, self.fraction, self.layout.seed)
        if self.validation_sources:
            mask[samples.source_offsets[-1 - self.validation_sources] :] = True
        return mask

    def pack(self, samples: Samples, numbers: NDArray[np.int64]) -> Bins:
        """Pack the samples `numbers` into the bins of a group of blocks."""
        bins = pack(np.diff(samples.offsets)[numbers], self.layout.block_tokens, self.layout.seed)
        return Bins(numbers[bins.documents], bins.offsets)

    def held_out_order(self, samples: Samples) -> NDArray[np.int64]:
        """Return each held-out sample's number in validation block order: int64[documents]."""
        return self.pack(samples, np.flatnonzero(self.held_out(samples))).documents


def choose_held_out(samples: Samples, fraction: float, seed: int) -> NDArray[np.bool_]:
    """Return the mask of the samples that belong to validation: bool[samples].

    A conversation is held out if the hash of its first user message and its row's own system
    message, mixed with the seed, falls below `fraction` of the hash range. So equal conversations,
    several answers to one question, and turns of one conversation in separate rows are never on
    both sides, and data added later moves no sample.
    """
    drawn = mix(samples.prompts ^ np.uint64(key_of(seed)))
    held_out: NDArray[np.bool_] = (drawn < np.uint64(int(fraction * 2**64)))[samples.conversations]
    return held_out
