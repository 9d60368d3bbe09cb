"""Packs documents into bins of constant capacity: best-fit decreasing, inside windows drawn by a seed.

Windows bound the work and mix the lengths; only the last few bins of a window stay loose.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.base.errors import DataError
from pipeline_lib.data.random64 import key_of, permutation

WINDOW_DOCUMENTS = 1 << 14


def pack(lengths: NDArray[np.integer], capacity: int, seed: int) -> list[list[int]]:
    """The bins, each a list of document numbers whose lengths add up to at most `capacity`.

    Each document of `lengths` (int[documents]) is in exactly one bin, whole. Raises DataError if one is longer
    than `capacity`.
    """
    if len(lengths) and int(lengths.max()) > capacity:
        number = int(lengths.argmax())
        raise DataError(f"document {number} has {lengths[number]} tokens, more than the {capacity} of a block")
    shuffled = permutation(key_of(seed), len(lengths))
    bins: list[list[int]] = []
    for first in range(0, len(lengths), WINDOW_DOCUMENTS):
        window = shuffled[first : first + WINDOW_DOCUMENTS]
        longest_first = window[np.argsort(-lengths[window].astype(np.int64), kind="stable")]
        bins += _best_fit(longest_first.tolist(), lengths[longest_first].tolist(), capacity)
    return bins


def _best_fit(documents: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each document into the fullest bin that has room for it, else into a new one."""
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # bins by the room they have left
    rooms: list[int] = []  # the keys of `by_room`, sorted
    for document, length in zip(documents, lengths, strict=True):
        position = bisect_left(rooms, length)
        if position == len(rooms):
            chosen, room = len(bins), capacity
            bins.append([])
        else:
            room = rooms[position]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[position]
        bins[chosen].append(document)
        left = room - length
        if left not in by_room:
            by_room[left] = []
            insort(rooms, left)
        by_room[left].append(chosen)
    return bins
