"""What the data stages hand to one another and to training: token sequences that say which tokens are trained on."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Document:
    """One sample: tokens int32[n] and whether each is to be predicted, bool[n]."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]


def prompt_length(document: Document) -> int:
    """Tokens before the first supervised one: what the model is given."""
    return int(document.supervised.argmax())


def first_answer(document: Document) -> list[int]:
    """The supervised tokens after the prompt, up to where somebody else speaks."""
    start = prompt_length(document)
    spoken = document.supervised[start:]
    length = len(spoken) if spoken.all() else int(spoken.argmin())
    return list(document.tokens[start : start + length].tolist())
