"""The result of a worker for a batch of rows: a few arrays instead of many samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.data.keys import KeyCounts
from pipeline_lib.data.read_files import Rejected


@dataclass(frozen=True)
class TooLong:
    """The number of rows with a sample too long, and the longest sample's place and tokens."""

    rows: int = 0
    tokens: int = 0
    place: str = ""

    def __add__(self, more: "TooLong") -> "TooLong":
        """Return both, of which the first is named if they are equally long."""
        longest = max(self, more, key=lambda one: one.tokens)
        return replace(longest, rows=self.rows + more.rows)


@dataclass(frozen=True)
class Encoded:
    """An encoded batch, its samples concatenated. Conversations are numbered within the batch."""

    source: int  # number of the source
    file: int  # number of the file in the source
    format: str | None
    rows: int
    rejected: Sequence[Rejected]
    keys: KeyCounts
    place: str  # the position of the rows in their file
    content: NDArray[np.uint64]  # [conversations], equal for equal samples
    # [conversations], equal for conversations that belong to one side of a split
    prompts: NDArray[np.uint64]
    turns: NDArray[np.int32]  # [conversations], number of turns to be trained on
    # [conversations], number of those turns that are in a sample or a drop
    turns_found: NDArray[np.int32]
    # [conversations, PERMUTATIONS], None unless near duplicates are searched
    signatures: NDArray[Any] | None
    # conversation and reason of each sample that is not trained on
    drops: Sequence[tuple[int, str]]
    conversations: NDArray[np.int32]  # [samples], ascending
    lengths: NDArray[np.int64]  # [samples], in tokens
    truncated: NDArray[np.bool_]  # [samples]
    split: NDArray[np.bool_]  # [samples]
    # [samples, 2], number of turns whose prompts have thinking off, and on
    asked_to_think: NDArray[np.int32]
    tokens: NDArray[np.int32]  # [sum of lengths]
    supervised: NDArray[np.bool_]  # [sum of lengths]
    how: str  # the tokenizer implementation
    too_long: TooLong = TooLong()  # counted only if `over_long` is error

    def check(self) -> None:
        """Raise IntegrityError unless each turn to be trained on is in a sample or a drop."""
        lost = np.flatnonzero(self.turns_found < self.turns)
        if len(lost):
            turns = int(self.turns[lost[0]])
            found = int(self.turns_found[lost[0]])
            raise IntegrityError(
                f"{self.place}: of {turns} turns of a conversation to be trained on, {found} are "
                f"in a sample or dropped for a reason ({len(lost)} such conversations there); this "
                "is a bug, report it"
            )

    @property
    def repeated_tokens(self) -> int:
        """The tokens that each conversation's longest sample repeats; split pieces do not count.

        These are the tokens of all its other samples.
        """
        longest = np.zeros(len(self.content), dtype=np.int64)
        whole = ~self.split
        np.maximum.at(longest, self.conversations[whole], self.lengths[whole])
        return int(self.lengths[whole].sum() - longest.sum())

    def only(self, kept: NDArray[np.bool_]) -> "Encoded":
        """Return a copy of only the conversations in `kept`, bool[conversations], renumbered.

        It is the object itself if all are kept.
        """
        if kept.all():
            return self
        numbers = np.cumsum(kept) - 1
        samples = kept[self.conversations]
        positions = np.repeat(samples, self.lengths)
        return replace(
            self,
            content=self.content[kept],
            prompts=self.prompts[kept],
            turns=self.turns[kept],
            turns_found=self.turns_found[kept],
            signatures=None if self.signatures is None else self.signatures[kept],
            drops=[
                (int(numbers[conversation]), reason)
                for conversation, reason in self.drops
                if kept[conversation]
            ],
            conversations=numbers[self.conversations[samples]].astype(np.int32),
            lengths=self.lengths[samples],
            truncated=self.truncated[samples],
            split=self.split[samples],
            asked_to_think=self.asked_to_think[samples],
            tokens=self.tokens[positions],
            supervised=self.supervised[positions],
        )
