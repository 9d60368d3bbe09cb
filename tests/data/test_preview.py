from pathlib import Path

import numpy as np
import pytest

from pipeline_lib.data.documents import Samples
from pipeline_lib.data.preview import preview_of
from pipeline_lib.data.samples_writer import SampleWriter

from .test_ledger import encoded_of


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        ([50], [20]),
        ([7], [7]),
        ([100, 100], [10, 10]),
        ([1, 0, 1000], [1, 0, 19]),
        ([3, 300, 600], [1, 6, 13]),
        ([1] * 30, [1] * 30),
        ([0, 2], [0, 2]),
    ],
)
def test_every_source_is_shown_and_large_ones_more(
    tmp_path: Path, sizes: list[int], shown: list[int]
) -> None:
    with SampleWriter(tmp_path) as writer:
        for number, size in enumerate(sizes):
            encoded = encoded_of([3] * size)
            writer.append(type(encoded)(**{**vars(encoded), "source": number}))
        writer.finish(len(sizes))
    names = [f"source {number}" for number in range(len(sizes))]
    preview = preview_of(Samples(tmp_path), names)
    assert [preview.sources.count(name) for name in names] == shown
    assert len(preview.samples) == sum(shown)
    tokens, supervised = preview.samples[0]
    assert tokens.tolist() == [0, 1, 2] and supervised.tolist() == [False, True, True]


def test_the_arrays_say_where_each_source_begins(tmp_path: Path) -> None:
    with SampleWriter(tmp_path) as writer:
        for source, lengths in ((1, [4, 2]), (1, [3]), (3, [5])):
            encoded = encoded_of(lengths, [(len(lengths), "over_long")])
            writer.append(type(encoded)(**{**vars(encoded), "source": source}))
        writer.finish(5)
    samples = Samples(tmp_path)
    assert samples.source_offsets.tolist() == [0, 0, 3, 3, 4, 4]
    assert samples.offsets.tolist() == [0, 4, 6, 9, 14]
    assert samples.conversations.tolist() == [0, 1, 3, 5] and len(samples.content) == 7
    assert np.array_equal(samples[2].tokens, [0, 1, 2])
