"""What the data stages hand to one another and to training: token sequences that say which tokens are trained on."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Document:
    """One sample: tokens int32[n] and whether each is to be predicted, bool[n]."""

    tokens: NDArray[np.int32]
    supervised: NDArray[np.bool_]
