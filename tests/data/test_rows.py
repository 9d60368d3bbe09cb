import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_lib.data.conversations import MAX_TURNS, BadRow, Content, Conversation, Reason, Text
from pipeline_lib.data.layouts import AmbiguousRow, Format, Layout, detect, to_content
from pipeline_lib.data.strict_json import parse

USER: dict[str, Any] = {"role": "user", "content": "hello"}
ASSISTANT: dict[str, Any] = {"role": "assistant", "content": "hi"}
HELLO = [USER, ASSISTANT]
SYSTEM = {"role": "system", "content": "be kind"}
HUMAN, GPT = {"from": "human", "value": "hello"}, {"from": "gpt", "value": "hi"}

WEATHER = {
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {}},
}
TOOL = {"type": "function", "function": WEATHER}
ARGUMENTS = {"city": "北京", "days": 2, "units": None}
CALL = {"type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CALL_TEXT = json.dumps({"name": "weather", "arguments": ARGUMENTS})
ASKS: dict[str, Any] = {"role": "user", "content": "weather?"}
CALLS: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT: dict[str, Any] = {"role": "tool", "content": "sunny"}
ANSWERS: dict[str, Any] = {"role": "assistant", "content": "It is sunny."}
WITH_TOOLS = [ASKS, CALLS, RESULT, ANSWERS]


def read(row: Any, **options: Any) -> Content:
    """`row` as it is read where its format is not given."""
    return to_content(row, Layout(detect(row, options.get("columns", {})), **options))


def chat(*turns: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


@pytest.mark.parametrize(
    ("row", "row_format", "messages"),
    [
        ({"instruction": "hello", "input": "", "output": "hi"}, "alpaca", HELLO),
        (
            {"instruction": "", "input": "hello", "output": "hi", "history": None, "system": None},
            "alpaca",
            HELLO,
        ),
        ({"input": "hello", "output": "hi", "history": "", "system": ""}, "alpaca", HELLO),
        (
            {
                "instruction": "a",
                "input": "b",
                "output": "hi",
                "history": [["hello", "hi"]],
                "system": "be kind",
            },
            "alpaca",
            [SYSTEM, *HELLO, {"role": "user", "content": "a\nb"}, ASSISTANT],
        ),
        (
            {"instruction": "hello", "output": "hi", "history": '[["hello", "hi"]]'},
            "alpaca",
            [*HELLO, *HELLO],
        ),
        ({"conversations": [HUMAN, GPT]}, "sharegpt", HELLO),
        (
            {
                "conversations": [
                    {"from": "user", "value": "hello"},
                    {"from": "assistant", "value": "hi"},
                ]
            },
            "sharegpt",
            HELLO,
        ),
        ({"conversations": [HUMAN, GPT], "system": "be kind"}, "sharegpt", [SYSTEM, *HELLO]),
        (
            {"conversations": [{"from": "system", "value": "be kind"}, HUMAN, GPT]},
            "sharegpt",
            [SYSTEM, *HELLO],
        ),
        ({"messages": HELLO, "id": 3}, "messages", HELLO),
        ({"messages": json.dumps(HELLO)}, "messages", HELLO),
        ({"messages": [{"role": "system", "content": " "}, *HELLO]}, "messages", HELLO),
        (
            {"messages": [{"role": "developer", "content": "be kind"}, *HELLO]},
            "messages",
            [SYSTEM, *HELLO],
        ),
        ({"messages": [SYSTEM, *HELLO], "system": "be kind"}, "messages", [SYSTEM, *HELLO]),
        ({"messages": [*HELLO, USER]}, "messages", [*HELLO, USER]),
        (
            {"messages": [USER, {**ASSISTANT, "tool_calls": None}], "prompt": "hello"},
            "messages",
            HELLO,
        ),
        (
            {
                "messages": [
                    USER,
                    {
                        **ASSISTANT,
                        "reasoning_content": "greet",
                        "reasoning": "greet",
                        "refusal": None,
                    },
                ]
            },
            "messages",
            [USER, {**ASSISTANT, "reasoning_content": "greet"}],
        ),
        (
            chat(
                ("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
                ("assistant", "hi"),
            ),
            "messages",
            [{"role": "user", "content": "a\nb"}, ASSISTANT],
        ),
        ({"prompt": "hello", "completion": "hi"}, "prompt_completion", HELLO),
        (
            {"prompt": [SYSTEM, USER], "completion": [ASSISTANT]},
            "prompt_completion",
            [SYSTEM, *HELLO],
        ),
        (
            {"prompt": "[1]", "completion": "{}"},
            "prompt_completion",
            chat(("user", "[1]"), ("assistant", "{}")),
        ),
    ],
)
def test_rows_of_each_format_become_messages(row: Any, row_format: Format, messages: Any) -> None:
    content = read(row)

    assert detect(row, {}) == row_format
    assert isinstance(content, Conversation) and content.tools is None
    assert content.messages == (messages["messages"] if isinstance(messages, dict) else messages)
    assert {content.messages[number]["role"] for number in content.supervised} == {"assistant"}


def test_where_json_is_broken_is_said() -> None:
    with pytest.raises(ValueError, match=r"^Unterminated string starting at column 14$"):
        parse('{"messages": "a')


def test_raw_text_stays_as_it_is() -> None:
    assert detect({"text": " a\n", "messages": None}, {}) == "text"
    assert read({"text": " a\n", "meta": {}}) == Text(" a\n")


@pytest.mark.parametrize(
    "row",
    [
        {"messages": WITH_TOOLS, "tools": [TOOL]},
        {"messages": [ASKS, {**CALLS, "content": None}, RESULT, ANSWERS], "tools": [WEATHER]},
        {"messages": json.dumps(WITH_TOOLS), "tools": json.dumps([TOOL])},
        {
            "messages": [
                ASKS,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": json.dumps(ARGUMENTS)},
                        }
                    ],
                },
                {**RESULT, "tool_call_id": "call_1", "name": "weather"},
                ANSWERS,
            ],
            "tools": [json.dumps(WEATHER)],
        },
        {
            "conversations": [
                {"from": "human", "value": "weather?"},
                {"from": "function_call", "value": CALL_TEXT},
                {"from": "observation", "value": "sunny"},
                {"from": "gpt", "value": "It is sunny."},
            ],
            "tools": json.dumps([WEATHER]),
        },
        {
            "conversations": [
                {"from": "human", "value": "weather?"},
                {"from": "function_call", "value": f"[{CALL_TEXT}]"},
                {"from": "tool", "value": "sunny"},
                {"from": "gpt", "value": "It is sunny."},
            ],
            "tools": [TOOL],
        },
        {"prompt": [ASKS], "completion": [CALLS, RESULT, ANSWERS], "tools": [TOOL]},
    ],
)
def test_tools_come_out_the_same_whatever_the_format(row: Any) -> None:
    assert read(row) == Conversation(WITH_TOOLS, [TOOL], (1, 3))


@pytest.mark.parametrize(
    "messages",
    [
        [USER, {**ASSISTANT, "content": "<think>\nhm\n</think>\n\nhi"}],
        [USER, {**ASSISTANT, "content": "\n<think></think>hi"}],
        [USER, {**ASSISTANT, "reasoning_content": "hm"}],
        [{**USER, "content": "What does </think> mean?"}, ASSISTANT],
        [
            USER,
            {**ASSISTANT, "content": "", "tool_calls": [CALL]},
            {**RESULT, "content": "<think>"},
            ASSISTANT,
        ],
    ],
)
def test_one_leading_block_is_thinking_and_the_tags_of_others_are_text(messages: Any) -> None:
    content = read({"messages": messages})
    assert isinstance(content, Conversation) and content.messages == messages


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}},
        {
            "type": "function",
            "function": {"name": "f", "description": "d", "parameters": json.dumps(SCHEMA)},
        },
        {"type": "function", "name": "f", "description": "d", "parameters": SCHEMA},
        {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": json.dumps(SCHEMA["properties"])},
        },
    ],
)
def test_schemas_come_out_as_clients_send_them(tool: dict[str, Any]) -> None:
    content = read({"messages": HELLO, "tools": [tool]})

    assert isinstance(content, Conversation)
    wanted = {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": SCHEMA},
    }
    assert json.dumps(content.tools) == json.dumps([wanted])  # the order of keys is rendered


@pytest.mark.parametrize(
    "key", ["input_schema", "inputSchema", "args_schema", "parameters_json_schema", "arguments"]
)
@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA)])
def test_a_schema_under_another_name_is_refused(key: str, schema: Any) -> None:
    tools: list[tuple[dict[str, Any], str]] = [
        ({"name": "f", key: schema}, rf"tools\[0\]\.{key}"),
        (
            {"type": "function", "function": {"name": "f", key: schema}},
            rf"tools\[0\]\.function\.{key}",
        ),
    ]
    for tool, place in tools:
        with pytest.raises(
            BadRow, match=f"^bad_value: {place}: not read; write the schema as `parameters`"
        ):
            read({"messages": HELLO, "tools": [tool]})
        function = tool.get("function", tool)
        function["parameters"] = SCHEMA  # then the other key is a part of the tool
        assert read({"messages": HELLO, "tools": [tool]})


def test_tools_may_go_with_rows_that_call_none() -> None:
    rows = [{"instruction": "hello", "output": "hi"}, {"prompt": "hello", "completion": "hi"}]

    for row in rows:
        assert read({**row, "tools": json.dumps([WEATHER])}) == Conversation(HELLO, [TOOL], (1,))
        assert read({**row, "tools": "[]"}) == Conversation(HELLO, None, (1,))


OTHER_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    *[
        ({"name": "now", key: {"zone": 1}}, key)
        for key in ("parameters", "args", "kwargs", "params", "input")
    ],
    ({"name": "now", "arguments": {}, "parameters": '{"zone": 1}'}, "parameters"),
    ({"function": {"name": "now", "parameters": {"zone": 1}}}, "parameters"),
    ({"function": {"name": "now"}, "arguments": {"zone": 1}}, "arguments"),
    ({"type": "tool_use", "name": "now", "input": {"zone": 1}}, "input"),
]


@pytest.mark.parametrize(("call", "place"), OTHER_ARGUMENTS)
def test_arguments_by_another_name_are_not_lost(call: dict[str, Any], place: str) -> None:
    with pytest.raises(BadRow, match=rf"messages\[1\]\.tool_calls\[0\]\.{place}: not read; "):
        read({"messages": [USER, {**CALLS, "tool_calls": [call]}]})
    with pytest.raises(
        BadRow, match=rf"conversations\[1\]\.value\.{place}: not read; write it as `arguments`"
    ):
        read({"conversations": [HUMAN, {"from": "function_call", "value": json.dumps(call)}]})


def test_what_stands_beside_the_arguments_of_a_call_is_none() -> None:
    function = {"name": "weather", "arguments": ARGUMENTS, "parameters": {"type": "object"}}
    call = {"id": "c", "function": function, "input": "text"}

    assert read({"messages": [USER, {**CALLS, "tool_calls": [call]}]}) == read(
        {"messages": [USER, CALLS]}
    )


@pytest.mark.parametrize("arguments", [None, "", {}, "{}", "absent"])
def test_a_call_may_have_no_arguments(arguments: Any) -> None:
    function = {"name": "now"} if arguments == "absent" else {"name": "now", "arguments": arguments}
    content = read(
        {
            "messages": [
                USER,
                {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
            ]
        }
    )

    assert isinstance(content, Conversation)
    assert content.messages[1]["tool_calls"] == [
        {"type": "function", "function": {"name": "now", "arguments": {}}}
    ]


def test_several_results_may_follow_several_calls() -> None:
    messages = [
        ASKS,
        {**CALLS, "tool_calls": [CALL, CALL]},
        RESULT,
        {**RESULT, "content": ""},
        ANSWERS,
        USER,
        CALLS,
    ]

    assert read({"messages": messages}) == Conversation(messages, None, (1, 4, 6))


@pytest.mark.parametrize(
    ("row", "supervised"),
    [
        ({"messages": [*HELLO, *HELLO]}, (1, 3)),
        ({"messages": [SYSTEM, *HELLO, USER]}, (2,)),
        ({"messages": [USER, {**ASSISTANT, "weight": 0}, USER, {**ASSISTANT, "weight": 1}]}, (3,)),
        ({"instruction": "a", "output": "b", "history": [["hello", "hi"]], "system": "s"}, (2, 4)),
        ({"prompt": [*HELLO, USER], "completion": [ASSISTANT, USER, ASSISTANT]}, (3, 5)),
        (
            {"prompt": HELLO, "completion": [USER, {**ASSISTANT, "weight": 0}, USER, ASSISTANT]},
            (5,),
        ),
    ],
)
def test_only_the_assistant_is_supervised_and_not_what_the_row_excludes(
    row: Any, supervised: tuple[int, ...]
) -> None:
    content = read(row)

    assert isinstance(content, Conversation) and content.supervised == supervised


@pytest.mark.parametrize(
    ("row", "columns", "roles", "messages"),
    [
        ({"q": "hello", "a": "hi"}, {"instruction": "q", "output": "a"}, {}, HELLO),
        (
            {"output": "hello", "instruction": "hi"},
            {"instruction": "output", "output": "instruction"},
            {},
            HELLO,
        ),
        (
            {"dialog": [{"speaker": "ann", "says": "hello"}, {"speaker": "bot", "says": "hi"}]},
            {"conversations": "dialog", "from": "speaker", "value": "says"},
            {"ann": "user", "bot": "assistant"},
            HELLO,
        ),
        ({"conversations": HELLO}, {"messages": "conversations"}, {}, HELLO),
        (
            {"messages": [{**USER, "thinking": "a"}, ASSISTANT]},
            {"instruction": "thinking"},
            {},
            HELLO,
        ),
        ({"messages": [USER, {**ASSISTANT, "thinking": None}]}, {}, {}, HELLO),
        (
            {"messages": [USER, {**ASSISTANT, "thinking": "greet"}]},
            {"reasoning_content": "thinking"},
            {},
            [USER, {**ASSISTANT, "reasoning_content": "greet"}],
        ),
        (
            {
                "messages": [
                    ASKS,
                    {"role": "caller", "content": CALL_TEXT},
                    {"role": "api", "content": "sunny"},
                    ANSWERS,
                ]
            },
            {},
            {"caller": "function_call", "api": "tool"},
            WITH_TOOLS,
        ),
    ],
)
def test_columns_and_roles_may_have_other_names(
    row: Any, columns: Any, roles: Any, messages: Any
) -> None:
    content = read(row, columns=columns, roles=roles)

    assert isinstance(content, Conversation) and content.messages == messages


@pytest.mark.parametrize(
    ("row", "formats"),
    [
        ({"text": "a", "messages": HELLO}, ("messages", "text")),
        ({"instruction": "a", "output": "b", "text": "c"}, ("alpaca", "text")),
        ({"conversations": [HUMAN, GPT], "messages": HELLO}, ("sharegpt", "messages")),
        ({"prompt": "a", "completion": "b", "messages": HELLO}, ("messages", "prompt_completion")),
    ],
)
def test_a_row_of_several_formats_has_to_be_decided_by_its_owner(
    row: Any, formats: tuple[Format, ...]
) -> None:
    with pytest.raises(AmbiguousRow, match=f"fits {' and '.join(formats)}: set `format`") as caught:
        detect(row, {})

    assert caught.value.formats == formats
    for row_format in formats:
        to_content(row, Layout(row_format))


BAD_ROWS: list[tuple[Any, Reason, str]] = [
    ([1, 2], Reason.NOT_AN_OBJECT, "found a list"),
    ("text", Reason.NOT_AN_OBJECT, "found text"),
    (
        {"prompt": "a", "response": "b"},
        Reason.WRONG_FORMAT,
        "it has 'prompt', 'response'; set `columns` if it has other names",
    ),
    ({"instruction": None, "output": "x"}, Reason.WRONG_FORMAT, r"'instruction' \(null\)"),
    ({}, Reason.WRONG_FORMAT, "no keys"),
    ({"messages": None}, Reason.WRONG_FORMAT, "none of alpaca"),
    ({"messages": "hello"}, Reason.BAD_VALUE, "messages: expected a list, found text"),
    (
        {"messages": '[{"role": '},
        Reason.BAD_VALUE,
        "messages: text that is not JSON: Expecting value at column",
    ),
    ({"messages": {}}, Reason.BAD_VALUE, "messages: expected a list, found an object"),
    ({"messages": []}, Reason.EMPTY, "no messages"),
    ({"messages": ["hello"]}, Reason.BAD_VALUE, r"messages\[0\]: expected an object, found text"),
    (
        {"messages": [{"content": "a"}]},
        Reason.BAD_VALUE,
        r"messages\[0\].role: missing; the turn has content",
    ),
    (
        {"conversations": HELLO},
        Reason.BAD_VALUE,
        r"conversations\[0\].from: missing; the turn has role, content",
    ),
    (
        chat(("bot", "a")),
        Reason.BAD_VALUE,
        r"messages\[0\].role: 'bot' is not one of system, .*see `roles`",
    ),
    (chat((["user"], "a")), Reason.BAD_VALUE, r"messages\[0\].role: \['user'\] is not one of"),  # type: ignore[arg-type]
    (
        chat(("user", "a"), ("assistant", None)),
        Reason.BAD_VALUE,
        r"messages\[1\].content: expected text, found null",
    ),
    (chat(("user", 5), ("assistant", "b")), Reason.BAD_VALUE, "expected text, found a number"),
    (
        chat(("user", [{"type": "text"}]), ("assistant", "b")),
        Reason.BAD_VALUE,
        r"content\[0\]: expected .*type 'text'",
    ),
    (
        chat(("user", [{"type": "image_url"}]), ("assistant", "b")),
        Reason.BAD_VALUE,
        "'image_url'; only text",
    ),
    (chat(("user", ["a"]), ("assistant", "b")), Reason.BAD_VALUE, "found a part of type none"),
    (
        chat(("user", "a"), ("user", "b"), ("assistant", "c")),
        Reason.BAD_ROLE_ORDER,
        "message 2 is user after user: make them one message; the order",
    ),
    (
        chat(("assistant", "a"), ("user", "b")),
        Reason.BAD_ROLE_ORDER,
        "1 is assistant at the start.*`loss: false`",
    ),
    (
        chat(("user", "a"), ("assistant", "b"), ("system", "c")),
        Reason.BAD_ROLE_ORDER,
        "3 is system after .*into",
    ),
    (
        chat(("system", "a"), ("system", "b"), ("user", "c")),
        Reason.NO_ASSISTANT_TURN,
        "only system, user",
    ),
    (
        chat(("system", "a"), ("system", "b"), ("user", "c"), ("assistant", "d")),
        Reason.BAD_ROLE_ORDER,
        "message 2 is system after system: write it into the first system message",
    ),
    (
        chat(("tool", "4"), ("assistant", "4")),
        Reason.BAD_ROLE_ORDER,
        "message 1 is tool at the start",
    ),
    (
        chat(("user", "a"), ("assistant", "b"), ("tool", "c")),
        Reason.BAD_ROLE_ORDER,
        "which called no tool; the order",
    ),
    (
        chat(
            ("system", "s"),
            ("user", "a"),
            ("assistant", '<tool_call>\n{"name": "b"}\n</tool_call>'),
            ("tool", "c"),
        ),
        Reason.BAD_ROLE_ORDER,
        r"message 4 is .*no tool but in its text \(<tool_call>\): write the call as `tool_calls` of message 3; the",
    ),
    (
        chat(("user", "a"), ("assistant", "b"), ("assistant", "c")),
        Reason.BAD_ROLE_ORDER,
        "assistant after assistant: make them one",
    ),
    (
        {"messages": [ASKS, CALLS, RESULT, USER]},
        Reason.BAD_ROLE_ORDER,
        "4 is user after tool: write the answer",
    ),
    (
        {"messages": [ASKS, CALLS, ASSISTANT]},
        Reason.BAD_ROLE_ORDER,
        "3 is assistant after assistant: make them one",
    ),
    (
        {"messages": [ASKS, ASSISTANT, {**CALLS, "loss": False}, RESULT, ASSISTANT]},
        Reason.BAD_ROLE_ORDER,
        "3 is assis",
    ),
    (
        {"messages": [ASKS, ASSISTANT, {**CALLS, "reasoning_content": "why"}, RESULT, ASSISTANT]},
        Reason.BAD_ROLE_ORDER,
        "3 is assistant after assistant",
    ),
    (chat(("user", "a")), Reason.NO_ASSISTANT_TURN, "only user"),
    (
        {"messages": [USER, {**ASSISTANT, "weight": 0}]},
        Reason.NO_ASSISTANT_TURN,
        "may be trained on",
    ),
    ({"prompt": HELLO, "completion": [USER]}, Reason.NO_ASSISTANT_TURN, "may be trained on"),
    (
        {"messages": [USER, {**ASSISTANT, "weight": 0.5}]},
        Reason.BAD_VALUE,
        r"messages\[1\].weight: 0.5",
    ),
    (chat(("user", " \n"), ("assistant", "b")), Reason.EMPTY, "the user's message has no text"),
    (chat(("user", "a"), ("assistant", "")), Reason.EMPTY, "the assistant's message has no text"),
    *[
        (
            {"messages": [USER, {**ASSISTANT, **said}, USER, ASSISTANT]},
            Reason.BAD_VALUE,
            "expected <think>...</think> and",
        )
        for said in [
            {"content": "<think>never closed"},
            {"content": "never opened</think>\n\nhi"},
            {"content": "Well: <think>hm</think>hi"},
            {"content": "<think>a</think>b <think>c</think>d"},
            {"content": "</think><think>hi"},
            {"content": "<think>hm</think>hi", "reasoning_content": "hm"},
            {"reasoning_content": "</think>"},
            {"reasoning_content": "<think>hm"},
        ]
    ],
    (
        {"messages": [USER, {**ASSISTANT, "thinking": "hm"}]},
        Reason.BAD_VALUE,
        r"\[1\].thinking: not read; .*columns",
    ),
    (
        {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "function_call": {"name": "a"}},
            ]
        },
        Reason.BAD_VALUE,
        "function_call: not read; write it as tool_calls",
    ),
    (
        chat(*[("user", "a"), ("assistant", "b")] * (MAX_TURNS // 2 + 1)),
        Reason.TOO_MANY_TURNS,
        "1002 messages",
    ),
    (chat(("user", "a"), ("assistant", "b\0c")), Reason.BAD_TEXT, "NUL"),
    (
        chat(("user", "a\ud800"), ("assistant", "b")),
        Reason.BAD_TEXT,
        "surrogate pair at character 1",
    ),
    ({"messages": [USER, {**ASSISTANT, "reasoning_content": "\0"}]}, Reason.BAD_TEXT, "NUL"),
    ({"messages": HELLO, "tools": [{"name": "a", "description": "\0"}]}, Reason.BAD_TEXT, "NUL"),
    (
        {"messages": [{**USER, "tool_calls": [CALL]}, ASSISTANT]},
        Reason.BAD_VALUE,
        "only the assistant calls",
    ),
    (
        {"messages": HELLO, "tools": [{"name": "a", "parameters": "none"}]},
        Reason.BAD_VALUE,
        r"tools\[0\]\.parameters: expected an object, found text",
    ),
    (
        {"messages": HELLO, "tools": [{"name": "a", "parameters": [{"name": "b"}]}]},
        Reason.BAD_VALUE,
        r"tools\[0\]\.parameters: expected an object, found a list",
    ),
    ({"messages": HELLO, "tools": {}}, Reason.BAD_VALUE, "tools: expected a list, found an object"),
    (
        {"messages": HELLO, "tools": [{"description": "a"}]},
        Reason.BAD_VALUE,
        "expected the name of a function",
    ),
    (
        {"messages": HELLO, "tools": [{**TOOL, "type": "code"}]},
        Reason.BAD_VALUE,
        "'code'; only functions",
    ),
    (
        {"instruction": "", "input": " ", "output": "b"},
        Reason.EMPTY,
        "the user's message has no text",
    ),
    (
        {"instruction": "a", "output": ["b"]},
        Reason.BAD_VALUE,
        "output: expected text, found a list",
    ),
    (
        {"instruction": "a", "output": "b", "history": "c"},
        Reason.BAD_VALUE,
        "history: expected a list",
    ),
    (
        {"instruction": "a", "output": "b", "history": [["c"]]},
        Reason.BAD_VALUE,
        r"history\[0\]: expected",
    ),
    (
        {"conversations": [HUMAN, {"from": "function_call", "value": "now()"}]},
        Reason.BAD_VALUE,
        "found text",
    ),
    (
        {"conversations": [HUMAN, {"from": "function_call", "value": "[]"}]},
        Reason.EMPTY,
        "calls no tool",
    ),
    (
        {
            "conversations": [
                HUMAN,
                {"from": "function_call", "value": f"<think>Look.</think>\n{CALL_TEXT}"},
            ]
        },
        Reason.BAD_VALUE,
        r"conversations\[1\].value: holds thinking \(<think>\) beside its calls: write it as reasoning_content of",
    ),
    (
        chat(("user", "a"), ("assistant", "<think>b</think>\n")),
        Reason.EMPTY,
        "has thinking and no answer",
    ),
    (
        chat(("user", "a"), ("assistant", "\n<think></think>")),
        Reason.EMPTY,
        "has thinking and no answer",
    ),
    (
        {"messages": [USER, {**ASSISTANT, "content": "", "reasoning_content": "b"}]},
        Reason.EMPTY,
        "has no text",
    ),
    ({"text": " \n"}, Reason.EMPTY, "the text is empty"),
]


@pytest.mark.parametrize(("row", "reason", "detail"), BAD_ROWS)
def test_bad_rows_are_refused_with_a_reason(row: Any, reason: Reason, detail: str) -> None:
    with pytest.raises(BadRow, match=detail) as caught:
        read(row)
    assert caught.value.reason == reason


def test_a_conversation_may_have_as_many_turns_as_are_allowed() -> None:
    longest = read(chat(*[("user", "a"), ("assistant", "b")] * (MAX_TURNS // 2)))
    assert isinstance(longest, Conversation) and len(longest.messages) == MAX_TURNS


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("arguments", "reason", "detail"),
    [
        (
            "{'city': 1}",
            Reason.BAD_VALUE,
            r"messages\[1\].tool_calls\[0\].arguments: text that is not JSON",
        ),
        ('{"a": 1, "a": 2}', Reason.BAD_VALUE, "the key 'a' stands twice"),
        ('{"a": NaN}', Reason.BAD_VALUE, "NaN is not JSON"),
        ('{"a": 1e999}', Reason.BAD_VALUE, "inf, which is not JSON"),
        ("Beijing", Reason.BAD_VALUE, "expected an object, found text"),
        (7, Reason.BAD_VALUE, "expected an object, found a number"),
        ({"a": "\ud800"}, Reason.BAD_TEXT, "surrogate"),
        ({"a\0": 1}, Reason.BAD_TEXT, "NUL"),
        ({"a": [float("nan")]}, Reason.BAD_VALUE, "nan, which is not JSON"),
        ({"a": b"b"}, Reason.BAD_VALUE, "which is not JSON"),
        (nested(80), Reason.BAD_VALUE, "nested deeper than"),
        ('{"a":' * 5000 + "1" + "}" * 5000, Reason.BAD_VALUE, "nested too deeply"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, reason: Reason, detail: str) -> None:
    call = {"name": "weather", "arguments": arguments}
    with pytest.raises(BadRow, match=detail) as caught:
        read({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]})
    assert caught.value.reason == reason


def test_messages_name_the_keys_of_the_file() -> None:
    columns = {"instruction": "q", "output": "a"}
    with pytest.raises(BadRow, match="a: expected text, found a number"):
        read({"q": "hello", "a": 5}, columns=columns)
    with pytest.raises(
        BadRow, match="alpaca needs q and a or input and a; it has 'b', 'q'"
    ) as caught:
        to_content({"q": "hello", "b": 5}, Layout("alpaca", columns))
    assert caught.value.reason == Reason.WRONG_FORMAT


def test_what_workers_exchange_can_be_pickled() -> None:
    bad = pickle.loads(pickle.dumps(BadRow(Reason.EMPTY, "says nothing")))  # noqa: S301
    ambiguous = pickle.loads(pickle.dumps(AmbiguousRow(("alpaca", "text"))))  # noqa: S301
    content = read({"messages": WITH_TOOLS, "tools": [TOOL]})

    assert (bad.reason, bad.detail, str(bad)) == (
        Reason.EMPTY,
        "says nothing",
        "empty: says nothing",
    )
    assert ambiguous.formats == ("alpaca", "text")
    assert pickle.loads(pickle.dumps(content)) == content  # noqa: S301
    layout = Layout("text", {"text": "a"})
    assert pickle.loads(pickle.dumps(layout)) == layout  # noqa: S301


KEYS = st.sampled_from(
    [
        "messages",
        "conversations",
        "role",
        "content",
        "from",
        "value",
        "tool_calls",
        "function",
        "name",
        "arguments",
    ]
    + [
        "tools",
        "system",
        "history",
        "instruction",
        "input",
        "output",
        "prompt",
        "completion",
        "text",
        "weight",
        "type",
    ]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
WORDS = st.sampled_from(
    [
        "user",
        "assistant",
        "system",
        "tool",
        "human",
        "gpt",
        "function_call",
        "text",
        "[]",
        '{"a":1}',
    ]
)
VALUES = st.recursive(
    LEAVES | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=5),
    max_leaves=20,
)


@given(VALUES | st.dictionaries(KEYS, VALUES, max_size=6))
def test_any_row_is_understood_or_refused(row: Any) -> None:
    for row_format in ("alpaca", "sharegpt", "messages", "prompt_completion", "text"):
        try:
            content = to_content(row, Layout(row_format))
        except BadRow as bad:
            assert bad.detail
        else:
            json.dumps(
                content.messages if isinstance(content, Conversation) else content.text,
                allow_nan=False,
            )


def test_messages_under_the_name_of_conversations_are_told_apart() -> None:
    row = {"conversations": chat(("user", "a"), ("assistant", "b"))["messages"]}

    with pytest.raises(
        BadRow, match=r"set format: messages and columns: \{messages: conversations\}"
    ):
        read(row)
    columns = {"messages": "conversations"}
    assert to_content(row, Layout("messages", columns)) == read(
        chat(("user", "a"), ("assistant", "b"))
    )


def test_calls_one_after_the_other_and_behind_a_text_are_one_turn() -> None:
    other = {"type": "function", "function": {"name": "time", "arguments": {}}}
    two, more = {**CALLS, "tool_calls": [other]}, {**RESULT, "content": "noon"}
    says = {"role": "assistant", "content": "Let me look.", "reasoning_content": "why"}
    wanted = [ASKS, {**says, "tool_calls": [CALL, other]}, RESULT, more, ANSWERS]

    assert read({"messages": [ASKS, says, CALLS, two, RESULT, more, ANSWERS]}) == Conversation(
        wanted, None, (1, 4)
    )
    turns = [
        {"from": "human", "value": "weather?"},
        {"from": "gpt", "value": "Let me look.", "reasoning_content": "why"},
        {"from": "function_call", "value": CALL_TEXT},
        {"from": "function_call", "value": json.dumps(other["function"])},
        {"from": "observation", "value": "sunny"},
        {"from": "observation", "value": "noon"},
        {"from": "gpt", "value": "It is sunny."},
    ]
    assert read({"conversations": turns}) == Conversation(wanted, None, (1, 4))
    excluded = [turns[0], {**turns[1], "loss": False}, {**turns[2], "loss": False}, *turns[4:]]
    content = read({"conversations": excluded})
    assert isinstance(content, Conversation) and content.supervised == (4,)


def test_a_greeting_that_is_not_trained_on_is_context() -> None:
    for before in ([], [{"role": "system", "content": "be kind"}]):
        row = {"messages": [*before, {**ASSISTANT, "loss": False}, *HELLO]}
        assert read(row) == Conversation([*before, ASSISTANT, *HELLO], None, (len(before) + 2,))
        assert read({"prompt": row["messages"][:-1], "completion": "hi"}) == read(row)
