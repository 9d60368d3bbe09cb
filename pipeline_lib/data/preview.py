"""The preview: samples from all sources as text, cut where supervision begins and ends.

It shows what is trained on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.data.documents import Samples
from pipeline_lib.data.encode import Encoder
from pipeline_lib.data.pool import Guard
from pipeline_lib.records.data import PreviewPiece, PreviewSample

PREVIEW_SAMPLES = 20


@dataclass(frozen=True)
class Preview:
    """A task for a worker, which has the tokenizer: decode the samples of the preview."""

    sources: Sequence[str]  # [samples], the name of each sample's source
    # tokens and their supervision mask
    samples: Sequence[tuple[NDArray[np.int32], NDArray[np.bool_]]]

    def __call__(self, state: Encoder, guard: Guard) -> list[PreviewSample]:
        """Return the samples as the model sees them."""
        found = []
        for source, (tokens, supervised) in zip(self.sources, self.samples, strict=True):
            bounds = [0, *(np.flatnonzero(np.diff(supervised)) + 1).tolist(), len(tokens)]
            pieces = [
                PreviewPiece(
                    text=state.tokenizer.decode(
                        tokens[start:end].tolist(), skip_special_tokens=False
                    ),
                    supervised=bool(supervised[start]),
                )
                for start, end in pairwise(bounds)
            ]
            found.append(PreviewSample(source=source, tokens=len(tokens), pieces=tuple(pieces)))
        return found


def preview_of(samples: Samples, names: Sequence[str]) -> Preview:
    """Return the preview of the first sources, `names`: a sample each, the rest by size.

    Each gets at least one sample; the rest is in proportion to size.
    """
    sizes = np.diff(samples.source_offsets)[: len(names)]
    counts = np.minimum(sizes, 1)
    while counts.sum() < min(PREVIEW_SAMPLES, sizes.sum()):  # D'Hondt's method
        counts[np.argmax(np.where(counts < sizes, sizes / (counts + 1), 0.0))] += 1
    sources, arrays = [], []
    for name, first, size, count in zip(
        names, samples.source_offsets[: len(names)], sizes, counts, strict=True
    ):
        for number in np.linspace(first, first + size - 1, count):
            document = samples[int(number)]
            sources.append(name)
            arrays.append((np.array(document.tokens), np.array(document.supervised)))
    return Preview(sources, arrays)
