"""Detection of duplicate conversations: equal ones by a 64-bit hash, similar ones by MinHash.

Both run in the order of the data, so the first of several duplicates stays, on every machine.
Similar conversations need the library datasketch (the extra `dedup`).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.core.errors import DataError
from pipeline_lib.core.text import how_to_install

# length of a signature; the error of an estimated similarity is at most about 1 / sqrt(128) = 0.09
PERMUTATIONS = 128
SHINGLE_CHARS = 5
SHINGLES_AT_ONCE = 1 << 14  # each takes 1 kB while it is hashed


class ExactDuplicates:
    """The hashes so far, in sorted arrays of doubling size: 8 bytes a hash, 16 in merges."""

    def __init__(self) -> None:
        """Start without hashes."""
        self._levels: list[NDArray[np.uint64]] = []  # the largest first

    def seen(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Return which of `hashes`, uint64[n], occurred before, in any call; remember them all."""
        is_known = np.ones(len(hashes), dtype=np.bool_)
        is_known[np.unique(hashes, return_index=True)[1]] = False
        for level in self._levels:
            places = np.minimum(np.searchsorted(level, hashes), len(level) - 1)
            is_known |= level[places] == hashes
        if not is_known.all():
            new = np.sort(hashes[~is_known])
            while self._levels and len(self._levels[-1]) < 2 * len(new):
                new = np.concatenate([self._levels.pop(), new])
                new.sort(kind="stable")  # merges two sorted runs
            self._levels.append(new)
        return is_known


class NearDuplicates:
    """The signatures of conversations that are similar to no earlier one, about 1 kB each."""

    def __init__(self, similarity: float) -> None:
        """Start without signatures; `similarity` is the least Jaccard similarity of duplicates.

        It is estimated, and for near duplicates. Raises DataError without datasketch.
        """
        sketch = _datasketch()
        self._similarity = similarity
        self._min_hash = sketch.MinHash
        self._index = sketch.MinHashLSH(threshold=similarity, num_perm=PERMUTATIONS)
        self._signatures: list[NDArray[Any]] = []

    def seen(self, signatures: NDArray[Any], skip: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which `signatures`, [n, PERMUTATIONS], resemble earlier ones; ignore `skip`."""
        is_known = np.zeros(len(signatures), dtype=np.bool_)
        for number in np.flatnonzero(~skip).tolist():
            signature = signatures[number]
            sketch = self._min_hash(num_perm=PERMUTATIONS)
            sketch.hashvalues = signature
            earlier = (self._signatures[key] for key in self._index.query(sketch))
            is_known[number] = any(
                float(np.mean(signature == other)) >= self._similarity for other in earlier
            )
            if not is_known[number]:
                self._index.insert(len(self._signatures), sketch)
                self._signatures.append(signature)
        return is_known


def signature_of(text: str) -> NDArray[Any]:
    """Return the MinHash signature of the character 5-grams of `text`, [PERMUTATIONS].

    Raises DataError without datasketch.
    """
    sketch = _datasketch().MinHash(num_perm=PERMUTATIONS)
    count = max(1, len(text) - SHINGLE_CHARS + 1)
    for first in range(0, count, SHINGLES_AT_ONCE):
        starts = range(first, min(count, first + SHINGLES_AT_ONCE))
        shingles = {text[start : start + SHINGLE_CHARS] for start in starts}
        sketch.update_batch([shingle.encode(errors="replace") for shingle in shingles])
    signature: NDArray[Any] = sketch.hashvalues
    return signature


def _datasketch() -> Any:
    try:
        import datasketch  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(
            "tokenize.near_duplicates needs the library datasketch, which is not installed: "
            f"{how_to_install('dedup')}, or leave the key out"
        ) from error
    return datasketch
