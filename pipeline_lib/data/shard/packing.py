"""Packs documents into bins of constant capacity: best-fit decreasing, inside windows drawn by a seed.

Windows bound the work and mix the documents; only the last few bins of a window stay loose. The result is two flat
arrays, so that ten million documents cost bytes and not objects.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.base.errors import DataError
from pipeline_lib.data.random64 import key_of, permutation

WINDOW_DOCUMENTS = 1 << 17


@dataclass(frozen=True)
class Bins:
    """Bin b holds the documents numbered `documents[offsets[b]:offsets[b + 1]]`, the longest first."""

    documents: NDArray[np.int64]  # [documents]
    offsets: NDArray[np.int64]  # [bins + 1]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, number: int) -> NDArray[np.int64]:
        if not 0 <= number < len(self):
            raise IndexError(f"bin {number} of {len(self)}")
        return self.documents[self.offsets[number] : self.offsets[number + 1]]


def pack(lengths: NDArray[np.integer], capacity: int, seed: int) -> Bins:
    """Bins of documents whose `lengths` (int[documents]) add up to at most `capacity`.

    Each document is in exactly one bin, whole. Raises DataError if one is longer than `capacity`.
    """
    if len(lengths) and int(lengths.max()) > capacity:
        number = int(lengths.argmax())
        raise DataError(f"document {number} has {lengths[number]} tokens, more than the {capacity} of a block")
    shuffled = permutation(key_of(seed), len(lengths))
    documents, sizes = [shuffled[:0]], [shuffled[:0]]
    for window in np.array_split(shuffled, max(1, -(-len(lengths) // WINDOW_DOCUMENTS))):
        longest_first = window[np.argsort(-lengths[window].astype(np.int64), kind="stable")]
        bin_of = np.array(_best_fit(lengths[longest_first].tolist(), capacity), dtype=np.int64)
        documents.append(longest_first[np.argsort(bin_of, kind="stable")])
        sizes.append(np.bincount(bin_of))
    return Bins(np.concatenate(documents), np.cumsum(np.concatenate([[0], *sizes]), dtype=np.int64))


def _best_fit(lengths: Iterable[int], capacity: int) -> list[int]:
    """The bin of each document: the fullest that has room for it, else a new one."""
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
