"""Packing a million documents on one core: how full the blocks are, and how long it takes."""

import statistics
from functools import partial

import numpy as np

from benchmarks.measure import seconds, show, spread
from pipeline_lib.data.packing import pack

DOCUMENTS = 1_000_000
BLOCK_TOKENS = 8192
# medians, lognormal with sigma 1
LENGTHS = {"chat-like": 350, "reasoning-like": 3000, "tens of tokens": 40}


def run() -> None:
    """Print a line for each kind of lengths."""
    random = np.random.default_rng(0)
    rows = []
    for name, median in LENGTHS.items():
        lengths = np.clip(
            random.lognormal(np.log(median), 1.0, DOCUMENTS).astype(np.int64), 8, BLOCK_TOKENS
        )
        taken = seconds(partial(pack, lengths, BLOCK_TOKENS, seed=0))
        blocks = len(pack(lengths, BLOCK_TOKENS, seed=0))
        full = int(lengths.sum()) / (blocks * BLOCK_TOKENS)
        rate = blocks / statistics.median(taken)
        rows.append(
            [
                f"{name}, median {median}",
                spread(taken),
                f"{blocks:,}",
                f"{rate:,.0f}",
                f"{full:.3%}",
            ]
        )
    title = f"pack: {DOCUMENTS:,} documents into blocks of {BLOCK_TOKENS} tokens, one core"
    show(title, ["lengths", "time", "blocks", "blocks/s", "full"], rows)
