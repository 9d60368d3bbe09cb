"""Rows of one conversation in any form: equal ones are found, none on both sides of a split."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.core.stage import Sealed
from pipeline_lib.data.blocks import BlockReader, documents_of
from pipeline_lib.data.documents import Samples
from pipeline_lib.data.encode import load_tokenizer

from .conftest import Pipeline

Jsonl = Callable[..., Path]
LONG: dict[str, Any] = {"shard": {"block_tokens": 256}, "train": {"global_batch_tokens": 512}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def turns_of(number: int, count: int) -> list[dict[str, Any]]:
    """The first turns of a conversation of its own."""
    turns = []
    for turn in range(count):
        turns += [user(f"What is {number}, time {turn}?"), assistant(f"It is {number} and {turn}.")]
    return turns


def growing(number: int) -> list[Any]:
    return [{"messages": turns_of(number, count)} for count in (1, 2, 3)]


def turn_by_turn(number: int) -> list[Any]:
    turns = [message["content"] for message in turns_of(number, 3)]
    pairs = [turns[start : start + 2] for start in (0, 2, 4)]
    return [
        {"instruction": pairs[n][0], "output": pairs[n][1], "history": pairs[:n]} for n in range(3)
    ]


def several_answers(number: int) -> list[Any]:
    return [
        {"messages": [user(f"What is {number}?"), assistant(f"It is {answer}.")]}
        for answer in "abc"
    ]


def thinking_twice(number: int) -> list[Any]:
    thought, answer = f"Is it {number}?", f"It is {number}."
    return [
        {"messages": [user(f"What is {number}?"), assistant(answer, reasoning_content=thought)]},
        {
            "messages": [
                user(f"What is {number}?"),
                assistant(f"<think>\n{thought}\n</think>\n\n{answer}"),
            ]
        },
        {"messages": [user(f" What is {number}?\n"), assistant(answer, reasoning_content="No!")]},
    ]


def make(pipeline: Pipeline, path: Path, last: str = "shard", **settings: Any) -> dict[str, Sealed]:
    data = [{"source": "file", "path": str(path)}]
    tokenize = {"max_tokens": 256, **settings}
    return pipeline.run(
        pipeline.compile(data=data, validation_fraction=0.3, tokenize=tokenize, **LONG), last
    )


def numbers_on(folder: Path, tokenizer: Any) -> set[str]:
    """What the documents of a side are about."""
    reader = BlockReader(folder)
    texts = [
        tokenizer.decode(document.tokens.tolist(), skip_special_tokens=False)
        for block in range(len(reader))
        for document in documents_of(reader[block])
    ]
    return {text.split("What is ")[1].split("?")[0].split(",")[0] for text in texts}


@pytest.mark.parametrize(
    ("rows_of", "thinking"),
    [
        (growing, "keep"),
        (turn_by_turn, "strip"),
        (several_answers, "keep"),
        (thinking_twice, "keep"),
        (thinking_twice, "strip"),
    ],
)
def test_no_conversation_is_on_both_sides(
    pipeline: Pipeline, jsonl: Jsonl, rows_of: Callable[[int], list[Any]], thinking: str
) -> None:
    rows = [row for number in range(100, 140) for row in rows_of(number)]
    made = make(pipeline, jsonl(rows), thinking=thinking)
    tokenizer = load_tokenizer(made["model"].path)
    train, validation = (
        numbers_on(made["shard"].path / side, tokenizer) for side in ("train", "validation")
    )
    assert len(train | validation) == 40 and len(validation) >= 4
    assert not train & validation


def test_texts_of_one_content_are_on_one_side(pipeline: Pipeline, jsonl: Jsonl) -> None:
    rows = [
        {"text": f"What is {number}? A café.{end}"} for number in range(60) for end in ("", "\n")
    ]
    rows += [{"text": f"What is {number}? A cafe\u0301."} for number in range(60)]
    prompts = Samples(make(pipeline, jsonl(rows), "tokenize")["tokenize"].path).prompts.tolist()
    assert prompts[0:120:2] == prompts[1:120:2] == prompts[120:] and len(set(prompts)) == 60


def test_one_question_about_many_documents_is_split_by_the_document(
    pipeline: Pipeline, jsonl: Jsonl
) -> None:
    """The document stands in the system message; its own answers and later turns stay with it."""
    rows = [
        {"messages": [{"role": "system", "content": f"{number}{end}"}, *turns_of(0, count)]}
        for number in range(40)
        for end, count in (("", 1), ("\n", 2))
    ]
    made = make(pipeline, jsonl(rows))
    prompts = Samples(made["tokenize"].path).prompts.tolist()
    assert prompts[::2] == prompts[1::2] and len(set(prompts)) == 40
    assert made["shard"].manifest.counts["validation"]["documents"] >= 4


def test_what_all_rows_have_in_common_is_no_part_of_the_question(
    pipeline: Pipeline, jsonl: Jsonl
) -> None:
    """Whether the config has a system message or not, rows without one keep their side.

    It is that of their question.
    """
    brought = {"role": "system", "content": "Be brief.\n"}
    path = jsonl(
        [{"messages": turns_of(number, 1)} for number in range(5)]
        + [{"messages": [brought, *turns_of(0, 1)]}]
    )
    plain, given = (
        Samples(make(pipeline, path, "tokenize", **settings)["tokenize"].path).prompts.tolist()
        for settings in ({}, {"system": "Be brief."})
    )
    asked = b"What is 0, time 0?"
    assert plain[:5] == given[:5] and plain[0] != plain[5] and given[0] == given[5]
    assert plain[0] == int.from_bytes(hashlib.blake2b(asked, digest_size=8).digest(), "little")


def test_rows_that_train_on_other_turns_are_no_duplicates(pipeline: Pipeline, jsonl: Jsonl) -> None:
    first, second, both = turns_of(7, 2), turns_of(7, 2), turns_of(7, 2)
    first[1]["weight"], first[3]["weight"] = 1, 0
    second[1]["weight"], second[3]["weight"] = 0, 1
    path = jsonl([{"messages": messages} for messages in (first, second, both, second)])
    made = make(pipeline, path, "tokenize", duplicates="drop")["tokenize"]
    assert made.manifest.counts["duplicates"] == {"exact": 1}
    assert made.manifest.counts["turns"] == 4
    supervised = Samples(made.path).supervised
    assert made.manifest.counts["supervised_tokens"] == supervised.sum() > 0


def test_conversations_of_which_nothing_is_trained_on_are_not_all_alike(
    pipeline: Pipeline, jsonl: Jsonl
) -> None:
    rows = [{"messages": turns_of(number, 2)} for number in (1, 2, 2, 3)]
    for row in rows[:3]:
        row["messages"][3]["weight"] = 0
    settings = {"train_on": "last_assistant", "duplicates": "drop", "max_dropped_fraction": 1.0}
    counts = make(pipeline, jsonl(rows), "tokenize", **settings)["tokenize"].manifest.counts
    assert (counts["duplicates"], counts["dropped"]) == ({"exact": 1}, {"last_turn_excluded": 2})
    assert (counts["kept"], counts["turns"]) == (1, 1)


@pytest.mark.parametrize(("thinking", "duplicates"), [("keep", 1), ("strip", 2), ("mask", 1)])
def test_thinking_is_the_same_wherever_it_is_written(
    pipeline: Pipeline, jsonl: Jsonl, thinking: str, duplicates: int
) -> None:
    rows = thinking_twice(7)
    rows[2]["messages"][0] = rows[0]["messages"][0]  # only the thought is another
    made = make(
        pipeline,
        jsonl([*rows, *several_answers(8)]),
        "tokenize",
        duplicates="drop",
        thinking=thinking,
    )
    assert made["tokenize"].manifest.counts["duplicates"] == {"exact": duplicates}


def test_turns_that_are_not_trained_on_make_no_conversations_alike(
    pipeline: Pipeline, jsonl: Jsonl
) -> None:
    pytest.importorskip("datasketch")
    turns = [
        user("Who?"),
        assistant("A token that went out to find others."),
        user("Why?"),
        assistant("So it was said."),
    ]
    rows = [json.loads(json.dumps({"messages": turns})) for _ in range(2)]
    rows[0]["messages"][1]["weight"] = rows[1]["messages"][3]["weight"] = 0
    made = make(pipeline, jsonl(rows), "tokenize", duplicates="drop", near_duplicates=0.8)
    assert made["tokenize"].manifest.counts["duplicates"] == {}
