"""Twenty samples from all over the data as text, cut where supervision begins and ends: what is really trained."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.data.samples import Samples
from pipeline_lib.data.tokenize.batches import Encoding
from pipeline_lib.data.tokenize.worker import Guard

PREVIEW_SAMPLES = 20


@dataclass(frozen=True)
class Preview:
    """The samples to show, as a task for a worker, which has the tokenizer."""

    sources: Sequence[str]  # [samples], the name of each one's source
    samples: Sequence[tuple[NDArray[np.int32], NDArray[np.bool_]]]  # tokens and their supervision

    def run(self, state: Encoding, guard: Guard) -> list[dict[str, Any]]:
        """preview.json: the source, the number of tokens and the pieces of each sample."""
        return [
            {"source": source, "tokens": len(tokens), "pieces": _pieces(state.encoder.tokenizer, tokens, supervised)}
            for source, (tokens, supervised) in zip(self.sources, self.samples, strict=True)
        ]


def preview_of(samples: Samples, names: Sequence[str]) -> Preview:
    """Samples of each source, whose names are `names`: at least one, and the more the larger the source is."""
    chosen = [
        (name, samples[int(number)])
        for name, first, end, count in zip(
            names,
            samples.source_offsets,
            samples.source_offsets[1:],
            _shares(np.diff(samples.source_offsets), PREVIEW_SAMPLES),
            strict=False,
        )
        for number in np.linspace(first, end - 1, count)
    ]
    arrays = [(np.array(document.tokens), np.array(document.supervised)) for _, document in chosen]
    return Preview([name for name, _ in chosen], arrays)


def _shares(sizes: NDArray[np.int64], total: int) -> list[int]:
    """`total` seats for parties of `sizes`, one for each that has any, the others by the method of D'Hondt."""
    seats = np.minimum(sizes, 1)
    while seats.sum() < min(total, sizes.sum()):
        seats[np.argmax(np.where(seats < sizes, sizes / (seats + 1), 0.0))] += 1
    return [int(number) for number in seats]


def _pieces(tokenizer: Any, tokens: NDArray[np.int32], supervised: NDArray[np.bool_]) -> list[dict[str, Any]]:
    bounds = [0, *(np.flatnonzero(np.diff(supervised)) + 1).tolist(), len(tokens)]
    return [
        {
            "text": tokenizer.decode(tokens[start:end].tolist(), skip_special_tokens=False),
            "supervised": bool(supervised[start]),
        }
        for start, end in zip(bounds, bounds[1:], strict=False)
    ]
