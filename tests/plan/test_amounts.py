"""What is expected of blocks by the first rows of files, beside what packing makes of them."""

import gzip
import json
from collections.abc import Callable, Iterable
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import datasets  # type: ignore[import-untyped]
import pytest

from pipeline_lib.config.load import load_config
from pipeline_lib.config.schema import Config
from pipeline_lib.core.store import Store
from pipeline_lib.core.user_cache import UserCache
from pipeline_lib.data.demo import conversations
from pipeline_lib.plan.amounts import Amount, amounts_of, expected_workload
from pipeline_lib.plan.answer import answer, question_of
from pipeline_lib.plan.known import vocabulary_of, workload_of
from pipeline_lib.plan.warnings import on_steps
from pipeline_lib.plan.workload import assumed_workload
from pipeline_lib.records.plan import Workload
from tests.stages import run_stages_here

QWEN = Path(__file__).parents[3] / "shared" / "qwen3-tokenizer"
ROWS = 800


@cache
def pairs() -> list[tuple[str, str]]:
    """Questions and answers of the demo."""
    told = (messages for messages in conversations() if len(messages) == 2)
    return [(asked["content"], said["content"]) for asked, said in islice(told, ROWS)]


def alone() -> list[dict[str, Any]]:
    return [{"instruction": asked, "output": said} for asked, said in pairs()]


def several() -> list[dict[str, Any]]:
    """Conversations of four answers; the template thinks in the last only, so each is a sample.

    It is a sample of its own.
    """
    turns = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        for asked, said in pairs()
    ]
    return [{"messages": sum(turns[at : at + 4], [])} for at in range(0, len(turns), 4)]


def texts() -> list[dict[str, Any]]:
    said = [said for _, said in pairs()]
    return [{"text": "\n".join(said[at : at + 8])} for at in range(0, len(said), 8)]


def config_of(
    folder: Path, rows: Iterable[dict[str, Any]], tokenize: str, train: str = "{}"
) -> Path:
    data, path = folder / "rows.jsonl", folder / "my.yaml"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.write_text(
        f"experiment: my\nmodel: {{source: tiny}}\ndata: {{train: [{{source: file, path: "
        f"{data}}}]}}\n"
        f"tokenize: {tokenize}\nshard: {{block_tokens: 1024}}\ncluster: {{cpu_ranks: 1}}\ntrain: "
        f"{train}\n"
    )
    return path


def expected(config: Config, store: Store) -> Workload:
    return expected_workload(config, vocabulary_of(config, store))


@pytest.mark.parametrize(
    ("rows", "tokenize"),
    [
        (alone, "{max_tokens: 1024}"),
        (several, "{max_tokens: 1024, over_long: truncate, max_dropped_fraction: 1.0}"),
        (several, "{max_tokens: 512, over_long: split, max_dropped_fraction: 1.0}"),
        (texts, "{max_tokens: 256, over_long: split}"),
    ],
    ids=["single turns", "several turns", "several turns, split", "texts, split"],
)
def test_it_is_near_what_packing_makes(
    tmp_path: Path, rows: Callable[[], list[dict[str, Any]]], tokenize: str
) -> None:
    """The tokens are Qwen3's: the demo's own vocabulary knows these texts."""
    if not QWEN.is_dir():
        pytest.skip(f"{QWEN} is not there")
    path = config_of(tmp_path, rows(), tokenize, "{global_batch_tokens: 2048}")
    store = Store(tmp_path / "store", UserCache(tmp_path / "cache"))
    path.write_text(path.read_text().replace("source: tiny", f"source: tiny, tokenizer: {QWEN}"))
    config = load_config(path)
    told, assumed = expected(config, store), assumed_workload(config)
    run_stages_here(path, store, last="shard")
    packed = workload_of(config, store)
    assert told.is_assumed and told.is_estimated and not packed.is_assumed
    assert told.samples_per_block == pytest.approx(packed.samples_per_block, rel=0.25)
    assert told.document_tokens == pytest.approx(packed.document_tokens, rel=0.25)
    assert told.validation_blocks == pytest.approx(packed.validation_blocks, rel=0.4, abs=1)
    assert told.supervised_fraction == pytest.approx(packed.supervised_fraction, abs=0.1)
    assert told.document_band is not None and assumed.document_band is not None
    low, high = told.document_band
    assert low <= told.document_tokens <= high
    assert 0.95 * low <= packed.document_tokens <= 1.05 * high
    assert high / low < assumed.document_band[1] / assumed.document_band[0]


def test_only_what_is_trained_on_is_counted(tmp_path: Path) -> None:
    (tmp_path / "noted").mkdir()
    noted = [{**row, "note": "an answer that somebody has looked at " * 20} for row in alone()]
    plain, more = (
        load_config(config_of(folder, rows, "{max_tokens: 1024}"))
        for folder, rows in ((tmp_path, alone()), (tmp_path / "noted", noted))
    )
    assert amounts_of(plain, None) == amounts_of(more, None)


def test_only_the_last_answers_count_where_no_others_are_trained_on(tmp_path: Path) -> None:
    rows = several()
    path = config_of(
        tmp_path, rows, "{max_tokens: 1024, over_long: truncate, train_on: last_assistant}"
    )
    found = amounts_of(load_config(path), None)
    assert found is not None
    assert found[1].samples == pytest.approx(0.95 * len(rows))
    assert all(amount.supervised < 0.5 * amount.tokens for amount in found)


def test_the_plan_before_packing_takes_as_many_blocks_as_hold_the_samples(tmp_path: Path) -> None:
    path = config_of(tmp_path, alone(), "{max_tokens: 1024}", "{global_batch_samples: 64}")
    store = Store(tmp_path)
    config = load_config(path)
    question = question_of(config, store)
    each = question.workload.samples_per_block
    assert each > 2 * assumed_workload(config).samples_per_block
    assert question.batch(config.train).global_batch_blocks == round(64 / each)
    [said] = [text for text in answer(question).content.summary.assumed if "supervised" in text]
    assert said.startswith(
        f"by the first rows, documents of {question.workload.document_tokens:,.0f} tokens, "
    )


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    turns = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": answer, **more},
    ]
    return {"messages": turns}


def of(folder: Path, rows: list[dict[str, Any]], tokenize: str) -> tuple[Amount, Amount, Amount]:
    fewest, expected, most = (
        amounts_of(load_config(config_of(folder, rows, tokenize)), None) or [Amount()] * 3
    )
    return fewest, expected, most


def test_what_is_cut_or_split_is_never_less_than_with_fewer_tokens(tmp_path: Path) -> None:
    long = [chat("word " * 600, "answer " * 43)] * 100
    several = [{"messages": chat("why " * 60, "because " * 100)["messages"] * 8}] * 100
    for rows, tokenize in (
        (long, "{max_tokens: 800, over_long: truncate}"),
        (several, "{max_tokens: 1024, over_long: split}"),
        (several, "{max_tokens: 1024, over_long: drop}"),
    ):
        fewest, expected, most = of(tmp_path, rows, tokenize)
        assert 0 < fewest.tokens <= expected.tokens <= most.tokens, tokenize
    config = load_config(config_of(tmp_path, several, "{max_tokens: 1024, over_long: split}"))
    low, high = expected_workload(config, None).document_band or (0.0, 0.0)
    assert 256 < low <= high


def test_thinking_counts_as_it_is_trained_on(tmp_path: Path) -> None:
    rows = [chat("Why?", "So it is. " * 10, reasoning_content="Let me think. " * 100)] * 100
    keep, mask, strip = (
        of(tmp_path, rows, f"{{max_tokens: 1024, thinking: {each}}}")[1]
        for each in ("keep", "mask", "strip")
    )
    assert keep.tokens == mask.tokens > 5 * strip.tokens
    assert keep.supervised > 5 * mask.supervised
    assert mask.supervised == strip.supervised


def test_a_system_message_and_tools_of_the_config_count_in_conversations_without_their_own(
    tmp_path: Path,
) -> None:
    rows = [chat("Why?", "So it is.")] * 100
    plain = of(tmp_path, rows, "{max_tokens: 1024}")[1]
    for more in (
        f"system: '{'Be kind. ' * 100}'",
        f"tools: ['{json.dumps({'name': 'look ' * 180})}']",
    ):
        assert (
            of(tmp_path, rows, f"{{max_tokens: 1024, {more}}}")[1].tokens > plain.tokens + 95 * 200
        )
    own = [
        {"messages": [{"role": "system", "content": "Be brief."}, *row["messages"]]} for row in rows
    ]
    with_own = of(tmp_path, own, "{max_tokens: 1024}")
    assert of(tmp_path, own, f"{{max_tokens: 1024, system: '{'Be kind. ' * 100}'}}") == with_own


def test_of_many_rows_the_first_are_used(tmp_path: Path) -> None:
    path = config_of(tmp_path, [], "{max_tokens: 1024}")
    for name, words in (("a", 5), ("b", 300)):
        (tmp_path / f"part-{name}.jsonl").write_text(
            (json.dumps(chat("word " * words, "word")) + "\n") * 1000
        )
    files = path.read_text().replace("rows.jsonl", "part-*.jsonl")
    found = []
    for rows in (500, 1500, 9000):
        path.write_text(files.replace(".jsonl}", f".jsonl, max_rows: {rows}}}"))
        amounts = amounts_of(load_config(path), None)
        assert amounts is not None
        assert amounts[1].samples == pytest.approx(0.95 * min(rows, 2000))
        found.append(amounts[1].tokens_per_sample)
    assert found[0] < 30
    assert found[1] == pytest.approx((2 * found[0] + (2 * found[2] - found[0])) / 3)


def test_weights_are_of_the_training_alone(tmp_path: Path) -> None:
    path = config_of(tmp_path, alone(), "{max_tokens: 1024}")
    plain, amounts = expected_workload(load_config(path), None), amounts_of(load_config(path), None)
    path.write_text(path.read_text().replace(".jsonl}", ".jsonl, weight: 10}"))
    heavy, more = expected_workload(load_config(path), None), amounts_of(load_config(path), None)
    assert amounts is not None and more is not None
    assert more[1].samples == pytest.approx(10 * amounts[1].samples)
    assert heavy.validation_blocks == plain.validation_blocks > 0


@pytest.mark.parametrize(
    "name", ["rows.jsonl.gz", "rows.json", "rows.json.gz", "rows.csv", "rows.parquet"]
)
def test_the_rows_of_other_files_are_extrapolated(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": f"What is {row}?", "completion": f"It is {row}."} for row in range(5000)]
    path = tmp_path / name
    if name.endswith((".csv", ".parquet")):
        table = datasets.Dataset.from_list(rows)
        table.to_csv(path) if name.endswith(".csv") else table.to_parquet(path)
    else:
        text = (
            json.dumps(rows)
            if ".json." in f"{name}."
            else "".join(json.dumps(row) + "\n" for row in rows)
        )
        path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    config = config_of(tmp_path, [], "{max_tokens: 1024}")
    config.write_text(config.read_text().replace("rows.jsonl", name))
    found = amounts_of(load_config(config), None)
    assert found is not None
    assert found[1].samples == pytest.approx(0.95 * 5000, rel=0.1)


def test_a_file_of_which_nothing_is_kept_says_nothing(tmp_path: Path) -> None:
    path = config_of(tmp_path, [{"text": "word " * 9000}] * 30, "{max_tokens: 1024}")
    store = Store(tmp_path / "store")
    config = load_config(path)
    assert expected_workload(config, None) == assumed_workload(config)
    assert list(on_steps(config, store)) == []


def test_what_is_not_here_is_assumed(tmp_path: Path) -> None:
    path = config_of(tmp_path, [], "{max_tokens: 1024}")
    config = load_config(path)
    assert expected_workload(config, None) == assumed_workload(config)
    path.write_text(
        path.read_text().replace(f"source: file, path: {tmp_path}/rows.jsonl", "source: pydoc")
    )
    config = load_config(path)
    assert expected_workload(config, None) == assumed_workload(config)


@pytest.mark.parametrize("files", [1, 2, 5, 30])
def test_the_rows_of_many_files_are_extrapolated(tmp_path: Path, files: int) -> None:
    path, rows = config_of(tmp_path, [], "{max_tokens: 1024}"), 6000 // files
    for number in range(files):
        told = [
            {"instruction": f"What is {number} and {row}?", "output": "A number. " * 9}
            for row in range(rows)
        ]
        (tmp_path / f"part{number}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in told)
        )
    path.write_text(path.read_text().replace("rows.jsonl", "part*.jsonl"))
    found = amounts_of(load_config(path), None)
    assert found is not None
    assert found[1].samples == pytest.approx(0.95 * 6000, rel=0.05)
