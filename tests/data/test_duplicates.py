import builtins
import time
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_lib.core.errors import DataError
from pipeline_lib.data import duplicates as duplicates_module
from pipeline_lib.data import row_hashes
from pipeline_lib.data.duplicates import ExactDuplicates, NearDuplicates, signature_of

batches = st.lists(st.lists(st.integers(0, 40), max_size=20), max_size=30)


@given(batches)
def test_whatever_came_before_is_seen(found: list[list[int]]) -> None:
    duplicates = ExactDuplicates()
    before: set[int] = set()
    for numbers in found:
        expected = []
        for number in numbers:
            expected.append(number in before)
            before.add(number)
        hashes = np.array(numbers, dtype=np.uint64) + np.uint64(2**63)
        assert duplicates.seen(hashes).tolist() == expected


def test_a_million_hashes_take_sixteen_bytes_each_at_the_most() -> None:
    duplicates = ExactDuplicates()
    rng = np.random.default_rng(0)
    for _ in range(250):
        duplicates.seen(rng.integers(0, 2**64, 4000, dtype=np.uint64))
    levels = [len(level) for level in duplicates._levels]
    assert sum(levels) == 1_000_000
    assert all(larger >= 2 * smaller for larger, smaller in zip(levels, levels[1:], strict=False))


TEXT = (
    "The quick brown fox jumps over the lazy dog, again and again, until it is tired of the dog "
    "and of jumping."
)


def test_similar_texts_are_seen_and_different_ones_are_not() -> None:
    texts = [
        TEXT,
        "Nothing of the kind was ever written about a cat.",
        TEXT.replace("quick", "quack"),
        TEXT[::-1],
    ]
    signatures = np.stack([signature_of(text) for text in texts])
    nothing = np.zeros(4, dtype=np.bool_)
    assert NearDuplicates(0.8).seen(signatures, nothing).tolist() == [False, False, True, False]
    assert NearDuplicates(0.98).seen(signatures, nothing).tolist() == [False, False, False, False]


def test_what_is_an_exact_duplicate_is_not_asked_again() -> None:
    near = NearDuplicates(0.8)
    signatures = np.stack([signature_of(TEXT), signature_of(TEXT)])
    assert near.seen(signatures, np.array([False, True])).tolist() == [False, False]
    assert near.seen(signatures[:1], np.array([False])).tolist() == [True]


@pytest.mark.parametrize("text", ["", "a", "abcd", "你好"])
def test_short_texts_have_a_signature_of_their_own(text: str) -> None:
    assert np.array_equal(signature_of(text), signature_of(text))
    assert not np.array_equal(signature_of(text), signature_of(text + "."))


def test_a_long_text_has_the_signature_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = signature_of(TEXT * 3)
    monkeypatch.setattr(duplicates_module, "SHINGLES_AT_ONCE", 7)
    assert np.array_equal(signature_of(TEXT * 3), whole)


MARKS = [*map(chr, range(0x300, 0x345)), *"\u0f71\u0f72\u0f73\u0f74\u0f75\u0323\u0307\u3099\u09be"]


@given(
    text=st.text(
        st.sampled_from([*MARKS, *"aAé\u1ebf\u212bか\u09c7\u1100\u1161\u11a8가 "]), max_size=20
    )
)
def test_texts_are_compared_in_nfc(text: str) -> None:
    assert row_hashes._composed(text) == unicodedata.normalize("NFC", text.strip())


@pytest.mark.parametrize("marks", ["\u0301\u0327", "\u0f73"])
def test_marks_in_the_wrong_order_take_linear_time(marks: str) -> None:
    """Python alone takes 20 s of CPU time and more."""
    begun_s = time.process_time()
    row_hashes._composed("a" + marks * 200_000)
    assert time.process_time() - begun_s < 5


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasketch":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r"near_duplicates needs .* pip install -e '.\[dedup\]'"):
        NearDuplicates(0.5)
