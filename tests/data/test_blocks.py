import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.base.manifest import Manifest, describe_files, verify, write_manifest
from pipeline_lib.data.blocks import BlockReader, Document, documents_of, write_blocks


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
    written = write_blocks(folder, bins, block_tokens=32, shards=shards, pad_token=0)
    reader = BlockReader(folder)
    assert reader.index == written and len(reader) == len(bins) and reader.block_tokens == 32
    assert len(written.shards) == min(shards, len(bins)) and max(written.shards) - min(written.shards) <= 1
    for number, documents in enumerate(bins):
        found = list(documents_of(reader[number]))
        assert len(found) == len(documents)
        for got, wanted in zip(found, documents, strict=True):
            assert got.tokens.dtype == np.int32 and got.supervised.dtype == np.bool_
            assert np.array_equal(got.tokens, wanted.tokens) and np.array_equal(got.supervised, wanted.supervised)
    every = [document for documents in bins for document in documents]
    assert written.documents == len(every)
    assert written.tokens == sum(len(document.tokens) for document in every)
    assert written.supervised_tokens == sum(int(document.supervised.sum()) for document in every)


def test_padding_belongs_to_no_document_and_is_not_supervised(tmp_path: Path) -> None:
    write_blocks(tmp_path / "train", make_bins([[3, 2], [8]]), block_tokens=8, shards=1, pad_token=99)
    reader = BlockReader(tmp_path / "train")
    assert reader[0].documents.tolist() == [0, 0, 0, 1, 1, -1, -1, -1]
    assert reader[0].tokens.tolist() == [1, 2, 3, 4, 5, 99, 99, 99]
    assert not reader[0].supervised[5:].any()
    assert reader[1].documents.tolist() == [0] * 8
    assert reader.index.packing_efficiency == 13 / 16


def test_shards_are_plain_safetensors_of_the_promised_types(tmp_path: Path) -> None:
    write_blocks(tmp_path / "train", make_bins([[3, 2], [8], [1]]), block_tokens=8, shards=2, pad_token=0)
    assert sorted(path.name for path in (tmp_path / "train").iterdir()) == [
        "index.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    raw = (tmp_path / "train" / "shard-00001.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    types = {name: (tensor["dtype"], tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"}
    assert types == {
        "tokens": ("I32", [2, 8]),
        "supervised": ("U8", [2, 8]),
        "starts": ("I32", [4]),
        "block_offsets": ("I64", [3]),
    }


@pytest.mark.parametrize("number", [-1, 2])
def test_a_block_that_does_not_exist_is_an_index_error(tmp_path: Path, number: int) -> None:
    write_blocks(tmp_path / "train", make_bins([[3], [4]]), block_tokens=8, shards=1, pad_token=0)
    with pytest.raises(IndexError):
        BlockReader(tmp_path / "train")[number]


def test_a_folder_without_an_index_is_an_integrity_error(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"index\.json: cannot read"):
        BlockReader(tmp_path)


def test_a_flipped_bit_anywhere_in_a_shard_is_found(tmp_path: Path) -> None:
    write_blocks(tmp_path / "train", make_bins([[3], [4]]), block_tokens=8, shards=1, pad_token=0)
    write_manifest(tmp_path, Manifest(stage="shard", digest="0", spec={}, files=describe_files(tmp_path)))
    shard = tmp_path / "train" / "shard-00000.safetensors"
    good = shard.read_bytes()
    for position in (0, 40, len(good) // 2, len(good) - 1):
        bad = bytearray(good)
        bad[position] ^= 1
        shard.write_bytes(bad)
        with pytest.raises(IntegrityError, match="content differs"):
            verify(tmp_path)
    shard.write_bytes(good)
    verify(tmp_path)
