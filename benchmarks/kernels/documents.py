"""Blocks full of documents, whose lengths are drawn as those of benchmarks/train."""

from dataclasses import dataclass

import numpy as np

from benchmarks.strategies import USED_TOKENS
from benchmarks.train.documents import LENGTHS
from pipeline_lib.data.blocks import Block
from pipeline_lib.model.batch import Batch, make_batch


@dataclass(frozen=True)
class Documents:
    """The lengths of the documents of a block, which they fill."""

    lengths: tuple[int, ...]

    @staticmethod
    def drawn(name: str, tokens: int, seed: int = 0) -> "Documents":
        """Of the lengths `name`, or all of that number: enough to fill `tokens`, the last cut."""
        if name not in LENGTHS:
            length = min(tokens, int(name))
            left = tokens % length
            return Documents((length,) * (tokens // length) + ((left,) if left else ()))
        draw, lengths = np.random.default_rng(seed), list[int]()
        mean, deviation, least, most = LENGTHS[name]
        while (left := tokens - sum(lengths)) > 0:
            lengths.append(min(left, int(np.clip(draw.lognormal(mean, deviation), least, most))))
        return Documents(tuple(lengths))

    @property
    def is_even(self) -> bool:
        """Whether all are of one length."""
        return len(set(self.lengths)) == 1

    @property
    def squared(self) -> int:
        """Their squared lengths, added up."""
        return sum(length * length for length in self.lengths)

    def batch(self, supervised: float = 1.0, seed: int = 0) -> Batch:
        """As the pipeline hands it to a model; the last part of each document is trained on."""
        owners = np.repeat(np.arange(len(self.lengths), dtype=np.int32), self.lengths)
        places = np.concatenate([np.arange(length) / length for length in self.lengths])
        tokens = np.minimum(np.random.default_rng(seed).zipf(1.3, len(owners)), USED_TOKENS).astype(
            np.int32
        )
        return make_batch([Block(tokens, places >= 1.0 - supervised, owners)])
