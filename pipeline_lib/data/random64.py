"""Random bits as a pure function of integers (splitmix64): the same on any machine and with any numpy.

numpy's own generators promise no stable streams between versions, and sample order, packing and the
weights of the tiny model are decided by these bits.
"""

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def key_of(*parts: int) -> int:
    """One 64-bit key for the integers `parts`; their order counts."""
    key = 0
    for part in parts:
        key = int(mix(np.array([(key + _GAMMA + part) & _MASK], dtype=np.uint64))[0])
    return key


def bits(key: int, count: int, start: int = 0) -> NDArray[np.uint64]:
    """Numbers `start` to `start + count` of the stream `key`: uint64[count], uniform."""
    counters = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    return mix(counters * np.uint64(_GAMMA) + np.uint64(key & _MASK))


def permutation(key: int, count: int) -> NDArray[np.int64]:
    """The numbers 0 to `count` - 1 in the random order that `key` names: int64[count]."""
    return np.argsort(bits(key, count), kind="stable").astype(np.int64, copy=False)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64, element by element: a bijection in which each input bit moves half the output."""
    mixed = (values ^ (values >> np.uint64(30))) * np.uint64(_MULTIPLIERS[0])
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MULTIPLIERS[1])
    return mixed ^ (mixed >> np.uint64(31))
