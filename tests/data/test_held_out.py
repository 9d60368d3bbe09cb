"""Sources that are held out as a whole, and data of which nothing is held out."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json
from pipeline_lib.core.stage import Sealed
from pipeline_lib.data.blocks import BlockReader, documents_of
from pipeline_lib.data.documents import Samples
from pipeline_lib.data.packing import Split

from .conftest import Pipeline


def written(path: Path, numbers: range, **more: Any) -> dict[str, Any]:
    """A source of questions of their own, one for each number."""
    rows = [
        {"instruction": f"What is {number}?", "output": f"It is {number}."} for number in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": "file", "path": str(path), **more}


def documents(shard: Sealed, side: str) -> list[bytes]:
    reader = BlockReader(shard.path / side)
    return [
        document.tokens.tobytes()
        for block in range(len(reader))
        for document in documents_of(reader[block])
    ]


def samples_of(tokenized: Sealed, source: int) -> list[bytes]:
    samples = Samples(tokenized.path)
    first, end = samples.source_offsets[source : source + 2]
    return [samples[number].tokens.tobytes() for number in range(first, end)]


def test_sources_of_their_own_are_held_out_and_nothing_else_is(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    train = [
        written(tmp_path / "a.jsonl", range(40), weight=2.0),
        written(tmp_path / "b.jsonl", range(40, 80)),
    ]
    validation = [
        written(tmp_path / "c.jsonl", range(80, 90)),
        written(tmp_path / "d.jsonl", range(90, 95)),
    ]

    made = pipeline.run(pipeline.compile(data=train, validation=validation))

    held_out = documents(made["shard"], "validation")
    of_sources = [samples_of(made["tokenize"], number) for number in range(4)]
    assert sorted(held_out) == sorted(of_sources[2] + of_sources[3]) and len(held_out) == 15
    assert sorted(documents(made["shard"], "train")) == sorted(of_sources[0] + of_sources[1])
    groups = made["shard"].manifest.counts["train"]["groups"]
    assert [group["weight"] for group in groups] == [1.0, 2.0]  # a weight is of its own source
    assert not any("warning" in line for line in pipeline.said)


def test_the_order_of_the_held_out_samples_is_that_of_their_blocks(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    train = [
        written(tmp_path / "a.jsonl", range(60)),
        written(tmp_path / "b.jsonl", range(60, 120), weight=0.5),
    ]
    for more in (
        {"validation_fraction": 0.3},
        {"validation": [written(tmp_path / "c.jsonl", range(200, 230))]},
    ):
        made = pipeline.run(pipeline.compile(data=train, **more))
        samples, spec = Samples(made["tokenize"].path), made["shard"].manifest.spec

        order = Split.of(spec["settings"], spec.get("where", {})).held_out_order(samples)

        assert [samples[number].tokens.tobytes() for number in order] == documents(
            made["shard"], "validation"
        )


def test_what_is_held_out_is_no_part_of_what_is_said_of_the_training(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    train = written(tmp_path / "a.jsonl", range(40))
    validation = written(tmp_path / "b.jsonl", range(40, 50))

    tokenized = pipeline.run(pipeline.compile(data=[train], validation=[validation]), "tokenize")[
        "tokenize"
    ]

    assert sum(tokenized.manifest.counts["prompts"].values()) == 40
    assert tokenized.manifest.counts["kept"] == 50
    sources = read_json(tokenized.path / "ledger.json")["sources"]
    assert [(one["name"], one.get("held_out")) for one in sources] == [
        ("a.jsonl", None),
        ("b.jsonl", True),
    ]
    assert {one["source"] for one in read_json(tokenized.path / "preview.json")} == {"a.jsonl"}


def test_held_out_samples_that_begin_as_a_training_sample_are_counted(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    train = written(tmp_path / "a.jsonl", range(40))
    validation = written(tmp_path / "b.jsonl", range(37, 50))

    pipeline.run(pipeline.compile(data=[train], validation=[validation]))

    [warning] = [line for line in pipeline.said if line.startswith("shard: warning")]
    assert "3 of 13 held-out samples begin as a training sample does" in warning


def test_of_equal_rows_that_of_the_training_stays(pipeline: Pipeline, tmp_path: Path) -> None:
    """So a held-out row removes no training row."""
    train = written(tmp_path / "a.jsonl", range(40))
    validation = written(tmp_path / "b.jsonl", range(37, 50))
    drops = {"duplicates": "drop"}

    made = pipeline.run(pipeline.compile(data=[train], validation=[validation], tokenize=drops))

    assert [len(documents(made["shard"], side)) for side in ("train", "validation")] == [40, 10]
    with pytest.raises(DataError, match=r"data\.validation.*tokenize.duplicates: drop"):
        pipeline.run(pipeline.compile(data=[train], validation=[{**train}], tokenize=drops))


def test_an_error_in_a_row_names_the_key_of_its_source(pipeline: Pipeline, tmp_path: Path) -> None:
    train = written(tmp_path / "a.jsonl", range(40))
    validation = written(tmp_path / "b.jsonl", range(40, 50))
    mixed = tmp_path / "mixed.jsonl"
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    mixed.write_text(Path(train["path"]).read_text() + json.dumps({"messages": turns}) + "\n")
    wrong = {"source": "file", "path": str(mixed)}
    for data, held_out, key in (
        ([wrong], [validation], r"data\.train\[0\]"),
        ([train, train], [validation, wrong], r"data\.validation\[1\]"),
    ):
        with pytest.raises(DataError, match=rf"set `format` in {key} to use"):
            pipeline.run(pipeline.compile(data=data, validation=held_out), "tokenize")


def test_files_of_one_name_are_told_apart_by_the_keys_of_their_sources(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    (tmp_path / "held_out").mkdir()
    train = written(tmp_path / "a.jsonl", range(40))
    validation = written(tmp_path / "held_out/a.jsonl", range(40, 50))

    tokenized = pipeline.run(pipeline.compile(data=[train], validation=[validation]), "tokenize")[
        "tokenize"
    ]

    names = [one["name"] for one in read_json(tokenized.path / "ledger.json")["sources"]]
    assert names == ["a.jsonl", "data.validation[0]/a.jsonl"]


def test_nothing_is_held_out_if_that_is_asked_for(pipeline: Pipeline, tmp_path: Path) -> None:
    made = pipeline.run(
        pipeline.compile(data=[written(tmp_path / "a.jsonl", range(40))], validation_fraction=0.0)
    )

    assert len(documents(made["shard"], "train")) == 40
    reader = BlockReader(made["shard"].path / "validation")
    assert (len(reader), reader.index.documents, len(reader.costs)) == (0, 0, 0)
    assert made["shard"].manifest.counts["validation"] == {"blocks": 0}
    assert sorted(path.name for path in reader.folder.iterdir()) == ["costs.npy", "index.json"]
    assert any("nothing is held out" in line for line in pipeline.said)
