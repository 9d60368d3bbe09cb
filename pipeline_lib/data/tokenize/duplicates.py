"""Finds conversations that were seen before: equal ones by a 64-bit hash, similar ones by MinHash.

Both are asked in the order of the data, so the first of several is the one that stays, on every machine.
Similar ones need the library datasketch (the extra `dedup`).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline_lib.base.errors import DataError

PERMUTATIONS = 128  # of a signature: the error of an estimated similarity is about 1 / sqrt of it, 0.09 at the most
SHINGLE_CHARS = 5


class ExactDuplicates:
    """The hashes seen so far, in sorted arrays that double in size: 8 bytes each, and 16 while two are merged."""

    def __init__(self) -> None:
        """Nothing was seen."""
        self._levels: list[NDArray[np.uint64]] = []  # the largest first

    def seen(self, hashes: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Which of `hashes`, uint64[n], occurred before, here or in an earlier call; all of them are remembered."""
        found = np.ones(len(hashes), dtype=np.bool_)
        found[np.unique(hashes, return_index=True)[1]] = False
        for level in self._levels:
            places = np.minimum(np.searchsorted(level, hashes), len(level) - 1)
            found |= level[places] == hashes
        if not found.all():
            self._remember(np.sort(hashes[~found]))
        return found

    def _remember(self, level: NDArray[np.uint64]) -> None:
        while self._levels and len(self._levels[-1]) < 2 * len(level):
            level = np.concatenate([self._levels.pop(), level])
            level.sort(kind="stable")  # two sorted runs: a merge
        self._levels.append(level)


class NearDuplicates:
    """The signatures of the conversations that were like no earlier one. About 1 kB each."""

    def __init__(self, similarity: float) -> None:
        """Conversations of an estimated Jaccard similarity of at least `similarity` are alike. Raises DataError."""
        sketch = _datasketch()
        self._similarity = similarity
        self._min_hash = sketch.MinHash
        self._index = sketch.MinHashLSH(threshold=similarity, num_perm=PERMUTATIONS)
        self._signatures: list[NDArray[Any]] = []

    def seen(self, signatures: NDArray[Any], skip: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which of `signatures`, [n, PERMUTATIONS], are like an earlier one; those in `skip` are left alone."""
        found = np.zeros(len(signatures), dtype=np.bool_)
        for number in np.flatnonzero(~skip).tolist():
            signature = signatures[number]
            sketch = self._min_hash(num_perm=PERMUTATIONS)
            sketch.hashvalues = signature
            candidates = self._index.query(sketch)
            found[number] = any(self._alike(signature, self._signatures[key]) for key in candidates)
            if not found[number]:
                self._index.insert(len(self._signatures), sketch)
                self._signatures.append(signature)
        return found

    def _alike(self, one: NDArray[Any], other: NDArray[Any]) -> bool:
        return float(np.mean(one == other)) >= self._similarity


def signature_of(text: str) -> NDArray[Any]:
    """The MinHash signature of the 5-grams of `text`, [PERMUTATIONS]. Raises DataError without datasketch."""
    shingles = {text[start : start + SHINGLE_CHARS] for start in range(max(1, len(text) - SHINGLE_CHARS + 1))}
    sketch = _datasketch().MinHash(num_perm=PERMUTATIONS)
    sketch.update_batch([shingle.encode(errors="replace") for shingle in shingles])
    signature: NDArray[Any] = sketch.hashvalues
    return signature


def _datasketch() -> Any:
    try:
        import datasketch  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(
            "tokenize.near_duplicates needs the library datasketch, which is not installed: "
            "pip install 'qwen3-pipeline[dedup]', or leave the key out"
        ) from error
    return datasketch
