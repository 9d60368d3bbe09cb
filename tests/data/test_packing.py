from bisect import bisect_left

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline_lib.core.errors import DataError
from pipeline_lib.data import packing
from pipeline_lib.data.packing import Bins, pack

lengths_and_capacity = st.integers(1, 200).flatmap(
    lambda capacity: st.tuples(st.lists(st.integers(1, capacity), max_size=200), st.just(capacity))
)


def lognormal(median: int, count: int, capacity: int) -> NDArray[np.int64]:
    """Lengths as data sets have them: few long ones, many short ones."""
    drawn = np.random.default_rng(0).lognormal(np.log(median), 1.0, count)
    return np.clip(drawn.astype(np.int64), 8, capacity)


def each(bins: Bins) -> list[NDArray[np.int64]]:
    return [bins[number] for number in range(len(bins))]


def fill(bins: Bins, lengths: NDArray[np.int64], capacity: int) -> float:
    return float(lengths.sum() / (len(bins) * capacity))


@pytest.mark.parametrize("window", [1, 16, packing.WINDOW_DOCUMENTS])
@given(case=lengths_and_capacity, seed=st.integers(0, 2**40))
def test_each_document_is_in_one_bin_and_no_bin_overflows(
    window: int, case: tuple[list[int], int], seed: int
) -> None:
    lengths, capacity = np.array(case[0], dtype=np.int64), case[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "WINDOW_DOCUMENTS", window)
        bins = pack(lengths, capacity, seed)
    assert bins.documents.dtype == np.int64 and bins.offsets.dtype == np.int64
    assert np.sort(bins.documents).tolist() == list(range(len(lengths)))
    assert bins.offsets[0] == 0 and bins.offsets[-1] == len(lengths)
    fills = [int(lengths[documents].sum()) for documents in each(bins)]
    assert len(fills) == len(bins) and all(0 < fill <= capacity for fill in fills)
    # Best fit opens a bin only when none has room: of each window, at most one bin is half empty.
    assert sum(2 * fill <= capacity for fill in fills) <= -(-len(lengths) // window)


@given(case=lengths_and_capacity)
def test_a_document_goes_where_it_leaves_the_least_room(case: tuple[list[int], int]) -> None:
    lengths, capacity = sorted(case[0], reverse=True), case[1]
    rooms: list[int] = []  # the same by trying every bin
    for length in lengths:
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append(min(fitting, default=capacity) - length)
    bins = pack(np.array(case[0], dtype=np.int64), capacity, 0)
    sizes = np.array(case[0], dtype=np.int64)
    assert sorted(capacity - int(sizes[documents].sum()) for documents in each(bins)) == sorted(
        rooms
    )


def test_the_same_seed_packs_the_same_and_another_otherwise() -> None:
    lengths = np.tile(np.arange(1, 2000) % 97 + 1, 70)
    assert len(lengths) > packing.WINDOW_DOCUMENTS
    first, again, other = pack(lengths, 256, 1), pack(lengths, 256, 1), pack(lengths, 256, 2)
    assert np.array_equal(first.documents, again.documents) and np.array_equal(
        first.offsets, again.offsets
    )
    assert not np.array_equal(first.documents, other.documents)


def test_the_bins_are_the_same_for_ever() -> None:
    # Golden values: what was packed on one machine must be found packed alike on any other.
    bins = pack(np.array([5, 3, 8, 2, 7, 1, 4, 6, 9, 2]), 10, 3)
    assert [documents.tolist() for documents in each(bins)] == [
        [8, 5],
        [2, 9],
        [4, 1],
        [7, 6],
        [0, 3],
    ]


@pytest.mark.parametrize(("median", "least"), [(40, 0.999), (350, 0.9995), (3000, 0.995)])
def test_little_stays_empty_whatever_the_lengths(median: int, least: float) -> None:
    lengths = lognormal(median, 150_000, 8192)
    assert fill(pack(lengths, 8192, 0), lengths, 8192) > least


@pytest.mark.parametrize("count", [1, 500, 501, 10_250])
def test_the_work_is_bounded_by_windows(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """With any number of documents, only a window of them is fitted together, each once."""
    windows: list[int] = []

    def counted(lengths: list[int], capacity: int) -> list[int]:
        windows.append(len(lengths))
        return best_fit(lengths, capacity)

    best_fit = packing._best_fit
    monkeypatch.setattr(packing, "_best_fit", counted)
    monkeypatch.setattr(packing, "WINDOW_DOCUMENTS", 500)
    pack(lognormal(350, count, 8192), 8192, 0)
    assert sum(windows) == count and max(windows) <= 500 and len(windows) == -(-count // 500)


def test_few_rooms_are_searched_for_each_document(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bin is found by bisection among the sizes of room there are, not by trying the bins."""
    searched: list[int] = []

    def counted(rooms: list[int], length: int) -> int:
        searched.append(len(rooms))
        return bisect_left(rooms, length)

    monkeypatch.setattr(packing, "bisect_left", counted)
    bins = pack(lognormal(350, 20_000, 1024), 1024, 0)
    assert len(bins) > 5_000 and len(searched) == 20_000
    assert max(searched) <= 1025


def test_a_document_longer_than_a_block_is_refused() -> None:
    with pytest.raises(DataError, match="document 1 has 11 tokens, more than the 10 of a block"):
        pack(np.array([3, 11, 2]), 10, 0)


def test_there_is_no_bin_before_the_first_or_after_the_last() -> None:
    bins = pack(np.array([], dtype=np.int64), 10, 0)
    assert len(bins) == 0 and bins.offsets.tolist() == [0]
    bins = pack(np.array([3, 9]), 10, 0)
    for number in (-1, 2):
        with pytest.raises(IndexError):
            bins[number]
