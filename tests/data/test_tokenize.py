import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline_lib.config.compile import Experiment
from pipeline_lib.config.schema import Tokenize
from pipeline_lib.core.errors import DataError, IntegrityError, Interrupted
from pipeline_lib.core.files import list_files, read_json, read_jsonl, sha256_file
from pipeline_lib.core.stage import run_stage
from pipeline_lib.data import batches, sources, tokenize
from pipeline_lib.data.conversations import Conversation
from pipeline_lib.data.documents import Samples
from pipeline_lib.data.encode import Encoder, Sample
from pipeline_lib.data.pool import Limits
from pipeline_lib.plan.known import losses_of
from tests.data.pool_tasks import LossyEncoder, WrongEncoder
from tests.processes import wait_for, workers_alive

from .chats import INSTRUCT
from .conftest import Pipeline

Jsonl = Callable[..., Path]


def row(number: int, answer: str = "It is.") -> dict[str, Any]:
    return {"instruction": f"What is {number}?", "output": answer}


def test_the_arrays_hold_what_the_encoder_says(
    pipeline: Pipeline, jsonl: Jsonl, tiny_folder: Path
) -> None:
    two_turns = {
        "instruction": "And you?",
        "output": "Well.",
        "history": [["How are you?", "Fine."]],
    }
    rows = [row(1), two_turns, row(2), row(3, "x " * 100), row(4)]
    made = pipeline.tokenize(jsonl(rows), tokenize={"max_dropped_fraction": 0.5})
    assert list_files(made.path) == [
        "content.npy",
        "conversations.npy",
        "ledger.json",
        "manifest.json",
        "offsets.npy",
        "preview.json",
        "prompts.npy",
        "quarantine.jsonl",
        "source_offsets.npy",
        "supervised.npy",
        "tokens.npy",
    ]
    samples = Samples(made.path)
    arrays = (samples.tokens, samples.supervised, samples.offsets, samples.conversations)
    assert [array.dtype for array in arrays] == [np.int32, np.bool_, np.int64, np.int32]
    # the template drops the thinking block of an earlier turn
    assert samples.conversations.tolist() == [0, 1, 1, 2, 4]
    for hashes in (samples.content, samples.prompts):
        assert (hashes.dtype, len(set(hashes.tolist()))) == (np.uint64, 5)
    assert (samples.source_offsets.dtype, samples.source_offsets.tolist()) == (np.int64, [0, 5])
    messages = [
        {"role": "user", "content": "What is 1?"},
        {"role": "assistant", "content": "It is."},
    ]
    ((expected,),) = Encoder(tiny_folder, Tokenize(max_tokens=64)).encode(
        [Conversation(messages, None, (1,))]
    )
    assert isinstance(expected, Sample)
    assert np.array_equal(samples[0].tokens, expected.tokens)
    assert np.array_equal(samples[0].supervised, expected.supervised)
    counts = made.manifest.counts
    assert counts["dropped"] == {"over_long": 1}
    assert counts["template_sha256"] == sha256_file(tiny_folder / "chat_template.jinja")
    assert counts["tokenizer_sha256"] == sha256_file(tiny_folder / "tokenizer.json")
    ledger = read_json(made.path / "ledger.json")
    assert ledger["total"]["tokens"] == len(samples.tokens) == samples.offsets[-1]
    assert ledger["total"]["supervised_tokens"] == samples.supervised.sum()
    assert (
        ledger["sources"][0]["name"] == "rows.jsonl" and ledger["sources"][0]["format"] == "alpaca"
    )
    assert "format alpaca" in "\n".join(pipeline.said)
    lengths = np.diff(samples.offsets).tolist()
    assert counts["repeated_tokens"] == lengths[1]  # the first of two answers of one conversation
    assert any("5 samples of 5 conversations have " in line for line in pipeline.said)


def test_the_preview_shows_what_is_supervised(pipeline: Pipeline, jsonl: Jsonl) -> None:
    preview = read_json(
        pipeline.tokenize(jsonl([row(number) for number in range(50)])).path / "preview.json"
    )
    assert [(item["source"], item["tokens"] > 10) for item in preview] == [
        ("rows.jsonl", True)
    ] * 20
    assert preview[0]["pieces"] == [
        {
            "text": "<|im_start|>user\nWhat is "
            "0?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
            "supervised": False,
        },
        {"text": "It is.<|im_end|>", "supervised": True},
    ]
    assert "What is 49?" in preview[-1]["pieces"][0]["text"]


def test_sources_and_their_files_are_booked_apart(
    pipeline: Pipeline, tmp_path: Path, jsonl: Jsonl
) -> None:
    (tmp_path / "more").mkdir()
    jsonl([row(1)], "more/a.jsonl")
    openai = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
    (tmp_path / "more" / "b.json").write_text(json.dumps([openai] * 2))
    lonely = jsonl([row(1, "x " * 900)], "lonely.jsonl")
    longer = {"shard": {"block_tokens": 800}, "train": {"global_batch_tokens": 1600}}
    settings = {"max_tokens": 800, "max_dropped_fraction": 1.0}
    pydoc = {"source": "pydoc", "max_rows": 40}
    out = pipeline.tokenize(
        tmp_path / "more" / "*", lonely, pydoc, tokenize=settings, **longer
    ).path
    ledger = read_json(out / "ledger.json")
    assert [(source["name"], source["format"], source["rows"]) for source in ledger["sources"]] == [
        ("a.jsonl, b.json", "alpaca, messages", 3),
        ("lonely.jsonl", "alpaca", 1),
        ("pydoc", "messages", 40),
    ]
    assert ledger["sources"][0]["files"] == [
        {"name": "a.jsonl", "format": "alpaca", "rows": 1, "unread": {}, "unread_others": 0},
        {"name": "b.json", "format": "messages", "rows": 2, "unread": {}, "unread_others": 0},
    ]
    assert ledger["total"]["rows"] == 44
    samples = Samples(out)
    assert samples.source_offsets.tolist() == [0, 3, 3, len(samples)]
    preview = read_json(out / "preview.json")
    assert [item["source"] for item in preview] == ["a.jsonl, b.json"] + ["pydoc"] * 19
    assert (
        str(tmp_path) not in (out / "ledger.json").read_text() + (out / "preview.json").read_text()
    )
    assert any(line.startswith("total") for line in pipeline.said)


def test_files_of_one_name_are_told_apart(pipeline: Pipeline, tmp_path: Path, jsonl: Jsonl) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    paths = [
        jsonl([row(1), row(2)], "a/x.jsonl"),
        jsonl([row(1), {"instruction": "?", "output": 3}], "b/x.jsonl"),
    ]
    with pytest.raises(DataError, match=r"  data\.train\[1\]/x\.jsonl:2: bad_value"):
        pipeline.tokenize(*paths)


def test_only_the_first_rows_of_a_source_are_used(
    pipeline: Pipeline, tmp_path: Path, jsonl: Jsonl
) -> None:
    (tmp_path / "many").mkdir()
    for name in ("a.jsonl", "b.JSONL", "c.jsonl"):
        jsonl([row(number) for number in range(600)], f"many/{name}")
    made = pipeline.tokenize(
        {"source": "file", "path": str(tmp_path / "many" / "*"), "max_rows": 1150}
    )
    ledger = read_json(made.path / "ledger.json")
    assert [file["rows"] for file in ledger["sources"][0]["files"]] == [600, 550, 0]
    assert ledger["total"]["rows"] == 1150


def test_any_number_of_workers_makes_the_same_bytes(
    tmp_path: Path, tiny_folder: Path, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        row(number, f"It is {number}. " * (number % 9)) | {f"key {number % 130}": 1}
        for number in range(300)
    ]
    path = jsonl(rows * 2)
    settings: dict[str, Any] = {"max_quarantined_fraction": 0.5, "max_dropped_fraction": 0.9}
    settings |= {"duplicates": "drop", "near_duplicates": 0.9}
    monkeypatch.setattr(sources, "BATCH_ROWS", 32)
    made = []
    for workers in (1, 3):
        monkeypatch.setattr(
            tokenize, "worker_count", lambda size_bytes, cores, workers=workers: workers
        )
        root = tmp_path / str(workers)
        root.mkdir()
        pydoc = {"source": "pydoc", "max_rows": 100}
        made.append(
            Pipeline(root, tiny_folder, []).tokenize(path, pydoc, tokenize=settings).manifest
        )
    assert (
        made[0].counts["quarantined"] == {"empty": 68}
        and made[0].counts["duplicates_dropped"] > 200
    )
    assert made[0].files == made[1].files
    assert made[0].counts == made[1].counts


def test_small_inputs_get_one_worker() -> None:
    assert [
        tokenize.worker_count(size_bytes, 16) for size_bytes in (0, 1_000_000, 4_000_000, 10**9)
    ] == [1, 1, 4, 16]


@pytest.mark.parametrize(("given", "expected"), [(None, 16), (3, 3)])
def test_no_more_workers_than_were_given_or_cores_may_be_used(
    pipeline: Pipeline,
    jsonl: Jsonl,
    monkeypatch: pytest.MonkeyPatch,
    given: int | None,
    expected: int,
) -> None:
    asked = []

    def count(size_bytes: int, cores: int) -> int:
        asked.append(cores)
        return 1

    experiment = pipeline.compile(data=[{"source": "file", "path": str(jsonl([row(1)]))}])
    pipeline.run(experiment, "data.0")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(tokenize, "worker_count", count)
    run_stage(
        partial(tokenize.run, workers=given),
        experiment.specs["tokenize"],
        pipeline.store,
        pipeline.said.append,
    )
    assert asked == [expected]


BAD = [{"instruction": "What?", "output": ""}, row(5, "a<|im_end|>b")]


def test_bad_rows_are_kept_apart_up_to_the_limit(pipeline: Pipeline, jsonl: Jsonl) -> None:
    path = jsonl([row(1), *BAD, row(2)])
    experiment = pipeline.compile(data=[{"source": "file", "path": str(path)}])
    with pytest.raises(DataError) as caught:
        pipeline.run(experiment, "tokenize")
    full_list = pipeline.store.run_dir(experiment.specs["tokenize"].digest) / "quarantine.jsonl"
    for part in (
        "2 of 4 rows cannot be used (50.00%)",
        "tokenize.max_quarantined_fraction allows 0.00%",
        "rows.jsonl:2: empty: the assistant's message has no text",
        "rows.jsonl:3: control_token: the text holds <|im_end|>",
        str(full_list),
    ):
        assert part in str(caught.value)
    assert len(read_jsonl(full_list)) == 2
    assert not pipeline.store.sealed(experiment.ref("tokenize")).exists()

    made = pipeline.tokenize(path, tokenize={"max_quarantined_fraction": 0.5})
    quarantine = read_jsonl(made.path / "quarantine.jsonl")
    assert [(entry["reason"], entry["line"], entry["file"]) for entry in quarantine] == [
        ("empty", 2, "rows.jsonl"),
        ("control_token", 3, "rows.jsonl"),
    ]
    assert "a<|im_end|>b" in quarantine[1]["excerpt"]
    assert made.manifest.counts["quarantined"] == {"control_token": 1, "empty": 1}
    assert Samples(made.path).conversations.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [{"messages": [{"role": "user", "content": "a"}]}],
            r"of 1 row none is a usable conversation: 1 no_assi",
        ),
        ([{"prompt": "a"}] * 3, "of 3 rows none is a usable conversation: 3 wrong_format"),
        (
            [row(1, "x " * 100)],
            r"no sample is left of 1 conversation:\n  1 over_long: raise tokenize.max_tokens",
        ),
        (
            [row(1), row(2, "x " * 100)],
            r"1 of 2 samples \(50.00%\) are dropped or cut, .*:\n  1 over_long: .*\n.* left have p1 \d+, .* max \d+ t",
        ),
        ([], "holds no rows"),
    ],
)
def test_data_that_cannot_be_used_is_one_clear_error(
    pipeline: Pipeline, jsonl: Jsonl, rows: list[Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        pipeline.tokenize(jsonl(rows))


def test_cut_samples_count_as_lost(pipeline: Pipeline, jsonl: Jsonl) -> None:
    path = jsonl([row(1), row(2, "x " * 100)])
    settings = {"over_long": "truncate"}
    with pytest.raises(
        DataError, match=r"1 of 2 samples(?s:.*)\n  1 truncated: their ends are cut off"
    ):
        pipeline.tokenize(path, tokenize=settings)
    made = pipeline.tokenize(path, tokenize={**settings, "max_dropped_fraction": 0.5})
    assert made.manifest.counts["truncated"] == 1
    assert np.diff(Samples(made.path).offsets).max() == 64


def test_limits_of_what_is_lost_compute_nothing_again_and_hold_for_what_is_sealed(
    pipeline: Pipeline, jsonl: Jsonl
) -> None:
    """A row of two is too long, and one of three is no row."""
    path = jsonl([row(1), row(2, "x " * 100), {"odd": 1}])
    data = [{"source": "file", "path": str(path), "format": "alpaca"}]
    loose = {"max_dropped_fraction": 0.5, "max_quarantined_fraction": 0.4}
    with pytest.raises(DataError) as raised:
        pipeline.run(pipeline.compile(data=data), "tokenize")
    made = pipeline.run(pipeline.compile(data=data, tokenize=loose), "tokenize")["tokenize"]

    for limits, refused in (
        ({"max_dropped_fraction": 0.9, "max_quarantined_fraction": 0.9}, set()),
        ({**loose, "max_dropped_fraction": 0.49}, {"tokenize.max_dropped_fraction"}),
        ({}, {"tokenize.max_dropped_fraction", "tokenize.max_quarantined_fraction"}),
    ):
        experiment = pipeline.compile(data=data, tokenize=limits)
        assert pipeline.store.sealed(experiment.ref("tokenize")) == made.path
        problems = losses_of(experiment.config, pipeline.store)
        assert {problem.partition(":")[0] for problem in problems} == refused
    [of_rows] = [
        problem for problem in problems if problem.startswith("tokenize.max_quarantined_fraction: ")
    ]
    assert of_rows.partition(": ")[2].partition(";")[0] in str(raised.value)

    (made.path / "ledger.json").write_text("{")
    # the stage that reads it names the damage
    assert losses_of(experiment.config, pipeline.store) == []


def test_a_given_format_is_used_and_other_rows_are_set_aside(
    pipeline: Pipeline, jsonl: Jsonl
) -> None:
    path = jsonl([{**row(1), "text": "Once upon a time."}, {"text": "There was a token."}, row(3)])
    data = {"source": "file", "path": str(path), "format": "text"}
    assert pipeline.tokenize({**data, "max_rows": 2}).manifest.counts["kept"] == 2
    with pytest.raises(
        DataError, match=r"1 of 3 rows cannot be used(?s:.*)rows\.jsonl:3: wrong_format: text needs"
    ):
        pipeline.tokenize(data)


def test_a_row_of_another_format_fails_and_both_are_shown(pipeline: Pipeline, jsonl: Jsonl) -> None:
    other = {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I."}]}
    with pytest.raises(DataError) as caught:
        pipeline.tokenize(jsonl([{"a": 1}, row(1), *[row(number) for number in range(600)], other]))
    for part in (
        "rows.jsonl:603: this row is sharegpt, and the file began as alpaca",
        "set `format` in data.train[0]",
        '\n  rows.jsonl:2: {"instruction": "What is 1?"',
        '\n  rows.jsonl:603: {"conversations"',
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("before", [0, 1])
def test_a_row_that_fits_two_formats_fails_and_is_shown(
    pipeline: Pipeline, jsonl: Jsonl, before: int
) -> None:
    message = rf'rows\.jsonl:{before + 1}: the row fits alpaca and text(?s:.*)\n  rows.*"Once'
    with pytest.raises(DataError, match=message):
        pipeline.tokenize(jsonl([*[row(7)] * before, {**row(1), "text": "Once."}]))


def test_what_is_not_read_is_printed_and_stands_in_the_ledger(
    pipeline: Pipeline, jsonl: Jsonl
) -> None:
    turns = [{"role": "user", "content": "?", "name": "ann"}, {"role": "assistant", "content": "!"}]
    rows = [
        {"messages": turns, "id": number, **({"lang": "en"} if number % 2 else {})}
        for number in range(20)
    ]
    (file,) = read_json(pipeline.tokenize(jsonl(rows)).path / "ledger.json")["sources"][0]["files"]
    assert (
        file["unread"] == {"id": 20, "lang": 10, "messages[].name": 20}
        and file["unread_others"] == 0
    )
    line = (
        "tokenize: rows.jsonl: columns and keys that are not read: 'id' in 20, 'lang' in 10, "
        "'messages[].name' in 20"
    )
    assert pipeline.said.count(line) == 1


@pytest.mark.parametrize(
    ("bad", "before", "said"),
    [
        (
            {"chosen": "It is.", "rejected": "No."},
            0,
            r"by its chosen and rejected: .* \{chosen: ignore, rejected: i",
        ),
        ({"label": 0}, 700, r"by its label: .* columns: \{label: ignore\}"),
    ],
)
def test_preference_data_is_an_error_of_its_file_however_many_rows_may_be_bad(
    pipeline: Pipeline, jsonl: Jsonl, bad: dict[str, Any], before: int, said: str
) -> None:
    data = {"source": "file", "path": str(jsonl([*map(row, range(before)), row(9) | bad]))}
    with pytest.raises(
        DataError, match=rf"rows\.jsonl:{before + 1}: the row is preference data {said}"
    ) as caught:
        pipeline.tokenize(data, tokenize={"max_quarantined_fraction": 1.0})
    assert "data.train[0]" in str(caught.value) and "quarantine" not in str(caught.value)
    ignored = {key: "ignore" for key in ("chosen", "rejected", "label")}
    assert pipeline.tokenize({**data, "columns": ignored}).manifest.counts["kept"] == before + 1


def test_comparisons_alone_are_told_for_what_they_are(pipeline: Pipeline, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,chosen,rejected\na,b,c\n")
    with pytest.raises(
        DataError, match=r"rows\.csv:2: the row is preference data by its chosen and rejected"
    ):
        pipeline.tokenize(path)


def test_a_named_column_has_to_be_in_each_file(
    pipeline: Pipeline, tmp_path: Path, jsonl: Jsonl
) -> None:
    (tmp_path / "many").mkdir()
    jsonl([{"instruction": "?", "answer": "!"}], "many/a.jsonl")
    jsonl([{"instruction": "?", "anwser": "!"}], "many/b.jsonl")
    columns = {"output": "answer", "label": "ignore"}
    data = {
        "source": "file",
        "path": str(tmp_path / "many" / "*"),
        "format": "alpaca",
        "columns": columns,
    }
    with pytest.raises(
        DataError,
        match=r"\Ab\.jsonl: no row has 'answer', which data\.train\[0\]\.columns names as output; its first row has "
        r"'anwser', 'instruction'; did you mean 'anwser'\?",
    ):
        pipeline.tokenize(data)
    jsonl([{"instruction": "?", "answer": "."}], "many/b.jsonl")
    pipeline.tokenize(data)


def test_duplicates_are_counted_and_dropped_on_demand(pipeline: Pipeline, jsonl: Jsonl) -> None:
    openai = {
        "messages": [
            {"role": "user", "content": "What is 1?"},
            {"role": "assistant", "content": "It is."},
        ]
    }
    paths = [jsonl([row(1), row(2), row(1), row(3), row(2)]), jsonl([openai, openai], "more.jsonl")]
    kept = pipeline.tokenize(*paths)
    assert kept.manifest.counts["duplicates"] == {"exact": 4}
    assert (kept.manifest.counts["kept"], kept.manifest.counts["duplicates_dropped"]) == (7, 0)
    content = Samples(kept.path).content
    assert content[0] == content[2] == content[5] == content[6] and content[1] == content[4]
    dropped = pipeline.tokenize(*paths, tokenize={"duplicates": "drop"})
    assert (dropped.manifest.counts["kept"], dropped.manifest.counts["duplicates_dropped"]) == (
        3,
        4,
    )
    samples = Samples(dropped.path)
    assert samples.content.tolist() == [content[0], content[1], content[3]]
    assert samples.conversations.tolist() == [0, 1, 2] and samples.source_offsets.tolist() == [
        0,
        3,
        3,
    ]


def test_near_duplicates_are_found_across_sources(pipeline: Pipeline, jsonl: Jsonl) -> None:
    story = (
        "Once upon a time there was a token that did not want to be alone in its block, so it "
        "went to find others."
    )
    paths = [
        jsonl([row(1, story), row(1, story)]),
        jsonl([row(1, story.replace("others", "some"))], "more.jsonl"),
    ]
    settings = {"max_tokens": 500, "duplicates": "drop", "near_duplicates": 0.8}
    longer = {"shard": {"block_tokens": 500}, "train": {"global_batch_tokens": 1000}}
    made = pipeline.tokenize(*paths, tokenize=settings, **longer)
    assert made.manifest.counts["duplicates"] == {"exact": 1, "near": 1}
    assert Samples(made.path).source_offsets.tolist() == [0, 1, 1]


def test_an_over_long_sample_can_be_an_error(pipeline: Pipeline, jsonl: Jsonl) -> None:
    """The longest of all rows is named, in any batch, and the named value holds it."""
    rows = [row(1), row(2, "x " * 100), *[row(3)] * 600, row(4, "x " * 200), row(5, "x " * 150)]
    message = (
        r"^rows longer than tokenize\.max_tokens \(64\): 3 of 604, and tokenize\.over_long is error\. The longest, "
        r"rows\.jsonl:603, has (\d+) tokens: set tokenize\.max_tokens: \1 \(and shard\.block_tokens to no less\), "
    )
    with pytest.raises(DataError, match=message) as caught:
        pipeline.tokenize(jsonl(rows), tokenize={"over_long": "error"})
    needed = int(str(caught.value).split("max_tokens: ")[1].split()[0])
    settings = {"shard": {"block_tokens": needed}, "train": {"global_batch_tokens": 2 * needed}}
    one_less = {"over_long": "error", "max_tokens": needed - 1}
    with pytest.raises(DataError, match=rf": 1 of 604, and .*max_tokens: {needed} "):
        pipeline.tokenize(jsonl(rows), tokenize=one_less, **settings)
    made = pipeline.tokenize(jsonl(rows), tokenize={**one_less, "max_tokens": needed}, **settings)
    assert made.manifest.counts["kept"] == len(rows)


def test_no_value_is_named_that_the_model_has_no_positions_for(
    pipeline: Pipeline, jsonl: Jsonl, tmp_path: Path
) -> None:
    folder = tmp_path / "short"
    shutil.copytree(pipeline.model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100}))
    pipeline.model = folder
    with pytest.raises(
        DataError,
        match=r"has \d+ tokens: shorten .*; max_tokens beyond the 100 pos.* needs model\.rope",
    ):
        pipeline.tokenize(jsonl([row(1), row(2, "x " * 200)]), tokenize={"over_long": "error"})


def test_split_samples_are_counted_by_piece(pipeline: Pipeline, jsonl: Jsonl) -> None:
    path = jsonl([{"text": "One."}, {"text": "x " * 100}])
    counts = pipeline.tokenize(path, tokenize={"over_long": "split"}).manifest.counts
    assert counts["split"] > 1 and counts["samples"] == counts["kept"] == counts["split"] + 1
    assert counts["conversations"] == 2


WithTemplate = Callable[..., Experiment]


@pytest.fixture
def with_template(
    pipeline: Pipeline, jsonl: Jsonl, tiny_folder: Path, tmp_path: Path
) -> WithTemplate:
    """An experiment on rows whose model has its own template, or one that begins with the text."""

    def compile_it(
        rows: list[Any], beginning: str = "", whole: str = "", **settings: Any
    ) -> Experiment:
        model = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
        template = model / "chat_template.jinja"
        template.write_text(whole or beginning + template.read_text())
        data = [{"source": "file", "path": str(jsonl(rows))}]
        return pipeline.compile(
            model={"source": "local", "path": str(model)}, data=data, tokenize=settings
        )

    return compile_it


@pytest.fixture
def no_orphans() -> Iterator[None]:
    yield
    assert workers_alive() == []


ROWS = [row(number) for number in range(6)]
# and in no question of a check of models
IN_ROWS = "{% if 'What is' in (messages[0].content or '') %}"
LOOP = "{% for each in range(99999) %}"
SPIN = IN_ROWS + LOOP * 3 + "{% endfor %}" * 3 + "{% endif %}"
FILL = LOOP + "{% set all.text = all.text ~ 'a' * 50_000_000 %}{% endfor %}"
HOARD = "{% set all = namespace(text='') %}" + IN_ROWS + FILL + "{% endif %}"
SURPRISE = "{% if ' 3?' in messages[0].content and not add_generation_prompt %}Surprise!{% endif %}"
RECURSE = "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            SPIN,
            r"rows\.jsonl:1: a worker process was ended while rendering .*: more than 0\.5 s of CPU time\. Look at",
        ),
        (
            HOARD,
            r"rows\.jsonl:1: a worker process was ended while rendering .*: more than 0\.3 GiB of memory",
        ),
        (RECURSE, r"rows\.jsonl:1: .*chat_template\.jinja: the chat template fails .* recursion"),
        (
            "{{ messages.__class__.__mro__ }}",
            r"rows\.jsonl:1: .*chat_template\.jinja: .* fails .*unsafe|undefined",
        ),
        (
            "{{ raise_exception.__globals__.os.system('true') }}",
            r"rows\.jsonl:1: .*chat_template\.jinja: .* fails ",
        ),
        (
            "{% if '3' in messages[0].content %}" + SPIN + "{% endif %}",
            r"rows\.jsonl:4: .*more than 0\.5 s of CPU",
        ),
        (
            "{% if '4' in messages[0].content %}{{ raise_exception('no fours') }}{% endif %}",
            r"rows\.jsonl:5: .*chat_template\.jinja: .* no fours",
        ),
    ],
)
@pytest.mark.usefixtures("no_orphans")
def test_a_hostile_template_is_stopped_and_named(
    pipeline: Pipeline,
    with_template: WithTemplate,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    message: str,
) -> None:
    monkeypatch.setattr(
        tokenize, "LIMITS", Limits(memory_bytes=300 << 20, cpu_s=30.0 if template is HOARD else 0.5)
    )
    experiment = with_template(ROWS, template)
    with pytest.raises(DataError, match=message):
        pipeline.run(experiment, "tokenize")
    assert not pipeline.store.sealed(experiment.ref("tokenize")).exists()


IN_ROW_3 = "{% if ' 3?' in messages[0].content %}"


@pytest.mark.parametrize(
    ("template", "rows", "place", "cpu_s"),
    [
        (IN_ROW_3 + SPIN + "{% endif %}", ROWS, 4, 1.0),
        (IN_ROW_3 + HOARD + "{% endif %}", ROWS, 4, 60.0),
        (
            "",
            [*ROWS[:2], row(2, "x" * 3_000_000), *ROWS[3:]],
            3,
            60.0,
        ),  # a word, which `tokenizers` takes as a whole
    ],
)
@pytest.mark.usefixtures("no_orphans")
def test_a_row_that_exceeds_the_limits_is_put_aside(
    pipeline: Pipeline,
    with_template: WithTemplate,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    rows: list[Any],
    place: int,
    cpu_s: float,
) -> None:
    monkeypatch.setattr(tokenize, "LIMITS", Limits(memory_bytes=300 << 20, cpu_s=cpu_s))
    made = pipeline.run(with_template(rows, template, max_quarantined_fraction=0.5), "tokenize")[
        "tokenize"
    ]
    assert made.manifest.counts["quarantined"] == {"over_limits": 1}
    assert made.manifest.counts["conversations"] == 5
    (entry,) = read_jsonl(made.path / "quarantine.jsonl")
    assert (entry["line"], entry["reason"]) == (place, "over_limits")
    assert len(entry["excerpt"]) <= 200


@pytest.mark.usefixtures("no_orphans")
def test_a_template_that_exceeds_the_limits_in_every_row_ends_the_stage(
    pipeline: Pipeline, with_template: WithTemplate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "LIMITS", Limits(cpu_s=0.5))
    monkeypatch.setattr(batches, "MOST_OVER_LIMITS", 2)
    experiment = with_template(ROWS, SPIN, max_quarantined_fraction=0.9)
    with pytest.raises(
        DataError, match=r"rows\.jsonl:3: a worker process was ended while rendering"
    ):
        pipeline.run(experiment, "tokenize")


@pytest.mark.usefixtures("no_orphans")
def test_a_worker_that_is_killed_is_probably_out_of_memory(
    pipeline: Pipeline, with_template: WithTemplate
) -> None:
    experiment = with_template(ROWS, SPIN)

    def kill_a_worker() -> None:
        wait_for(lambda: bool(workers_alive()), "a worker")
        os.kill(workers_alive()[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_a_worker)
    killer.start()
    with pytest.raises(
        Interrupted,
        match=r"killed from outside \(SIGKILL\), at [\d,]+ MB, most likely because memory",
    ):
        pipeline.run(experiment, "tokenize")
    killer.join()


def test_drops_that_are_no_matter_of_length_are_named_with_what_to_do(
    pipeline: Pipeline, with_template: WithTemplate
) -> None:
    pipeline.run(
        with_template([row(number) for number in (3, *range(10, 29))], SURPRISE), "tokenize"
    )
    assert any(
        line.startswith("1 of 20 samples dropped as prompt_not_prefix: ") for line in pipeline.said
    )


def test_drops_of_all_kinds_count_together(pipeline: Pipeline, with_template: WithTemplate) -> None:
    long = [row(number, "x " * 100) for number in (30, 31)]
    experiment = with_template(
        [*[row(3)] * 2, *long, *[row(number) for number in range(40, 96)]], SURPRISE
    )
    with pytest.raises(DataError) as caught:  # each alone is allowed
        pipeline.run(experiment, "tokenize")
    message = str(caught.value)
    assert "rows.jsonl: 4 of 60 samples (6.67%) are dropped or cut" in message
    assert "\n  2 over_long: raise" in message and "\n  2 prompt_not_prefix: the chat" in message


def test_a_small_source_does_not_vanish_unseen(pipeline: Pipeline, jsonl: Jsonl) -> None:
    large = jsonl([row(number) for number in range(100)], "large.jsonl")
    small = jsonl([row(number, "x " * 100) for number in range(2)], "small.jsonl")
    with pytest.raises(DataError, match=r"\Asmall\.jsonl: 2 of 2 samples \(100\.00%\) are dropped"):
        pipeline.tokenize(large, small)
    jsonl(BAD, "small.jsonl")
    with pytest.raises(
        DataError, match=r"\Asmall\.jsonl: of 2 rows none .*\n  small\.jsonl:1: empty"
    ):
        pipeline.tokenize(large, small, tokenize={"max_quarantined_fraction": 0.5})


THREE_TURNS = {**row(5), "history": [["How are you?", "Fine."], ["And now?", "Still."]]}


@pytest.mark.parametrize(
    ("over_long", "bad", "turns", "message"),
    [
        ("drop", row(7), 21, "of 1 turns of a conversation to be trained on, 0 are in a sample"),
        (
            "truncate",
            THREE_TURNS,
            23,
            "of 3 turns of a conversation to be trained on, 2 are in a sample",
        ),
        (
            "split",
            THREE_TURNS,
            23,
            "of 3 turns of a conversation to be trained on, 2 are in a sample",
        ),
    ],
)
def test_a_turn_that_the_encoder_loses_is_noticed(
    pipeline: Pipeline,
    jsonl: Jsonl,
    monkeypatch: pytest.MonkeyPatch,
    over_long: str,
    bad: dict[str, Any],
    turns: int,
    message: str,
) -> None:
    data = [
        {"source": "file", "path": str(jsonl([*[row(number) for number in range(40, 60)], bad]))}
    ]
    experiment = pipeline.compile(data=data, tokenize={"over_long": over_long})
    monkeypatch.setattr(tokenize, "Encoder", LossyEncoder)
    with pytest.raises(IntegrityError, match=rf"rows\.jsonl:1 to 21: {message}"):
        pipeline.run(experiment, "tokenize")
    assert not pipeline.store.sealed(experiment.ref("tokenize")).exists()
    monkeypatch.undo()
    assert pipeline.run(experiment, "tokenize")["tokenize"].manifest.counts["turns"] == turns


def test_where_the_fast_way_is_wrong_all_is_tokenized_the_slow_way(
    pipeline: Pipeline, jsonl: Jsonl, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl([row(number) for number in range(20)])
    right = pipeline.tokenize(path)
    shutil.rmtree(right.path)

    monkeypatch.setattr(tokenize, "Encoder", WrongEncoder)
    found = pipeline.tokenize(path)

    assert found.manifest.files == right.manifest.files
    assert "tiktoken and tokenizers differ on" in "\n".join(pipeline.said)
    assert "tokenized by tokenizers, whole texts" in "\n".join(pipeline.said)


def test_how_answers_are_asked_for_is_counted_and_said(pipeline: Pipeline, jsonl: Jsonl) -> None:
    thinks = {"role": "assistant", "content": "!", "reasoning_content": "They ask."}
    chats = [
        {"messages": [{"role": "user", "content": f"{number}?"}, thinks]} for number in range(3)
    ]
    paths = (jsonl([row(number) for number in range(5)]), jsonl(chats, "chats.jsonl"))

    mixed = pipeline.tokenize(*paths).manifest.counts
    assert (mixed["prompts"], mixed["thinking_default"]) == (
        {"thinking_off": 5, "thinking_on": 3},
        "on",
    )
    said = "\n".join(pipeline.said)
    assert (
        "5 answers were trained with enable_thinking=False: call tokenizer.apply_chat_template("
        in said
    )
    assert (
        "3 answers were trained with enable_thinking=True, the chat template's default: call tok"
        in said
    )

    pipeline.said.clear()
    asked = pipeline.tokenize(*paths, tokenize={"prompt_thinking": "on"}).manifest.counts
    assert asked["prompts"] == {"thinking_on": 8}
    assert "enable_thinking=False" not in "\n".join(pipeline.said)


ASKED = {"role": "user", "content": "q"}
THINKS = {"role": "assistant", "content": "a", "reasoning_content": "why"}


def test_reasoning_that_the_template_leaves_out_fails_with_what_to_do(
    pipeline: Pipeline, with_template: WithTemplate
) -> None:
    experiment = with_template([{"messages": [ASKED, THINKS]}] * 60, whole=INSTRUCT)
    message = r"no sample is left of 60(?s:.*)60 thinking_not_rendered: the chat template leav"
    with pytest.raises(DataError, match=message):
        pipeline.run(experiment, "tokenize")


def test_a_row_whose_thinking_is_left_out_hides_no_row_without(
    pipeline: Pipeline, with_template: WithTemplate
) -> None:
    rows = [
        {"messages": [ASKED, THINKS]},
        {"messages": [ASKED, {"role": "assistant", "content": "a"}]},
    ]
    experiment = with_template(rows, whole=INSTRUCT, duplicates="drop", max_dropped_fraction=0.5)
    counts = pipeline.run(experiment, "tokenize")["tokenize"].manifest.counts
    assert (counts["kept"], counts["dropped"]) == (1, {"thinking_not_rendered": 1})
    # this template has no switch, so nothing is said of calls
    assert counts["thinking_default"] is None
    assert "enable_thinking" not in "\n".join(pipeline.said)


def test_roles_and_ignored_keys_that_no_row_has_are_named(
    pipeline: Pipeline, tmp_path: Path, jsonl: Jsonl
) -> None:
    turns = [{"role": "user", "content": "Why?", "mood": "glum"}, {"role": "bot", "content": "So."}]
    rows = [{"messages": [dict(turn) for turn in turns], "label": number} for number in range(3)]
    source = {"source": "file", "path": str(jsonl(rows))}
    columns = {"label": "ignore", "mood": "ignore", "lable": "ignore"}

    pipeline.tokenize(
        {**source, "columns": columns, "roles": {"bot": "assistant", "boss": "system"}}
    )

    named = [line for line in pipeline.said if "read none has" in line]
    assert named == [
        "tokenize: rows.jsonl: of 3 rows read none has 'lable', which data.train[0].columns "
        "ignores",
        "tokenize: rows.jsonl: of 3 rows read none has a turn of 'boss', which data.train[0].roles "
        "names",
    ]
