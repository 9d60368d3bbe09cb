"""Twenty rows of each layout under each published template: transformers' tokens and masks.

Rows are given to transformers as their authors wrote them, so reading, rendering and encoding are
tested together.
"""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pipeline_lib.config.schema import FileData, Tokenize
from pipeline_lib.data.conversations import Message
from pipeline_lib.data.encode import Drop, Encoder, Sample
from pipeline_lib.data.layouts import layout_of, to_content

from .chats import FAMILIES, INSTRUCT, TEMPLATES, TEXT_ONLY, TOOL, change_template, supervised_turns

ROWS = 20
ALL = {
    **{name: template for name, template in TEMPLATES.items() if name not in TEXT_ONLY},
    **{name: FAMILIES[name] for name in ("qwen3.6", "qwen3.8")},
    "instruct": INSTRUCT,
}
# a row, and what a caller would pass
Row = tuple[dict[str, Any], list[Message], list[dict[str, Any]] | None]
WORDS = (
    "How are you?",
    "Wie geht's, Jörg?",
    "你好吗？",
    "x = {'a': [1, 2]}\n\n  # why",
    "  spaces  ",
    "e\u0301 \U0001f1e9\U0001f1ea",
)


def _texts(number: int) -> tuple[str, str]:
    return (
        f"{WORDS[number % len(WORDS)]} {number}",
        f"{number}: {WORDS[(number + 1) % len(WORDS)]}".strip(),
    )


def _messages(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def alpaca(number: int) -> Row:
    question, answer = _texts(number)
    row = {
        "instruction": question,
        "input": "more",
        "output": answer,
        "history": [["first", "then"]],
        "system": "Be.",
    }
    before: list[Message] = [{"role": "system", "content": "Be."}, *_messages("first", "then")]
    return row, before + _messages(f"{question}\nmore", answer), None


def sharegpt(number: int) -> Row:
    question, answer = _texts(number)
    row = {
        "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        * 2
    }
    return row, _messages(question, answer) * 2, None


def messages(number: int) -> Row:
    turns = _messages(*_texts(number))
    return {"messages": turns}, turns, None


def tools(number: int) -> Row:
    question, answer = _texts(number)
    function = {
        "name": "weather",
        "arguments": {"place": question, "days": number, "more": {"a": [1, None, answer]}},
    }
    call = {"type": "function", "function": function}
    turns: list[Message] = [
        {"role": "user", "content": question},
        {
            "role": "assistant",
            "content": "I look." if number % 2 else "",
            "tool_calls": [call] * (1 + number % 3),
        },
        *([{"role": "tool", "content": f"{answer} of {number}"}] * (1 + number % 3)),
        {"role": "assistant", "content": answer},
    ]
    return {"messages": turns, "tools": [TOOL]}, turns, [TOOL]


def thinking(number: int) -> Row:
    question, answer = _texts(number)
    turns = _messages(question, answer)
    turns[1]["reasoning_content"] = f"They ask number {number}, and I answer."
    return {"messages": turns}, turns, None


def parts(number: int) -> Row:
    question, answer = _texts(number)
    split = [{"type": "text", "text": question}, {"type": "text", "text": "and more"}]
    turns: list[Message] = [
        {"role": "user", "content": split},
        {"role": "assistant", "content": answer},
    ]
    return {"messages": turns}, turns, None


def prompt_completion(number: int) -> Row:
    question, answer = _texts(number)
    return {"prompt": question, "completion": answer}, _messages(question, answer), None


LAYOUTS = {
    make.__name__: make
    for make in (alpaca, sharegpt, messages, tools, thinking, parts, prompt_completion)
}
READS_PARTS = ("qwen3.5", "qwen3.6", "qwen3.8")
# Templates that leave out a part of these rows, and why such rows are dropped.
LEFT_OUT = {
    **dict.fromkeys(
        [(name, "tools") for name in ("chatml", "no generation prompt")],
        {Drop.TOOLS_NOT_RENDERED, Drop.CALLS_NOT_RENDERED},
    ),
    **dict.fromkeys(
        [
            (name, "thinking")
            for name in ("chatml", "no generation prompt", "qwen2.5", "instruct-2507", "instruct")
        ],
        {Drop.THINKING_NOT_RENDERED},
    ),
}


@pytest.fixture(scope="module", params=ALL)
def model(
    request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    name = str(request.param)
    return change_template(tiny_folder, tmp_path_factory.mktemp("models") / name, ALL[name])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_becomes_the_tokens_that_transformers_gives(model: Path, layout: str) -> None:
    encoder = Encoder(model, Tokenize(max_tokens=10_000))
    tokenizer = AutoTokenizer.from_pretrained(model)
    for number in range(ROWS):
        row, turns, tools = LAYOUTS[layout](number)
        content = to_content(row, layout_of(row, FileData(source="file", path="x")))
        found = encoder.encode([content])[0]
        dropped = {outcome for outcome in found if isinstance(outcome, Drop)}
        if reasons := LEFT_OUT.get((model.name, layout)):
            assert dropped and dropped <= reasons
            continue
        learned = [
            turn
            for sample in found
            if isinstance(sample, Sample)
            for turn in supervised_turns(sample)
        ]
        answers = [place for place, turn in enumerate(turns) if turn["role"] == "assistant"]
        if layout == "parts" and model.name not in READS_PARTS:  # servers join them by line ends
            turns = [
                {**turns[0], "content": "\n".join(part["text"] for part in turns[0]["content"])},
                *turns[1:],
            ]
        asked = layout == "thinking"
        wanted = [_expected(tokenizer, turns[: place + 1], tools, asked) for place in answers]
        assert sorted(learned) == sorted(turn for turn in wanted if turn is not None)
        assert len(learned) + len(found) - len(
            [each for each in found if isinstance(each, Sample)]
        ) == len(answers)


def _expected(
    tokenizer: Any, turns: list[Message], tools: list[dict[str, Any]] | None, asked: bool
) -> tuple[list[int], list[int]] | None:
    """What a model is given and should write; None if the prompt does not begin the text.

    The text is the answer's.
    """
    options = {"tools": tools, "enable_thinking": asked, "return_dict": False}
    prompt = tokenizer.apply_chat_template(turns[:-1], add_generation_prompt=True, **options)
    full = tokenizer.apply_chat_template(turns, **options)
    if full[: len(prompt)] != prompt:
        return None
    end = len(full) - full[::-1].index(tokenizer.convert_tokens_to_ids("<|im_end|>"))
    return prompt, full[len(prompt) : end]
