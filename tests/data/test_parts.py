"""A row's content is rendered or the row drops with its reason, by each published template."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pipeline_lib.config.schema import FileData, Tokenize
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.conversations import Content
from pipeline_lib.data.encode import Drop, Encoder, Sample
from pipeline_lib.data.layouts import layout_of, to_content
from pipeline_lib.data.tokenize import NO_GENERATION_PROMPT

from .chats import (
    ANSWER,
    QUESTION,
    RAINY,
    REASONED,
    SYSTEM,
    TEMPLATES,
    TOOL,
    call,
    change_template,
    judge,
    learned,
    say,
    set_template,
    supervised_turns,
    talk,
)
from .conftest import Pipeline

LOOK = say(
    "assistant",
    "I look.",
    tool_calls=[call(place="Bonn", more={"deep": [{"deeper": "unheard-of"}]})],
)
CALL = say("assistant", "", tool_calls=[call(place="Bonn")])
_FUNCTION: dict[str, Any] = TOOL["function"]  # type: ignore[assignment]
NESTED = {
    **_FUNCTION,
    "parameters": {"type": "object", "properties": {"at": {"description": "a deep word"}}},
}
CHATS = {
    "text and a call": talk(QUESTION, LOOK, tools=[TOOL]),
    "a call": talk(QUESTION, CALL),
    "a result": talk(QUESTION, CALL, RAINY, ANSWER, supervised=(3,)),
    "tools": talk(QUESTION, ANSWER, tools=[TOOL]),
    "system": talk(SYSTEM, QUESTION, ANSWER),
}
RENDERING_ALL = ("hybrid", "instruct-2507", "qwen2.5", "qwen3.5")


@pytest.fixture
def made(tiny_folder: Path, tmp_path: Path) -> Any:
    return lambda template, **settings: Encoder(
        change_template(tiny_folder, tmp_path / "model", template),
        Tokenize(max_tokens=10_000, **settings),
        fast=False,
    )


@pytest.mark.parametrize("name", RENDERING_ALL)
def test_templates_that_render_all_drop_nothing(made: Any, name: str) -> None:
    encoder = made(TEMPLATES[name])
    for chat in CHATS.values():
        assert all(isinstance(sample, Sample) for sample in encoder.encode([chat])[0])


@pytest.mark.parametrize(
    ("chat", "drop"),
    [
        ("text and a call", Drop.CALLS_NOT_RENDERED),
        ("a call", Drop.CALLS_NOT_RENDERED),
        ("a result", Drop.CALLS_NOT_RENDERED),
        ("tools", Drop.TOOLS_NOT_RENDERED),
        ("system", None),
    ],
)
@pytest.mark.parametrize("name", ["chatml", "no generation prompt"])
def test_what_a_template_leaves_out_drops_the_row(
    made: Any, name: str, chat: str, drop: Drop | None
) -> None:
    (outcome,) = made(TEMPLATES[name]).encode([CHATS[chat]])[0]
    assert outcome == drop if drop else isinstance(outcome, Sample)


SHALLOW_CALLS = TEMPLATES["hybrid"].replace(
    "call.function.arguments | tojson", "call.function.arguments | list | tojson"
)
SHALLOW_TOOLS = TEMPLATES["hybrid"].replace("tool | tojson", "tool.function.name")
NO_SYSTEM = (
    "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}"
    + TEMPLATES["chatml"]
)
NO_RESULTS = (
    "{% set messages = messages | rejectattr('role', 'equalto', 'tool') | list %}"
    + TEMPLATES["instruct-2507"]
)


@pytest.mark.parametrize(
    ("template", "chat", "drop"),
    [
        (SHALLOW_CALLS, "text and a call", Drop.CALLS_NOT_RENDERED),
        (SHALLOW_TOOLS, "tools", Drop.TOOLS_NOT_RENDERED),
        (NO_SYSTEM, "system", Drop.MESSAGE_NOT_RENDERED),
        (NO_RESULTS, "a result", Drop.MESSAGE_NOT_RENDERED),
    ],
)
def test_every_depth_and_every_role_counts(made: Any, template: str, chat: str, drop: Drop) -> None:
    assert made(template).encode([CHATS[chat]])[0] == [drop]


def test_a_text_that_a_template_leaves_out_for_its_words_drops_the_row(made: Any) -> None:
    template = TEMPLATES["chatml"].replace("message['content']", "message['content'].split('#')[0]")
    encoder, long = made(template), say("user", "# how are you, my friend, today")
    assert encoder.encode([talk(long, ANSWER)])[0] == [Drop.MESSAGE_NOT_RENDERED]
    assert isinstance(encoder.encode([talk(QUESTION, ANSWER)])[0][0], Sample)


@pytest.mark.parametrize(
    ("settings", "template", "key"),
    [
        ({"tools": (json.dumps(TOOL),)}, TEMPLATES["chatml"], "tokenize.tools"),
        ({"tools": (json.dumps(NESTED),)}, SHALLOW_TOOLS, "tokenize.tools"),
        ({"system": "Be brief."}, NO_SYSTEM, "tokenize.system"),
    ],
)
def test_what_the_config_gives_has_to_be_rendered(
    made: Any, settings: Any, template: str, key: str
) -> None:
    with pytest.raises(DataError, match=f"^{key}: the chat template of .* does not render it"):
        made(template, **settings).encode([talk(QUESTION, ANSWER)])
    assert isinstance(
        made(TEMPLATES["hybrid"], **settings).encode([talk(QUESTION, ANSWER)])[0][0], Sample
    )


def test_a_template_that_wants_null_and_text_is_given_them(made: Any) -> None:
    """As R1's, where servers that pass null; transformers leaves null out."""
    template = TEMPLATES["r1-distill"].replace("<think>\\n", "")
    template = template.replace("content'] is none", "content'] is undefined")
    encoder = made(template)
    (sample,) = encoder.encode([talk(QUESTION, CALL)])[0]
    function = {"name": "weather", "arguments": '{"place": "Bonn"}'}
    given = [
        QUESTION,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"type": "function", "function": function}],
        },
    ]
    wanted = AutoTokenizer.from_pretrained(encoder._folder).apply_chat_template(
        given, return_dict=False
    )
    assert sample.tokens.tolist() == wanted
    # it reads calls only beside null
    assert encoder.encode([talk(QUESTION, LOOK)])[0] == [Drop.CALLS_NOT_RENDERED]


def test_thinking_that_a_template_cuts_is_the_reason_of_the_drop(made: Any) -> None:
    encoder = made(TEMPLATES["r1-distill"])
    assert encoder.encode([talk(QUESTION, REASONED)])[0] == [Drop.THINKING_NOT_RENDERED]
    assert encoder.encode(
        [talk(QUESTION, say("assistant", "<think>\nThey ask, and wait.\n</think>\n\nFine."))]
    )[0] == [Drop.THINKING_NOT_RENDERED]


def test_the_role_tokens_of_a_template_may_stand_in_no_row(made: Any) -> None:
    encoder = made(TEMPLATES["r1-distill"])
    for token in ("<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>"):
        assert encoder.control_token_in(talk(say("user", f"a {token} b"), ANSWER)) == token
    assert (
        made(TEMPLATES["hybrid"]).control_token_in(
            talk(say("user", "<｜User｜> <tool_call>"), ANSWER)
        )
        is None
    )


PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


@pytest.mark.parametrize(
    ("name", "text"), [("qwen3.5", "onetwo"), ("hybrid", "one\ntwo"), ("chatml", "one\ntwo")]
)
def test_text_parts_are_joined_as_the_template_joins_them(made: Any, name: str, text: str) -> None:
    encoder = made(TEMPLATES[name])
    row = {
        "messages": [{"role": "user", "content": PARTS}, {"role": "assistant", "content": PARTS}]
    }
    (sample,) = encoder.encode([content_of(row)])[0]
    joined = [say("user", text), say("assistant", text)]
    ((prompt, written),) = supervised_turns(sample)
    tokenizer = judge(encoder._folder)
    assert [*prompt, *written] == (tokenizer.apply_chat_template(joined, return_dict=False))[
        : len(sample.tokens)
    ]
    if name == "qwen3.5":
        given = tokenizer.apply_chat_template(row["messages"], return_dict=False)
        assert given[: len(sample.tokens)] == sample.tokens.tolist()


def test_answers_that_begin_with_a_line_end_are_learned(qwen_folder: Path, tmp_path: Path) -> None:
    """Qwen's tokenizer has one token for two line ends; a model given the first adds another."""
    folder = change_template(qwen_folder, tmp_path, TEMPLATES["instruct-2507"])
    encoder = Encoder(folder, Tokenize())
    samples = encoder.encode([talk(QUESTION, say("assistant", "\n\nFine."), QUESTION, ANSWER)])[0]
    assert learned(folder, samples) == [["\n\nFine.<|im_end|>"], ["Fine, 谢谢!<|im_end|>"]]


@pytest.mark.parametrize("name", ["chatml", "no generation prompt"])
def test_drops_are_booked_and_a_missing_prompt_is_named(
    pipeline: Pipeline, tiny_folder: Path, tmp_path: Path, name: str
) -> None:
    pipeline.model = Path(shutil.copytree(tiny_folder, tmp_path / "model"))
    set_template(pipeline.model, TEMPLATES[name])
    rows = [{"messages": [QUESTION, say("assistant", f"Fine {number}.")]} for number in range(5)]
    rows.append({"messages": [QUESTION, CALL]})
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = pipeline.tokenize(path, tokenize={"max_dropped_fraction": 0.5})
    total = json.loads((made.path / "ledger.json").read_text())["total"]
    assert (total["kept"], total["dropped"]) == (5, {"calls_not_rendered": 1})
    assert (NO_GENERATION_PROMPT in pipeline.said) == (name == "no generation prompt")


def content_of(row: Any) -> Content:
    return to_content(row, layout_of(row, FileData(source="file", path="x")))
