"""What rows say that is not read: nothing of it is lost in silence."""

from collections import Counter
from typing import Any

import pytest

from pipeline_lib.data.conversations import BadRow, Content, Conversation, Text
from pipeline_lib.data.keys import MAX_KEYS, KeyCounts, PreferenceData
from pipeline_lib.data.layouts import Layout, detect, to_content
from pipeline_lib.data.refusals import TRAINED_KEYS

USER: dict[str, Any] = {"role": "user", "content": "q"}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "a"}
SYSTEM: dict[str, Any] = {"role": "system", "content": "s"}
MESSAGES: dict[str, Any] = {"messages": [USER, ASSISTANT]}
SHAREGPT: dict[str, Any] = {
    "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
}
ALPACA: dict[str, Any] = {"instruction": "q", "output": "a"}
COMPLETION: dict[str, Any] = {"prompt": "q", "completion": "a"}
EVERY = [MESSAGES, SHAREGPT, ALPACA, COMPLETION]
ONE_ANSWER = [ALPACA, COMPLETION]
LISTED = [MESSAGES, SHAREGPT]
TOOL = {"type": "function", "function": {"name": "now"}}


def read(row: dict[str, Any], **columns: str) -> Content:
    return to_content(row, Layout(detect(row, columns), columns))


def counted(*rows: dict[str, Any], **columns: str) -> KeyCounts:
    counts = KeyCounts()
    for row in rows:
        to_content(row, Layout(detect(row, columns), columns), counts)
    return counts


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        *[({**row, "reasoning_content": "why"}, {}) for row in ONE_ANSWER],
        *[({**row, "why": "why"}, {"reasoning_content": "why"}) for row in ONE_ANSWER],
        (
            {"q": "q", "a": "a", "why": "why"},
            {"instruction": "q", "output": "a", "reasoning_content": "why"},
        ),
        ({"prompt": [USER], "completion": "a", "reasoning_content": "why", "thinking": "why"}, {}),
    ],
)
def test_the_reasoning_of_a_single_answer_is_read(
    row: dict[str, Any], columns: dict[str, str]
) -> None:
    content = read(row, **columns)

    assert isinstance(content, Conversation)
    assert content.messages == [USER, {**ASSISTANT, "reasoning_content": "why"}]


def test_reasoning_belongs_to_the_last_answer() -> None:
    content = read({**ALPACA, "history": [["b", "c"]], "reasoning_content": "why"})

    assert isinstance(content, Conversation)
    assert [message.get("reasoning_content") for message in content.messages] == [
        None,
        None,
        None,
        "why",
    ]


NOT_READ: list[tuple[dict[str, Any], str, str]] = [
    *[
        ({**row, key: "why"}, key, f"{{reasoning_content: {key}}}")
        for row in ONE_ANSWER
        for key in ("reasoning", "cot")
    ],
    *[
        ({**row, "reasoning_content": "w"}, "reasoning_content", "write it into its turn")
        for row in LISTED
    ],
    *[({**row, "thinking": "why"}, "thinking", "write it into its turn") for row in LISTED],
    *[
        ({**row, "history": [["a", "b"]]}, "history", "write it as the first turns")
        for row in LISTED
    ],
    *[
        (
            {**row, "reasoning_details": [{"text": "why"}]},
            "reasoning_details",
            "as reasoning_content",
        )
        for row in EVERY
    ],
    *[
        ({**row, "system_prompt": "s"}, "system_prompt", r"{system: system_prompt}")
        for row in EVERY
    ],
    *[({**row, "functions": [{"name": "f"}]}, "functions", r"{tools: functions}") for row in EVERY],
    *[
        (
            {**row, "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs",
            "not set",
        )
        for row in EVERY
    ],
    *[({**row, "weight": 0}, "weight", "rows are not weighted") for row in EVERY],
    *[({**row, "image": "a.png"}, "image", "only text is supported") for row in EVERY],
    ({**ALPACA, "context": "c"}, "context", "{input: context}"),
    ({**COMPLETION, "context": "c"}, "context", "put it into the prompt"),
    ({**COMPLETION, "instruction": "i"}, "instruction", "put it into the prompt"),
    ({**COMPLETION, "history": [["a", "b"]]}, "history", "set format: alpaca"),
    *[
        ({**row, "documents": [{"text": "d"}]}, "documents", "write their text into")
        for row in EVERY
    ],
    *[
        ({**row, "tool_calls": [{"name": "f"}]}, "tool_calls", "write the row as messages")
        for row in ONE_ANSWER
    ],
    *[({**row, "System": "s"}, "System", "{system: System}") for row in EVERY],
    *[({**row, "System Prompt": "s"}, "System Prompt", "{system: System Prompt}") for row in EVERY],
    *[
        ({**row, "Reasoning": "w"}, "Reasoning", "{reasoning_content: Reasoning}")
        for row in ONE_ANSWER
    ],
    *[({**row, "WEIGHT": "0"}, "WEIGHT", "rows are not weighted") for row in EVERY],
    ({**ALPACA, "Input": "i"}, "Input", "{input: Input}"),
]
IN_A_TURN: list[tuple[dict[str, Any], str, str]] = [
    ({**ASSISTANT, "reasoning": "why"}, "reasoning", "{reasoning_content: reasoning}"),
    (
        {**ASSISTANT, "reasoning_details": [{"text": "why"}]},
        "reasoning_details",
        "its text as reasoning_content",
    ),
    ({**ASSISTANT, "function_call": {"name": "f"}}, "function_call", "write it as tool_calls"),
    (
        {**ASSISTANT, "function_calls": [{"name": "f"}]},
        "function_calls",
        "{tool_calls: function_calls}",
    ),
    ({**ASSISTANT, "train_detail": [{"end": 1}]}, "train_detail", "as a whole"),
    ({**ASSISTANT, "masked": True}, "masked", "write `loss: false`"),
    ({**USER, "images": ["a.png"]}, "images", "only text is supported"),
    ({**SYSTEM, "functions": [{"name": "f"}]}, "functions", "{tools: functions}"),
]


@pytest.mark.parametrize(("row", "key", "remedy"), NOT_READ)
def test_what_would_change_what_is_learnt_is_refused_unless_it_is_to_be_ignored(
    row: dict[str, Any], key: str, remedy: str
) -> None:
    with pytest.raises(BadRow, match=f"^bad_value: {key}: ") as caught:
        read(row)

    assert remedy.replace("not set", "does not set") in caught.value.detail
    assert caught.value.detail.endswith(f"to leave it out set columns: {{{key}: ignore}}")
    assert read(row, **{key: "ignore"}) == read(
        {name: value for name, value in row.items() if name != key}
    )
    assert counted(row, **{key: "ignore"}).unread == Counter()


@pytest.mark.parametrize(("turn", "key", "remedy"), IN_A_TURN)
def test_the_same_in_a_turn(turn: dict[str, Any], key: str, remedy: str) -> None:
    order = {
        "system": [turn, USER, ASSISTANT],
        "user": [turn, ASSISTANT],
        "assistant": [USER, turn],
    }
    row = {"messages": order[turn["role"]]}

    with pytest.raises(BadRow, match=rf"messages\[\d\]\.{key}: ") as caught:
        read(row)
    assert remedy in caught.value.detail
    plain = [
        {name: value for name, value in each.items() if name != key} for each in row["messages"]
    ]
    assert read(row, **{key: "ignore"}) == read({"messages": plain})


@pytest.mark.parametrize("key", TRAINED_KEYS)
def test_a_weight_of_rows_is_ignored_and_those_of_turns_hold(key: str) -> None:
    turns = [
        USER,
        {**ASSISTANT, key: False},
        USER,
        {**ASSISTANT, key: 0.0},
        USER,
        {**ASSISTANT, key: 1.0},
    ]
    row = {"messages": turns, key: 0.34}
    with pytest.raises(BadRow, match=f"set columns: {{{key}: ignore}}"):
        read(row)

    content = read(row, **{key: "ignore"})
    assert isinstance(content, Conversation) and content.supervised == (5,)
    with pytest.raises(
        BadRow, match=rf"messages\[1\]\.{key}: 0\.3 .* write one of these, or remove the key$"
    ):
        read({"messages": [USER, {**ASSISTANT, key: 0.3}]}, **{key: "ignore"})


@pytest.mark.parametrize("columns", [{}, {"tools": "ignore"}])
def test_tools_of_a_turn_are_not_ignored_with_those_of_the_row(columns: dict[str, str]) -> None:
    row = {"messages": [{**USER, "tools": [TOOL]}, ASSISTANT], "tools": [TOOL]}
    with pytest.raises(
        BadRow, match=r"messages\[0\]\.tools: not read here: write it as .* of its system turn$"
    ):
        read(row, **columns)


@pytest.mark.parametrize(
    ("row", "columns", "said"),
    [
        *[
            (
                {**row, "system": "s"},
                {"system": "sys"},
                "^bad_value: system: not read, .* as sys, or",
            )
            for row in EVERY
        ],
        *[
            ({**row, "reasoning_content": "w", "why": ""}, {"reasoning_content": "why"}, "as why")
            for row in ONE_ANSWER
        ],
        (
            {"messages": [USER, {**ASSISTANT, "reasoning_content": "w"}]},
            {"reasoning_content": "why"},
            r"reasoning_content: not read, because `columns` gives another name: write it as messages\[1\]\.why, or",
        ),
    ],
)
def test_our_own_name_is_not_passed_over_where_the_column_that_is_read_instead_says_nothing(
    row: dict[str, Any], columns: dict[str, str], said: str
) -> None:
    with pytest.raises(BadRow, match=said):
        read(row, **columns)


def test_of_two_columns_the_named_one_is_read() -> None:
    row = {**ALPACA, "system": "linux", "sys": "s"}

    assert counted(row, system="sys").unread == {"system": 1}
    assert read(row, system="sys") == read({**ALPACA, "system": "s"})
    swapped = {"input": "x", "instruction": "y", "output": "a"}
    assert read(swapped, input="instruction", instruction="input") == read(
        {**swapped, "input": "y", "instruction": "x"}
    )


@pytest.mark.parametrize("row", EVERY)
@pytest.mark.parametrize("nothing", [None, "", [], {}, "[]", False])
def test_a_key_that_says_nothing_is_harmless(row: dict[str, Any], nothing: object) -> None:
    keys = ("system_prompt", "functions", "chat_template_kwargs", "thinking", "images", "rejected")

    assert read({**row, **dict.fromkeys(keys, nothing)}) == read(row)
    assert read({**row, "weight": 1, "loss_scale": "1.0", "train": True, "label": 1}) == read(row)


@pytest.mark.parametrize("row", EVERY)
@pytest.mark.parametrize(
    "more",
    [
        {"chosen": "good", "rejected": "bad"},
        {"chosen": SHAREGPT["conversations"][1], "rejected": SHAREGPT["conversations"][1]},
        {"rejected_response": "bad"},
        {"rejected_messages": MESSAGES["messages"]},
        {"kto_tag": False},
        {"Label": "False"},
        {"Chosen": "good", "REJECTED": "bad"},
        *[{"label": value} for value in (False, 0, 0.0, "False", "false", "0")],
    ],
)
def test_preference_data_is_refused_by_what_it_is(
    row: dict[str, Any], more: dict[str, Any]
) -> None:
    with pytest.raises(
        PreferenceData, match="is preference data by its .*: only good examples can be trained on"
    ):
        read({**row, **more})

    ignored = dict.fromkeys(more, "ignore")
    assert f"{{{', '.join(f'{key}: ignore' for key in more)}}}" in str(PreferenceData(tuple(more)))
    assert read({**row, **more}, **ignored) == read(row)


def test_preference_data_without_an_answer_of_its_own_is_told_as_well() -> None:
    with pytest.raises(PreferenceData, match="chosen and rejected"):
        detect({"prompt": "q", "chosen": "a", "rejected": "b"}, {})
    for row_format in ("alpaca", "sharegpt", "messages", "prompt_completion"):
        with pytest.raises(PreferenceData, match="chosen and rejected"):
            to_content({"prompt": "q", "chosen": "a", "rejected": "b"}, Layout(row_format))
    with pytest.raises(BadRow, match="text needs text"):
        to_content({"prompt": "q", "chosen": "a", "rejected": "b"}, Layout("text"))
    with pytest.raises(BadRow, match="none of alpaca"):  # a label may be of anything
        detect({"question": "q", "label": 0}, {})
    turn = {**ASSISTANT, "rejected_response": "b"}
    with pytest.raises(PreferenceData, match="rejected_response"):
        read({"messages": [USER, turn]})


def test_labels_of_other_kinds_and_of_raw_text_are_harmless() -> None:
    assert read({**ALPACA, "label": "math"}) == read({**ALPACA, "label": 3}) == read(ALPACA)
    assert read({"text": "t", "label": 0, "chosen": "c", "images": ["a"]}) == Text("t")


def test_tools_may_stand_in_the_system_turn() -> None:
    system = {**SYSTEM, "tools": [TOOL]}

    for row in (
        {"messages": [system, USER, ASSISTANT]},
        {"messages": [{**SYSTEM, "tools": '[{"name": "now"}]'}, USER, ASSISTANT]},
        {"messages": [system, USER, ASSISTANT], "tools": [TOOL]},
        {"prompt": [system, USER], "completion": "a"},
    ):
        assert read(row) == Conversation([SYSTEM, USER, ASSISTANT], [TOOL], (2,))
    functions = {**SYSTEM, "functions": [{"name": "now"}]}
    content = read({"messages": [functions, USER, ASSISTANT]}, tools="functions")
    assert content == Conversation([SYSTEM, USER, ASSISTANT], [TOOL], (2,))
    with pytest.raises(BadRow, match=r"messages\[0\]\.tools: differ from the `tools` of the row"):
        read({"messages": [system, USER, ASSISTANT], "tools": [{"name": "then"}]})


def test_all_other_keys_are_counted() -> None:
    counts = counted(
        {**MESSAGES, "id": 1, "source": "web", "note": None, "tags": []},
        {
            "messages": [
                {**USER, "name": "ann"},
                {**ASSISTANT, "reasoning_content": "w", "thinking": "w"},
            ],
            "id": 0,
        },
    )

    assert counts.unread == {"id": 2, "source": 1, "messages[].name": 1, "messages[].thinking": 1}
    masked = {"messages": [{**USER, "loss": False}, {**ASSISTANT, "loss": True}], "id": 1}
    assert counted(masked).unread == {"id": 1}
    called = {**ASSISTANT, "tool_calls": [{"function": {"name": "now"}, "id": "c"}]}
    result = {"role": "tool", "content": "noon", "tool_call_id": "c", "weight": 0}
    assert counted({"messages": [USER, called, result, ASSISTANT]}).unread == Counter()
    assert counted({**SHAREGPT, "id": 1}).unread == {"id": 1}
    assert counted({**ALPACA, "input": "", "label": 2}).unread == {"label": 1}
    assert counted({"text": "t", "url": "u"}).unread == {"url": 1}
    assert counted({"t": "x", "text": "y"}, text="t").unread == {"text": 1}
    assert counted({**ALPACA, "api_key=hunter2": 1}).unread == {"api_key=***": 1}


def test_keys_without_end_are_counted_together() -> None:
    row = {**ALPACA, **{f"key {number}": number for number in range(MAX_KEYS + 10)}}
    counts = counted(row, row)

    assert len(counts.unread) == MAX_KEYS and counts.others == 20
    total = KeyCounts()
    total.add(counts)
    total.add(counted({**ALPACA, "more": 1}))
    assert len(total.unread) == MAX_KEYS and (total.unread["key 0"], total.others) == (2, 21)
    assert len(next(iter(counted({**ALPACA, "x" * 100_000: 1}).unread))) == 60


def test_columns_are_found_in_rows_and_turns_even_if_they_are_null_or_the_row_is_bad() -> None:
    columns = {
        "messages": "dialog",
        "role": "by",
        "system": "sys",
        "tools": "none",
        "label": "ignore",
    }
    counts = KeyCounts()
    with pytest.raises(BadRow):
        to_content({"dialog": [{"by": 1}], "sys": None}, Layout("messages", columns), counts)

    assert counts.named == {"dialog", "by", "sys"}
    assert counts.first == ("by", "dialog", "sys")


def test_turns_of_another_format_are_told() -> None:
    with pytest.raises(
        BadRow, match=r"set format: sharegpt and columns: \{conversations: messages\}"
    ):
        read({"messages": SHAREGPT["conversations"]})


def test_a_row_without_the_named_columns_says_so() -> None:
    with pytest.raises(BadRow, match="it has 'a', 'q'; `columns` names 'anwser'"):
        detect({"q": "q", "a": "a"}, {"instruction": "q", "output": "anwser"})
