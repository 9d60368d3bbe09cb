import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_lib.base.errors import DataError
from pipeline_lib.data import packing
from pipeline_lib.data.packing import pack

lengths_and_capacity = st.integers(1, 200).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=200), st.just(capacity))
)


@given(lengths_and_capacity, st.integers(0, 2**40))
def test_each_document_is_in_one_bin_and_no_bin_overflows(case: tuple[list[int], int], seed: int) -> None:
    lengths, capacity = np.array(case[0], dtype=np.int64), case[1]
    bins = pack(lengths, capacity, seed)
    assert sorted(number for documents in bins for number in documents) == list(range(len(lengths)))
    fills = [int(lengths[documents].sum()) for documents in bins]
    assert all(0 < fill <= capacity for fill in fills)
    # Best fit opens a bin only when none has room: at most one bin is half empty.
    assert sum(2 * fill <= capacity for fill in fills) <= 1


def test_the_same_seed_packs_the_same_and_another_otherwise() -> None:
    lengths = np.arange(1, 2000) % 97 + 1
    many = np.tile(lengths, 20)  # more than a window
    assert len(many) > packing.WINDOW_DOCUMENTS
    assert pack(many, 256, 1) == pack(many, 256, 1)
    assert pack(many, 256, 1) != pack(many, 256, 2)


def test_it_is_fast_and_leaves_little_empty() -> None:
    lengths = np.minimum(2048, np.random.default_rng(0).lognormal(5.5, 1.0, 100_000).astype(np.int64) + 1)
    start_s = time.monotonic()
    bins = pack(lengths, 4096, 0)
    assert time.monotonic() - start_s < 5
    assert lengths.sum() / (len(bins) * 4096) > 0.99


def test_a_document_longer_than_a_block_is_refused() -> None:
    with pytest.raises(DataError, match="document 1 has 11 tokens, more than the 10 of a block"):
        pack(np.array([3, 11, 2]), 10, 0)


def test_no_documents_make_no_bins() -> None:
    assert pack(np.array([], dtype=np.int64), 10, 0) == []
