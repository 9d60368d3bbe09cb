"""What a worker of the tokenize stage hands back for a batch of rows: few arrays instead of many samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.data.rows.corpus import Rejected
from pipeline_lib.data.rows.unread import KeyCounts


@dataclass(frozen=True)
class Encoded:
    """A batch after encoding, its samples end to end. A conversation's number counts within the batch."""

    source: int  # number of the entry in data.train
    file: int  # number of the file in the source
    format: str | None
    rows: int
    rejected: Sequence[Rejected]
    keys: KeyCounts
    place: str  # where the rows lie
    content: NDArray[np.uint64]  # [conversations], equal for equal samples
    prompts: NDArray[np.uint64]  # [conversations], equal for what belongs to one side of a split
    turns: NDArray[np.int32]  # [conversations], to be trained on
    turns_found: NDArray[np.int32]  # [conversations], of those in a sample or a drop
    signatures: NDArray[Any] | None  # [conversations, PERMUTATIONS], where near duplicates are looked for
    drops: Sequence[tuple[int, str]]  # conversation and reason of each sample that is not trained on
    conversations: NDArray[np.int32]  # [samples], ascending
    lengths: NDArray[np.int64]  # [samples], in tokens
    truncated: NDArray[np.bool_]  # [samples]
    split: NDArray[np.bool_]  # [samples]
    asked_to_think: NDArray[np.int32]  # [samples, 2], turns whose prompts have thinking off, and on
    tokens: NDArray[np.int32]  # [sum of lengths]
    supervised: NDArray[np.bool_]  # [sum of lengths]
    how: str  # what tokenized them

    def check(self) -> None:
        """Raise IntegrityError unless each turn that is to be trained on is in a sample or a drop."""
        lost = np.flatnonzero(self.turns_found < self.turns)
        if len(lost):
            turns, found = int(self.turns[lost[0]]), int(self.turns_found[lost[0]])
            raise IntegrityError(
                f"{self.place}: of {turns} turns of a conversation to be trained on, {found} are in a sample or "
                f"dropped for a reason ({len(lost)} such conversations there); this is a bug, report it"
            )

    @property
    def repeated_tokens(self) -> int:
        """Tokens of those samples that repeat the beginning of a longer one of their conversation, pieces apart."""
        longest = np.zeros(len(self.content), dtype=np.int64)
        whole = ~self.split
        np.maximum.at(longest, self.conversations[whole], self.lengths[whole])
        return int(self.lengths[whole].sum() - longest.sum())

    def only(self, kept: NDArray[np.bool_]) -> "Encoded":
        """This without the conversations that are not `kept`, bool[conversations]; the others are numbered anew."""
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
            drops=[(int(numbers[conversation]), reason) for conversation, reason in self.drops if kept[conversation]],
            conversations=numbers[self.conversations[samples]].astype(np.int32),
            lengths=self.lengths[samples],
            truncated=self.truncated[samples],
            split=self.split[samples],
            asked_to_think=self.asked_to_think[samples],
            tokens=self.tokens[positions],
            supervised=self.supervised[positions],
        )
