import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from pipeline_lib.core.errors import IntegrityError, Unreadable
from pipeline_lib.data import shard as shard_stage
from pipeline_lib.data.blocks import BlockReader, documents_of
from pipeline_lib.data.documents import Document
from pipeline_lib.data.shard import write_blocks
from pipeline_lib.records.data import BlockGroup
from tests.core.unreadable import endless_link


def make_document(first: int, length: int) -> Document:
    tokens = np.arange(first, first + length, dtype=np.int32)
    return Document(tokens, tokens % 3 == 0)


def make_bins(lengths: list[list[int]]) -> list[list[Document]]:
    bins, first = [], 1
    for row in lengths:
        documents = []
        for length in row:
            documents.append(make_document(first, length))
            first += length
        bins.append(documents)
    return bins


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(
    lengths=st.lists(st.lists(st.integers(1, 8), min_size=1, max_size=4), min_size=1, max_size=9),
    shards=st.integers(1, 12),
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[list[int]], shards: int
) -> None:
    folder = tmp_path_factory.mktemp("blocks") / "train"
    bins = make_bins(lengths)
    written = write_blocks(folder, bins, block_tokens=32, shards=shards)
    reader = BlockReader(folder)
    assert reader.index == written and len(reader) == len(bins) and reader.block_tokens == 32
    assert (
        len(written.shards) == min(shards, len(bins))
        and max(written.shards) - min(written.shards) <= 1
    )
    for number, documents in enumerate(bins):
        assert reader.costs[number] == sum(len(document.tokens) ** 2 for document in documents)
        found = list(documents_of(reader[number]))
        assert len(found) == len(documents)
        for got, wanted in zip(found, documents, strict=True):
            assert got.tokens.dtype == np.int32 and got.supervised.dtype == np.bool_
            assert np.array_equal(got.tokens, wanted.tokens) and np.array_equal(
                got.supervised, wanted.supervised
            )
    every = [document for documents in bins for document in documents]
    assert written.documents == len(every)
    assert written.tokens == sum(len(document.tokens) for document in every)
    assert written.supervised_tokens == sum(int(document.supervised.sum()) for document in every)
    assert written.largest_token == max(int(document.tokens.max()) for document in every)
    assert (written.groups, written.epoch_blocks) == ([BlockGroup(1.0, len(bins))], len(bins))
    assert reader.costs.dtype == np.int64 and reader.costs.shape == (len(bins),)


def test_padding_belongs_to_no_document_and_is_not_supervised(tmp_path: Path) -> None:
    write_blocks(tmp_path / "train", make_bins([[3, 2], [8]]), block_tokens=8, shards=1)
    reader = BlockReader(tmp_path / "train")
    assert reader[0].documents.tolist() == [0, 0, 0, 1, 1, -1, -1, -1]
    assert reader[0].tokens.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert not reader[0].supervised[5:].any()
    assert reader[1].documents.tolist() == [0] * 8
    assert reader.index.packing_efficiency == 13 / 16


def test_shards_are_plain_safetensors_of_the_promised_types(tmp_path: Path) -> None:
    write_blocks(tmp_path / "train", make_bins([[3, 2], [8], [1]]), block_tokens=8, shards=2)
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == [
        "costs.npy",
        "index.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    raw = (tmp_path / "train" / "shard-00001.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    types = {
        name: (tensor["dtype"], tensor["shape"])
        for name, tensor in header.items()
        if name != "__metadata__"
    }
    assert types == {
        "tokens": ("I32", [2, 8]),
        "supervised": ("U8", [2, 8]),
        "starts": ("I32", [4]),
        "block_offsets": ("I64", [3]),
    }


@pytest.mark.parametrize("number", [-1, 2])
def test_a_block_that_does_not_exist_is_an_index_error(tmp_path: Path, number: int) -> None:
    write_blocks(tmp_path / "train", make_bins([[3], [4]]), block_tokens=8, shards=1)
    with pytest.raises(IndexError):
        BlockReader(tmp_path / "train")[number]


def test_groups_are_recorded_in_the_order_of_their_blocks(tmp_path: Path) -> None:
    groups = [BlockGroup(0.5, 3), BlockGroup(2.0, 1)]
    written = write_blocks(tmp_path / "train", make_bins([[3], [4], [5], [6]]), 8, 2, groups)
    assert json.loads((tmp_path / "train" / "index.json").read_text())["groups"] == [
        {"weight": 0.5, "blocks": 3},
        {"weight": 2.0, "blocks": 1},
    ]
    assert written.epoch_blocks == 3  # in the first epoch: one of the three, and the one twice
    assert BlockReader(tmp_path / "train").index == written


def test_a_file_is_no_larger_than_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_stage, "SHARD_BYTES", 3 * 8 * shard_stage.PACKED_BYTES_PER_POSITION)
    bins = make_bins([[number % 8 + 1] for number in range(10)])
    index = write_blocks(tmp_path / "train", bins, block_tokens=8, shards=1)
    assert sum(index.shards) == 10 and max(index.shards) == 3
    reader = BlockReader(tmp_path / "train")
    assert [len(next(documents_of(reader[number])).tokens) for number in range(10)] == [
        *range(1, 9),
        1,
        2,
    ]


@contextmanager
def open_files_limited(more: int) -> Iterator[None]:
    """Allow this process to open at most `more` further files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208 - a folder that changes as it is read
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_any_number_of_shards_can_be_read_with_few_open_files(tmp_path: Path) -> None:
    bins = make_bins([[8]] * 300)
    write_blocks(tmp_path / "train", bins, block_tokens=8, shards=300)
    with open_files_limited(20):
        reader = BlockReader(tmp_path / "train")
        assert [int(reader[number].tokens[0]) for number in range(300)] == [
            1 + 8 * number for number in range(300)
        ]


def test_opening_reads_no_shard_and_reading_only_one(tmp_path: Path) -> None:
    folder = tmp_path / "train"
    write_blocks(folder, make_bins([[8]] * 4), block_tokens=8, shards=4)
    for path in set(folder.glob("shard-*")) - {folder / "shard-00002.safetensors"}:
        path.unlink()
    assert BlockReader(folder)[2].tokens.tolist() == list(range(17, 25))


def edit_index(folder: Path, **changes: Any) -> None:
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**index, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"shards": [2]},
        {"blocks": 2},
        {"epoch_blocks": 4},
        {"groups": [{"weight": 1.0, "blocks": 2}]},
        {"groups": [{"weight": 2.0, "blocks": 3}]},
    ],
)
def test_an_index_that_contradicts_itself_is_refused_at_open(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    write_blocks(tmp_path / "train", make_bins([[3, 2], [8], [1]]), block_tokens=8, shards=1)
    edit_index(tmp_path / "train", **changes)
    with pytest.raises(
        IntegrityError, match=r"index\.json: shards and groups do not make up its \d blocks"
    ):
        BlockReader(tmp_path / "train")


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": None},
        {"groups": [{"weight": 1.0}]},
        {"groups": "one"},
        {"shards": "two"},
        {"extra": 1},
    ],
)
def test_an_index_of_another_kind_is_refused_at_open(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    write_blocks(tmp_path / "train", make_bins([[3]]), block_tokens=8, shards=1)
    edit_index(tmp_path / "train", **changes)
    for folder in (tmp_path / "train", tmp_path):  # the second has no index at all
        with pytest.raises(IntegrityError, match=r"index\.json.* run snakemake again"):
            BlockReader(folder)


def test_costs_of_other_blocks_are_refused_at_open(tmp_path: Path) -> None:
    write_blocks(tmp_path / "train", make_bins([[3], [4]]), block_tokens=8, shards=1)
    path = tmp_path / "train" / "costs.npy"
    np.save(path, np.ones(3, dtype=np.int64))
    with pytest.raises(IntegrityError, match=r"costs\.npy: holds int64\[3\], expected int64\[2\]"):
        BlockReader(tmp_path / "train")
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(IntegrityError, match=r"costs\.npy: cannot read"):
        BlockReader(tmp_path / "train")


GOOD: dict[str, Any] = {"starts": [0, 3, 5, 0, 8], "block_offsets": [0, 3, 5]}


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("tokens", np.zeros((1, 8), np.int32), r"tokens are I32\[1, 8\], expected I32\[2, 8\]"),
        ("tokens", np.zeros((2, 8), np.int64), r"tokens are I64\[2, 8\], expected"),
        (
            "supervised",
            np.zeros((3, 8), np.uint8),
            r"supervised are U8\[3, 8\], expected U8\[2, 8\]",
        ),
        ("block_offsets", np.array([0, 3]), "starts of its documents"),
        ("block_offsets", np.array([0, 6, 5]), "starts of its documents"),
        ("block_offsets", np.array([0, 0, 5]), "starts of its documents"),
        ("block_offsets", np.array([1, 3, 5]), "starts of its documents"),
        ("starts", np.array([0, 5, 3, 0, 8], np.int32), "starts of its documents"),
        ("starts", np.array([1, 3, 5, 0, 8], np.int32), "starts of its documents"),
        ("starts", np.array([0, 3, 5, 0, 9], np.int32), "starts of its documents"),
        ("starts", np.array([0, 3, 5, 0, 8, 9], np.int32), "starts of its documents"),
        ("starts", np.array([0, 3, 5, 0, 8], np.int64), "starts of its documents"),
        ("starts", None, "cannot read"),
    ],
)
def test_a_shard_that_does_not_fit_its_index_is_refused(
    tmp_path: Path, name: str, values: Any, message: str
) -> None:
    write_blocks(tmp_path / "train", make_bins([[3, 2], [8]]), block_tokens=8, shards=1)
    path = tmp_path / "train" / "shard-00000.safetensors"
    arrays = load_file(path)
    assert {key: arrays[key].tolist() for key in GOOD} == GOOD
    changed = {key: array for key, array in {**arrays, name: values}.items() if array is not None}
    save_file(changed, path)
    reader = BlockReader(tmp_path / "train")
    with pytest.raises(IntegrityError, match=rf"shard-00000\.safetensors: .*{message}"):
        reader[0]


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_shard_that_was_cut_off_is_refused(tmp_path: Path, size: int) -> None:
    write_blocks(tmp_path / "train", make_bins([[3, 2], [8]]), block_tokens=8, shards=1)
    path = tmp_path / "train" / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(IntegrityError, match=r"shard-00000\.safetensors: cannot read"):
        BlockReader(tmp_path / "train")[1]
    path.unlink()
    with pytest.raises(IntegrityError, match=r"shard-00000\.safetensors: cannot read"):
        BlockReader(tmp_path / "train")[1]


def test_a_shard_that_cannot_be_read_is_not_to_be_deleted(tmp_path: Path) -> None:
    write_blocks(tmp_path / "train", make_bins([[3, 2], [8]]), block_tokens=8, shards=1)
    path = tmp_path / "train" / "shard-00000.safetensors"
    with endless_link(path), pytest.raises(Unreadable, match=f"{path}: cannot be read"):
        BlockReader(tmp_path / "train")[1]
