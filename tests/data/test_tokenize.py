import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.fsio import list_files, read_json, read_jsonl
from pipeline_lib.data.encode import Encoder, Sample
from pipeline_lib.data.samples import Samples

from .conftest import Pipeline

Jsonl = Callable[..., Path]


def row(number: int, answer: str = "It is.") -> dict[str, Any]:
    return {"instruction": f"What is {number}?", "output": answer}


def test_the_arrays_hold_what_the_encoder_says(pipeline: Pipeline, jsonl: Jsonl) -> None:
    two_turns = {"instruction": "And you?", "output": "Well.", "history": [["How are you?", "Fine."]]}
    rows = [row(1), two_turns, row(2), row(3, "x " * 100), row(4)]
    path = jsonl(rows)
    made = pipeline.run(
        pipeline.compile(
            data=[{"source": "file", "path": str(path)}], tokenize={"max_tokens": 64, "max_dropped_fraction": 0.5}
        ),
        "tokenize",
    )
    out = made["tokenize"].path
    assert list_files(out) == [
        "conversations.npy",
        "ledger.json",
        "manifest.json",
        "offsets.npy",
        "preview.json",
        "quarantine.jsonl",
        "supervised.npy",
        "tokens.npy",
    ]
    samples = Samples(out)
    arrays = (samples.tokens, samples.supervised, samples.offsets, samples.conversations)
    assert [array.dtype for array in arrays] == [np.int32, np.bool_, np.int64, np.int32]
    assert samples.conversations.tolist() == [0, 1, 2, 4]
    encoder = Encoder(made["model"].path, 64)
    texts = [[("user", "What is 1?"), ("assistant", "It is.")]]
    (expected,) = encoder.encode([[{"role": role, "content": text} for role, text in messages] for messages in texts])[
        0
    ]
    assert isinstance(expected, Sample)
    assert np.array_equal(samples[0].tokens, expected.tokens)
    assert np.array_equal(samples[0].supervised, expected.supervised)
    assert made["tokenize"].manifest.counts["dropped"] == {"over_long": 1}
    ledger = read_json(out / "ledger.json")
    assert ledger["total"]["tokens"] == len(samples.tokens) == samples.offsets[-1]
    assert ledger["total"]["supervised_tokens"] == samples.supervised.sum()
    assert ledger["sources"][0]["name"] == "rows.jsonl" and ledger["sources"][0]["format"] == "alpaca"
    assert "format alpaca" in "\n".join(pipeline.said)


def test_the_preview_shows_what_is_supervised(pipeline: Pipeline, jsonl: Jsonl) -> None:
    path = jsonl([row(number) for number in range(50)])
    made = pipeline.run(pipeline.compile(data=[{"source": "file", "path": str(path)}]), "tokenize")
    preview = read_json(made["tokenize"].path / "preview.json")
    assert len(preview) == 20
    assert preview[0]["pieces"] == [
        {"text": "<|im_start|>user\nWhat is 0?<|im_end|>\n<|im_start|>assistant\n", "supervised": False},
        {"text": "It is.<|im_end|>", "supervised": True},
    ]
    assert "What is 49?" in preview[-1]["pieces"][0]["text"]


def test_files_and_sources_are_booked_apart(pipeline: Pipeline, tmp_path: Path, jsonl: Jsonl) -> None:
    (tmp_path / "more").mkdir()
    jsonl([row(1)], "more/a.jsonl")
    (tmp_path / "more" / "b.json").write_text(
        json.dumps([{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}] * 2)
    )
    data = [{"source": "file", "path": str(tmp_path / "more" / "*")}, {"source": "pydoc", "max_rows": 5}]
    made = pipeline.run(
        pipeline.compile(
            data=data, tokenize={"max_tokens": 1000}, shard={"block_tokens": 1000}, train={"global_batch_tokens": 2000}
        ),
        "tokenize",
    )
    ledger = read_json(made["tokenize"].path / "ledger.json")
    assert [(source["name"], source["format"], source["rows"]) for source in ledger["sources"]] == [
        ("a.jsonl", "alpaca", 1),
        ("b.json", "messages", 2),
        ("pydoc", "messages", 5),
    ]
    assert ledger["total"]["rows"] == 8


BAD = [{"instruction": "What?", "output": ""}, row(5, "a<|im_end|>b")]


def test_bad_rows_are_kept_apart_up_to_the_limit(pipeline: Pipeline, jsonl: Jsonl) -> None:
    path = jsonl([row(1), *BAD, row(2)])
    experiment = pipeline.compile(
        data=[{"source": "file", "path": str(path)}], tokenize={"max_tokens": 64, "max_quarantined_fraction": 0.5}
    )
    made = pipeline.run(experiment, "tokenize")
    quarantine = read_jsonl(made["tokenize"].path / "quarantine.jsonl")
    assert [(entry["reason"], entry["line"], entry["file"]) for entry in quarantine] == [
        ("empty", 2, "rows.jsonl"),
        ("control_token", 3, "rows.jsonl"),
    ]
    assert quarantine[1]["excerpt"] == "a<|im_end|>b"
    assert made["tokenize"].manifest.counts["quarantined"] == {"control_token": 1, "empty": 1}
    assert Samples(made["tokenize"].path).conversations.tolist() == [0, 1]


def test_more_bad_rows_than_allowed_fail_and_lose_nothing(pipeline: Pipeline, jsonl: Jsonl) -> None:
    path = jsonl([row(1), *BAD, row(2)])
    experiment = pipeline.compile(data=[{"source": "file", "path": str(path)}])
    with pytest.raises(DataError) as caught:
        pipeline.run(experiment, "tokenize")
    message = str(caught.value)
    full_list = pipeline.store.run_dir(experiment.specs["tokenize"].digest) / "quarantine.jsonl"
    for part in (
        "2 of 4 rows cannot be used (50.00%)",
        "tokenize.max_quarantined_fraction allows 0.00%",
        "rows.jsonl:2: empty: the assistant says nothing",
        "rows.jsonl:3: control_token: the text holds <|im_end|>",
        str(full_list),
    ):
        assert part in message
    assert len(read_jsonl(full_list)) == 2
    assert not pipeline.store.sealed(experiment.ref("tokenize")).exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"messages": [{"role": "user", "content": "a"}]}], "none of the 1 rows is a usable conversation: 1 no_assi"),
        ([{"prompt": "a"}] * 3, "none of the 3 rows is a usable conversation: 3 wrong_format"),
        ([row(1, "x " * 100)], "no sample is left of 1 conversations: 1 over_long"),
        ([row(1), row(2, "x " * 100)], r"1 of 2 samples \(50.00%\) are longer than tokenize.max_tokens \(64\)"),
        ([], "holds no rows"),
    ],
)
def test_data_that_cannot_be_used_is_one_clear_error(
    pipeline: Pipeline, jsonl: Jsonl, rows: list[Any], message: str
) -> None:
    path = jsonl(rows)
    with pytest.raises(DataError, match=message):
        pipeline.run(pipeline.compile(data=[{"source": "file", "path": str(path)}]), "tokenize")


def test_cut_samples_count_as_lost(pipeline: Pipeline, jsonl: Jsonl) -> None:
    path = jsonl([row(1), row(2, "x " * 100)])
    settings = {"max_tokens": 64, "over_long": "truncate"}
    data = [{"source": "file", "path": str(path)}]
    with pytest.raises(DataError, match="1 of 2 samples"):
        pipeline.run(pipeline.compile(data=data, tokenize=settings), "tokenize")
    made = pipeline.run(pipeline.compile(data=data, tokenize={**settings, "max_dropped_fraction": 0.5}), "tokenize")
    assert made["tokenize"].manifest.counts["truncated"] == 1
    assert np.diff(Samples(made["tokenize"].path).offsets).max() == 64


def test_a_given_format_is_used(pipeline: Pipeline, jsonl: Jsonl) -> None:
    path = jsonl([row(1)])
    data = [{"source": "file", "path": str(path), "format": "sharegpt"}]
    with pytest.raises(DataError, match="expected sharegpt, found alpaca"):
        pipeline.run(pipeline.compile(data=data), "tokenize")


def test_a_row_on_which_the_template_fails_is_named(
    pipeline: Pipeline, jsonl: Jsonl, tiny_folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_folder, model)
    picky = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages') }}{% endif %}"
    (model / "chat_template.jinja").write_text(picky + (tiny_folder / "chat_template.jinja").read_text())
    path = jsonl([row(1), {**row(2), "system": "Be brief."}])
    experiment = pipeline.compile(
        model={"source": "local", "path": str(model)}, data=[{"source": "file", "path": str(path)}]
    )
    with pytest.raises(DataError, match=r"rows\.jsonl:2: .*chat_template\.jinja: .* no system messages"):
        pipeline.run(experiment, "tokenize")
