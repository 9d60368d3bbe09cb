from typing import Any

import pytest

from pipeline_lib.data.rows import BadRow, Format, Reason, detect, to_messages

HELLO = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


@pytest.mark.parametrize(
    ("row", "row_format", "messages"),
    [
        ({"instruction": "hello", "input": "", "output": "hi"}, "alpaca", HELLO),
        ({"instruction": "hello", "output": "hi", "source": 7}, "alpaca", HELLO),
        ({"instruction": "", "input": "hello", "output": "hi", "history": None, "system": None}, "alpaca", HELLO),
        (
            {"instruction": "a", "input": "b", "output": "hi", "history": [["hello", "hi"]], "system": "be kind"},
            "alpaca",
            [
                {"role": "system", "content": "be kind"},
                *HELLO,
                {"role": "user", "content": "a\nb"},
                {"role": "assistant", "content": "hi"},
            ],
        ),
        ({"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}]}, "sharegpt", HELLO),
        (
            {"conversations": [{"from": "user", "value": "hello"}, {"from": "assistant", "value": "hi"}]},
            "sharegpt",
            HELLO,
        ),
        (
            {
                "system": "be kind",
                "conversations": [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}],
            },
            "sharegpt",
            [{"role": "system", "content": "be kind"}, *HELLO],
        ),
        ({"messages": HELLO, "id": 3}, "messages", HELLO),
        ({"messages": [{"role": "system", "content": " "}, *HELLO]}, "messages", HELLO),
        ({"messages": [*HELLO, {"role": "user", "content": "and?"}]}, "messages", None),
        (
            {"messages": [HELLO[0], {"role": "assistant", "content": "hi", "reasoning_content": "greet"}]},
            "messages",
            [HELLO[0], {"role": "assistant", "content": "hi", "reasoning_content": "greet"}],
        ),
    ],
)
def test_rows_of_each_format_become_messages(row: Any, row_format: Format, messages: Any) -> None:
    assert detect(row) == row_format
    assert to_messages(row, row_format) == (messages if messages is not None else row[row_format])


def chat(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


BAD_ROWS: list[tuple[Any, Reason, str]] = [
    ([1, 2], Reason.NOT_AN_OBJECT, "found a list"),
    ("text", Reason.NOT_AN_OBJECT, "found text"),
    (None, Reason.NOT_AN_OBJECT, "found null"),
    ({"prompt": "a", "response": "b"}, Reason.WRONG_FORMAT, "'prompt', 'response'"),
    ({}, Reason.WRONG_FORMAT, "no keys"),
    ({"messages": "hello"}, Reason.BAD_VALUE, "messages: expected a list, found text"),
    ({"messages": []}, Reason.EMPTY, "no messages"),
    ({"messages": ["hello"]}, Reason.BAD_VALUE, r"messages\[0\]: expected an object, found text"),
    ({"messages": [{"content": "a"}]}, Reason.BAD_VALUE, r"messages\[0\].role: None is not one of"),
    (chat(("tool", "4"), ("assistant", "4")), Reason.BAD_VALUE, r"messages\[0\].role: 'tool' is not one of"),
    (chat(("user", "a"), ("assistant", None)), Reason.BAD_VALUE, r"messages\[1\].content: expected text, found null"),
    (chat(("user", 5), ("assistant", "b")), Reason.BAD_VALUE, "expected text, found a number"),
    (chat(("user", True), ("assistant", "b")), Reason.BAD_VALUE, "expected text, found a boolean"),
    (chat(("user", [{"type": "text"}]), ("assistant", "b")), Reason.BAD_VALUE, "expected text, found a list"),
    (chat(("user", "a"), ("user", "b"), ("assistant", "c")), Reason.BAD_ROLE_ORDER, "turn 2 is user"),
    (chat(("assistant", "a"), ("user", "b")), Reason.BAD_ROLE_ORDER, "turn 1 is assistant"),
    (chat(("user", "a"), ("assistant", "b"), ("system", "c")), Reason.BAD_ROLE_ORDER, "turn 3 is system"),
    (chat(("user", "a")), Reason.NO_ASSISTANT_TURN, "only user"),
    (chat(("user", " \n"), ("assistant", "b")), Reason.EMPTY, "the user says nothing"),
    (chat(("user", "a"), ("assistant", "")), Reason.EMPTY, "the assistant says nothing"),
    (chat(("user", "a"), ("assistant", "b\0c")), Reason.BAD_TEXT, "NUL"),
    (chat(("user", "a\ud800"), ("assistant", "b")), Reason.BAD_TEXT, "surrogate pair at character 1"),
    ({"messages": [*HELLO, {"role": "user", "content": "a", "tool_calls": [1]}]}, Reason.BAD_VALUE, "tool calls"),
    ({"instruction": "", "input": " ", "output": "b"}, Reason.EMPTY, "the user says nothing"),
    ({"instruction": "a", "output": None}, Reason.EMPTY, "the assistant says nothing"),
    ({"instruction": "a", "output": ["b"]}, Reason.BAD_VALUE, "output: expected text, found a list"),
    ({"instruction": "a", "output": "b", "history": "c"}, Reason.BAD_VALUE, "history: expected a list"),
    ({"instruction": "a", "output": "b", "history": [["c"]]}, Reason.BAD_VALUE, r"history\[0\]: expected"),
    ({"conversations": [{"from": "bing", "value": "a"}]}, Reason.BAD_VALUE, "'bing' is not one of human"),
]


@pytest.mark.parametrize(("row", "reason", "detail"), BAD_ROWS)
def test_bad_rows_are_refused_with_a_reason(row: Any, reason: Reason, detail: str) -> None:
    with pytest.raises(BadRow, match=detail) as caught:
        to_messages(row, detect(row))
    assert caught.value.reason == reason


def test_a_row_of_another_format_than_the_file_is_refused() -> None:
    with pytest.raises(BadRow, match="expected alpaca, found messages") as caught:
        to_messages({"messages": HELLO}, "alpaca")
    assert caught.value.reason == Reason.WRONG_FORMAT
