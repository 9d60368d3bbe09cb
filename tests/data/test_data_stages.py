"""The three stages together: from a config to blocks, twice, and on the real input."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import datasets  # type: ignore[import-untyped]
import pytest

from pipeline_lib.core.store import Manifest, verify
from pipeline_lib.data.blocks import BlockReader, documents_of
from pipeline_lib.data.encode import load_tokenizer

from .conftest import SHARED, SMALL, Pipeline

PYDOC = {"source": "pydoc", "max_rows": 300}


def hashes(manifest: Manifest) -> dict[str, str]:
    return {name: entry.sha256 for name, entry in manifest.files.items()}


LONGER = {
    "tokenize": {"max_tokens": 250},
    "shard": {"block_tokens": 256},
    "train": {"global_batch_tokens": 512},
}


def test_two_stores_hold_the_same_bytes(tmp_path: Path, tiny_folder: Path) -> None:
    made = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        pipeline = Pipeline(tmp_path / name, tiny_folder, [])
        experiment = pipeline.compile(
            model=SMALL.model_dump(mode="json", exclude_none=True), data=[PYDOC], **LONGER
        )
        made.append(pipeline.run(experiment))
    assert made[0].keys() == made[1].keys() == {"model", "data.0", "tokenize", "shard"}
    for part, first in made[0].items():
        second = made[1][part]
        assert first.manifest.digest == second.manifest.digest
        assert hashes(first.manifest) == hashes(second.manifest)
        assert first.manifest.counts == second.manifest.counts


@pytest.mark.parametrize("kind", ["saved", "arrow", "parquet"])
def test_rows_of_datasets_give_the_tokens_of_the_same_rows_as_json(
    pipeline: Pipeline, tmp_path: Path, kind: str
) -> None:
    """In shards, after a selection, as a split of several; what is sealed ignores the folder."""
    questions = [
        [
            {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "content": f"It is {number}."},
        ]
        for number in range(700)
    ]
    rows = (
        datasets.Dataset.from_list([{"messages": turns} for turns in questions])
        .shuffle(seed=3)
        .select(range(600))
    )
    path, split = tmp_path / "saved", {}
    if kind == "parquet":
        path = tmp_path / "rows.parquet"
        rows.to_parquet(path)
    elif kind == "arrow":
        rows.save_to_disk(path, num_shards=3)
        path = path / "*.arrow"
    else:
        datasets.DatasetDict(train=rows.select([0]), validation=rows).save_to_disk(
            path, num_shards={"train": 1, "validation": 3}
        )
        split = {"split": "validation"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    made = []
    for source in ({"path": str(path), **split}, {"path": str(tmp_path / "rows.jsonl")}):
        experiment = pipeline.compile(data=[{"source": "file", **source}], **LONGER)
        made.append(pipeline.run(experiment, "tokenize"))
    saved, written = (hashes(one["tokenize"].manifest) for one in made)
    arrays = [name for name in written if name.endswith(".npy")]
    assert len(arrays) == 7
    assert {name: saved[name] for name in arrays} == {name: written[name] for name in arrays}
    assert made[0]["tokenize"].manifest.counts["rows"] == 600
    if kind == "saved":
        assert sorted(made[0]["data.0"].manifest.files) == [
            f"data-0000{number}-of-00003.arrow" for number in range(3)
        ]
        # in place, as a script run again does
        rows.select(range(5)).save_to_disk(path / "validation", num_shards=3)
        verify(made[0]["data.0"].path)
        changed = pipeline.compile(data=[{"source": "file", "path": str(path), **split}], **LONGER)
        assert changed.ref("data.0").digest != made[0]["data.0"].manifest.digest


def test_the_real_input_arrives_whole(pipeline: Pipeline, qwen_folder: Path) -> None:
    path = SHARED / "data" / "huanhuan.json"
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    small = {
        "source": "tiny",
        "hidden_size": 16,
        "layers": 1,
        "heads": 2,
        "tokenizer": str(qwen_folder),
    }
    made = pipeline.run(
        pipeline.compile(
            model=small,
            data=[{"source": "file", "path": str(path)}],
            tokenize={"max_tokens": 256},
            shard={"block_tokens": 512},
            train={"global_batch_tokens": 1024},
        )
    )
    counts = made["tokenize"].manifest.counts
    assert (counts["rows"], counts["kept"], counts["quarantined"], counts["dropped"]) == (
        3729,
        3729,
        {},
        {},
    )
    assert made["shard"].manifest.counts["train"]["packing_efficiency"] > 0.98
    reader = BlockReader(made["shard"].path / "train")
    tokenizer = load_tokenizer(qwen_folder)
    document = next(documents_of(reader[0]))
    text = tokenizer.decode(document.tokens.tolist(), skip_special_tokens=False)
    answer = tokenizer.decode(
        document.tokens[document.supervised].tolist(), skip_special_tokens=False
    )
    assert text.startswith("<|im_start|>user\n")
    assert text.endswith(f"<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n{answer}")
    assert answer.endswith("<|im_end|>") and "<" not in answer.removesuffix("<|im_end|>")


def test_one_of_a_thing_is_not_called_several(
    pipeline: Pipeline, jsonl: Callable[..., Path]
) -> None:
    rows = [{"instruction": f"What is {number}?", "output": "It is."} for number in range(20)]
    data = [{"source": "file", "path": str(jsonl(rows))}]
    pipeline.run(pipeline.compile(data=data, shard={"block_tokens": 64, "shards": 1}))
    said = "\n".join(pipeline.said)
    assert re.search(r"^shard: validation: .* full, 1 file$", said, re.MULTILINE)
    assert re.search(r"^download: data from .*: 1 file, ", said, re.MULTILINE)
    assert not re.search(r"\b1 (files|blocks|documents|rows|samples|conversations)\b", said)
