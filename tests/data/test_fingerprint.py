"""Everything that decides the bytes of token arrays and blocks changes the path, or is refused.

The keys of the config are in tests/config/test_compile.py, each with the stages that it decides;
here is the rest: the files that a config names, the versions of the stages, and what lies in the
store.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.stages import STAGES
from pipeline_lib.core.errors import IntegrityError

from .conftest import Pipeline

ROWS = [
    {"instruction": f"How much is {n} and {n}?", "output": f"It is {2 * n}."} for n in range(40)
]


@pytest.fixture
def own(pipeline: Pipeline) -> Pipeline:
    """A pipeline over a model folder and a data file of its own, to change at will."""
    pipeline.model = Path(shutil.copytree(pipeline.model, pipeline.root / "model"))
    (pipeline.root / "data").mkdir()
    (pipeline.root / "data" / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in ROWS)
    )
    return pipeline


def digests(own: Pipeline, **config: Any) -> dict[str, str]:
    data = [{"source": "file", "path": str(own.root / "data" / "*.jsonl")}]
    experiment = own.compile(**{"data": data, **config})
    return {part: spec.digest for part, spec in experiment.specs.items()}


def append_to(name: str, text: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        with (root / name).open("a") as file:
            file.write(text)

    return change


def rename(name: str, other: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        (root / name).rename(root / other)

    return change


def touch(root: Path) -> None:
    for path in root.rglob("*.json*"):
        os.utime(path, (1, 1))


MATTERS: dict[str, Callable[[Path], None]] = {
    "the template": append_to("model/chat_template.jinja", "{# changed #}"),
    "the tokenizer": append_to("model/tokenizer.json", " "),
    "the tokenizer's config": append_to("model/tokenizer_config.json", " "),
    "the model's config": append_to("model/config.json", " "),
    "a row": append_to("data/rows.jsonl", json.dumps(ROWS[0]) + "\n"),
    "a file's name": rename("data/rows.jsonl", "data/renamed.jsonl"),
    "another file": append_to("data/more.jsonl", json.dumps(ROWS[0]) + "\n"),
}


@pytest.mark.parametrize("change", MATTERS.values(), ids=MATTERS.keys())
def test_what_decides_the_bytes_decides_the_path(
    own: Pipeline, change: Callable[[Path], None]
) -> None:
    before = digests(own)

    change(own.root)

    after = digests(own)
    assert after["tokenize"] != before["tokenize"]
    assert after["shard"] != before["shard"]


def test_how_the_model_is_to_answer_decides_what_is_published_and_no_training(
    own: Pipeline,
) -> None:
    before = digests(own)

    append_to("model/generation_config.json", " ")(own.root)
    after = digests(own)
    (own.root / "model" / "generation_config.json").unlink()
    without = digests(own)

    published = ["baseline", "evaluate", "generation", "merge", "report"]
    assert sorted(part for part in before if after[part] != before[part]) == published
    assert sorted(part for part in before if without.get(part) != before[part]) == published


DOES_NOT: dict[str, Callable[[Path], None]] = {
    "notes beside the model": append_to("model/README.md", "notes"),
    "code beside the model": append_to("model/modeling.py", "raise SystemExit"),
    "pickles beside the model": append_to("model/optimizer.pt", "x"),
    "other files beside the data": append_to("data/notes.txt", "notes"),
    "the time of the files": touch,
}


@pytest.mark.parametrize("change", DOES_NOT.values(), ids=DOES_NOT.keys())
def test_what_decides_nothing_changes_no_path(
    own: Pipeline, change: Callable[[Path], None]
) -> None:
    before = digests(own)

    change(own.root)

    assert digests(own) == before


def test_where_the_files_lie_and_where_it_runs_changes_no_path(own: Pipeline) -> None:
    before = digests(own)

    moved = own.root / "moved"
    shutil.copytree(own.root / "data", moved)
    after = digests(
        own, data=[{"source": "file", "path": str(moved / "*")}], cluster={"cpus_per_rank": 2}
    )

    del before["plan"], after["plan"]  # which the cluster decides
    assert after == before


@pytest.mark.parametrize("stage", ["download", "tokenize", "shard"])
def test_another_version_of_a_stage_is_another_path_from_there_on(
    own: Pipeline, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    before = digests(own)

    row = STAGES[stage]
    monkeypatch.setitem(STAGES, stage, replace(row, version=row.version + 1))

    after = digests(own)
    order = ["download", "tokenize", "shard"]
    parts = {"download": "data.0", "tokenize": "tokenize", "shard": "shard"}
    for position, name in enumerate(order):
        assert (after[parts[name]] != before[parts[name]]) == (position >= order.index(stage))


@pytest.mark.parametrize(
    ("part", "file", "reader"),
    [
        ("model", "tokenizer.json", "tokenize"),
        ("data.0", "rows.jsonl", "tokenize"),
        ("tokenize", "tokens.npy", "shard"),
    ],
)
def test_what_changed_in_the_store_is_refused(
    own: Pipeline, part: str, file: str, reader: str
) -> None:
    experiment = own.compile(
        data=[{"source": "file", "path": str(own.root / "data" / "rows.jsonl")}]
    )
    before_reader = list(experiment.specs)[list(experiment.specs).index(reader) - 1]
    made = own.run(experiment, before_reader)
    path = made[part].path / file
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)

    with pytest.raises(IntegrityError, match=file):
        own.run(experiment, reader)
