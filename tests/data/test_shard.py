from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline_lib.base.errors import DataError
from pipeline_lib.data.blocks import BlockReader, Document, documents_of
from pipeline_lib.data.samples import Samples, SampleWriter
from pipeline_lib.data.shard import choose_held_out

from .conftest import Pipeline

Jsonl = Callable[..., Path]


def write_samples(folder: Path, conversations: list[list[list[int]]]) -> Samples:
    folder.mkdir()
    with SampleWriter(folder) as writer:
        for number, samples in enumerate(conversations):
            for tokens in samples:
                array = np.array(tokens, dtype=np.int32)
                writer.append(Document(array, array > 5), number)
    return Samples(folder)


def sides(samples: Samples, seed: int = 0) -> dict[bytes, set[bool]]:
    """By the content of each sample, the sides that it is on."""
    held_out = choose_held_out(samples, 0.3, seed)
    found: dict[bytes, set[bool]] = {}
    for number in range(len(samples)):
        found.setdefault(samples[number].tokens.tobytes(), set()).add(bool(held_out[number]))
    return found


def test_equal_conversations_are_never_on_both_sides(tmp_path: Path) -> None:
    conversations = [[[number % 50, 7]] for number in range(500)]
    found = sides(write_samples(tmp_path / "a", conversations))
    assert len(found) == 50 and all(len(side) == 1 for side in found.values())
    assert 5 <= sum(True in side for side in found.values()) <= 25


def test_the_samples_of_a_conversation_stay_together(tmp_path: Path) -> None:
    samples = write_samples(tmp_path / "a", [[[number], [number, 7], [number, 7, 8]] for number in range(200)])
    held_out = choose_held_out(samples, 0.3, 0).reshape(200, 3)
    assert (held_out.all(axis=1) == held_out.any(axis=1)).all()
    assert 0.2 < held_out.mean() < 0.4


def test_added_data_moves_nothing(tmp_path: Path) -> None:
    before = sides(write_samples(tmp_path / "a", [[[number]] for number in range(100)]))
    after = sides(write_samples(tmp_path / "b", [[[number]] for number in range(150, -1, -1)]))
    assert all(after[content] == side for content, side in before.items())


def test_the_seed_chooses_others(tmp_path: Path) -> None:
    samples = write_samples(tmp_path / "a", [[[number]] for number in range(100)])
    assert sides(samples, 0) == sides(samples, 0) != sides(samples, 1)


def run(pipeline: Pipeline, path: Path, **config: Any) -> dict[str, Any]:
    return pipeline.run(pipeline.compile(data=[{"source": "file", "path": str(path)}], **config))


def questions(count: int) -> list[dict[str, str]]:
    return [
        {"instruction": f"What is {number}?", "output": "It is " + "so " * (number % 9) + "."}
        for number in range(count)
    ]


def test_every_sample_is_in_one_block_of_one_side(pipeline: Pipeline, jsonl: Jsonl) -> None:
    made = run(pipeline, jsonl([*questions(200), *questions(40)]))
    samples = Samples(made["tokenize"].path)
    wanted = sorted(samples[number].tokens.tobytes() for number in range(len(samples)))
    found: dict[str, list[bytes]] = {}
    for side in ("train", "validation"):
        reader = BlockReader(made["shard"].path / side)
        documents = [document for number in range(len(reader)) for document in documents_of(reader[number])]
        assert all(document.supervised.any() and not document.supervised[0] for document in documents)
        found[side] = [document.tokens.tobytes() for document in documents]
        counts = made["shard"].manifest.counts[side]
        assert counts["documents"] == len(documents)
        assert counts["tokens"] == sum(len(document.tokens) for document in documents)
        assert counts["supervised_tokens"] == sum(int(document.supervised.sum()) for document in documents)
        assert counts["packing_efficiency"] == pytest.approx(counts["tokens"] / (counts["blocks"] * 64), abs=1e-6)
    assert sorted(found["train"] + found["validation"]) == wanted
    assert not set(found["train"]) & set(found["validation"])
    assert len(BlockReader(made["shard"].path / "train").index.shards) == 4


def test_there_are_no_more_files_than_blocks(pipeline: Pipeline, jsonl: Jsonl) -> None:
    made = run(
        pipeline, jsonl(questions(12)), shard={"block_tokens": 1024, "shards": 9}, train={"global_batch_tokens": 2048}
    )
    assert BlockReader(made["shard"].path / "train").index.shards == [1]


@pytest.mark.parametrize(("fraction", "side", "verb"), [(0.0001, "validation", "raise"), (0.9999, "training", "lower")])
def test_an_empty_side_is_refused(pipeline: Pipeline, jsonl: Jsonl, fraction: float, side: str, verb: str) -> None:
    message = f"of 20 samples none is in the {side} split with data.validation_fraction {fraction}; {verb} it"
    with pytest.raises(DataError, match=message):
        run(pipeline, jsonl(questions(20)), validation_fraction=fraction)
