"""The documents of a race: the same for every side, drawn by the rank that takes them."""

import numpy as np
from numpy.typing import NDArray

from benchmarks.strategies import USED_TOKENS
from benchmarks.train.cases import Case
from pipeline_lib.data.documents import Document
from pipeline_lib.data.packing import pack

# Of documents in tokens: the parameters of a log-normal draw, and its bounds. Alpaca's answers have
# about 200 tokens, the turns of one character of a play tens.
LENGTHS: dict[str, tuple[float, float, int, int]] = {
    "65536": (11.09, 0.0, 65536, 65536),
    "8192": (9.01, 0.0, 8192, 8192),
    "4096": (8.32, 0.0, 4096, 4096),
    "1000": (6.8, 0.5, 64, 4096),
    "alpaca": (5.1, 0.6, 24, 1024),
    "huanhuan": (4.0, 0.4, 24, 160),
    "demo": (4.6, 0.6, 24, 256),
}
# shares of the blocks that are tried, until best fit gets there
FILLS = np.arange(1.0, 0.5, -0.004)


def documents_of(case: Case, rank: int, steps: int) -> list[list[Document]]:
    """What `rank` takes in each step."""
    random = np.random.default_rng(rank)

    def document(length: int) -> Document:
        tokens = np.minimum(random.zipf(1.3, length), USED_TOKENS).astype(np.int32)
        return Document(tokens, np.arange(length) >= int(length * case.supervised_from))

    return [
        [document(int(length)) for length in lengths] for lengths in lengths_of(case, rank, steps)
    ]


def lengths_of(case: Case, rank: int, steps: int) -> list[NDArray[np.int64]]:
    """The lengths of these documents in tokens."""
    random = np.random.default_rng((rank, 1))
    mean, deviation, least, most = LENGTHS[case.lengths]
    drawn = [random.lognormal(mean, deviation, case.rank_documents) for _ in range(steps)]
    return [_filling(lengths, case, least, min(most, case.max_tokens)) for lengths in drawn]


def _filling(lengths: NDArray[np.float64], case: Case, least: int, most: int) -> NDArray[np.int64]:
    """`lengths` times a factor near 1, so that they fill a step's blocks as best fit can."""
    room = case.rank_blocks * case.block_tokens
    for fill in FILLS:
        found = lengths
        for _ in range(4):  # the bounds take some of it away
            found = np.clip(found * (fill * room / found.sum()), least, most)
        whole = found.astype(np.int64)
        if len(pack(whole, case.block_tokens, 0)) <= case.rank_blocks:
            return whole
    raise ValueError(
        f"{case.name}: {case.rank_documents} documents do not fit {case.rank_blocks} blocks"
    )
