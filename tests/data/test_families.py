"""Chat templates like Qwen3.5, 3.6 and 3.8: rendered as by transformers, encoded as asked."""

from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.core.errors import DataError
from pipeline_lib.data.chat_template import ChatTemplate
from pipeline_lib.data.conversations import Conversation
from pipeline_lib.data.encode import Drop, Encoder, Sample
from pipeline_lib.data.template_worker import render_prompts

from .chats import (
    ANSWER,
    CALLING,
    FAMILIES,
    INSTRUCT,
    QUESTION,
    RAINY,
    REASONED,
    SUNNY,
    SYSTEM,
    THOUGHTFUL,
    TOOL,
    UNTHINKING,
    call,
    change_template,
    encoder,
    judge,
    learned,
    say,
    supervised_turns,
    talk,
    thinking_apart,
)

EMPTY = "<think>\n\n</think>\n\n"
FINE = "They ask.\n</think>\n\nFine.<|im_end|>"
AT_ONCE = say(
    "assistant", "I look.", tool_calls=[call(place="Bonn", days=3, now=True, more={"a": [1, None]})]
)
CALLED = """\
I look.

<tool_call>
<function=weather>
<parameter=place>
Bonn
</parameter>
<parameter=days>
3
</parameter>
<parameter=now>
true
</parameter>
<parameter=more>
{"a": [1, null]}
</parameter>
</function>
</tool_call><|im_end|>"""

Family = Callable[[str], Path]


@pytest.fixture(scope="module")
def family(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Make the folder of a family."""
    root = tmp_path_factory.mktemp("families")
    return lambda name: change_template(tiny_folder, root / name, FAMILIES[name])


def encoder_with(folder: Path, **settings: Any) -> Encoder:
    """As `encoder`, with settings that need not be hashable."""
    found = copy(encoder(folder))
    found.settings = found.settings.model_copy(update=settings)
    found.__dict__.pop("template", None)
    return found


def turns_of(
    folder: Path, conversation: Conversation, **settings: Any
) -> list[list[tuple[str, str]] | Drop]:
    """For each sample the end of each turn's input, from the role on, and what is learned."""
    decode = judge(folder).decode
    found = encoder_with(folder, **settings).encode([conversation])[0]
    return [
        sample
        if isinstance(sample, Drop)
        else [
            (decode(given).rpartition("<|im_start|>")[2], decode(w))
            for given, w in supervised_turns(sample)
        ]
        for sample in found
    ]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"enable_thinking": True, "reasoning_effort": "low"},
        {"enable_thinking": False, "preserve_thinking": True},
        {"preserve_thinking": False, "reasoning_effort": "medium"},
    ],
)
def test_it_renders_what_transformers_renders(
    family: Family, name: str, variables: dict[str, Any]
) -> None:
    folder = family(name)
    template, reference = ChatTemplate.load(folder), judge(folder).apply_chat_template
    messages = [
        SYSTEM,
        QUESTION,
        CALLING,
        SUNNY,
        RAINY,
        REASONED,
        QUESTION,
        AT_ONCE,
        SUNNY,
        ANSWER,
        QUESTION,
        REASONED,
    ]
    every: tuple[Any, ...] = (None, [TOOL])
    for tools in every:
        for count in range(2, len(messages) + 1):
            for begin in (0, 1):
                for prompt in (False, True):
                    given = messages[begin:count]
                    wanted = reference(
                        given,
                        tools=tools,
                        tokenize=False,
                        add_generation_prompt=prompt,
                        **variables,
                    )
                    assert template.render(given, tools, prompt, **variables) == wanted


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("thinking", ["keep", "mask"])
def test_answers_begin_where_the_prompt_ends(family: Family, name: str, thinking: str) -> None:
    folder = family(name)
    assert turns_of(folder, talk(QUESTION, ANSWER), thinking=thinking) == [
        [("assistant\n" + EMPTY, "Fine, 谢谢!<|im_end|>")]
    ]
    opened = "assistant\n<think>\n"
    wanted = (
        (opened, FINE)
        if thinking == "keep"
        else (opened + "They ask.\n</think>\n\n", "Fine.<|im_end|>")
    )
    for answer in (REASONED, THOUGHTFUL):
        assert turns_of(folder, talk(QUESTION, answer), thinking=thinking) == [[wanted]]
    assert turns_of(folder, talk(QUESTION, UNTHINKING), thinking=thinking) == [
        [("assistant\n" + EMPTY, "Fine.<|im_end|>")]
    ]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_that_does_not_think_is_asked_with_the_empty_block(
    family: Family, name: str
) -> None:
    chat = talk(QUESTION, AT_ONCE, SUNNY, REASONED, tools=[TOOL])
    first, last = ("assistant\n" + EMPTY, CALLED), ("assistant\n<think>\n", FINE)
    # The switch of 3.8 changes the system message too, so the steps have different beginnings.
    assert turns_of(family(name), chat) == (
        [[first], [last]] if name == "qwen3.8" else [[first, last]]
    )


def test_where_the_prompt_opens_a_block_no_answer_can_decline_to_think(
    qwen_folder: Path, tmp_path: Path
) -> None:
    folder = change_template(qwen_folder, tmp_path, FAMILIES["qwen3.5"])
    chat, asking = talk(QUESTION, ANSWER), encoder(folder, prompt_thinking="on")
    assert asking.encode([chat]) == [[Drop.PROMPT_NOT_PREFIX]]
    assert "set prompt_thinking to off" in asking.hint(Drop.PROMPT_NOT_PREFIX)
    assert "prompt_thinking" not in encoder(folder).hint(Drop.PROMPT_NOT_PREFIX)


def test_thinking_in_the_text_goes_where_the_template_reads_it(family: Family) -> None:
    thought = say(
        "assistant", "<think>\nFirst.\n</think>\n\nI look.", tool_calls=[call(place="Bonn")]
    )
    chats = [
        talk(QUESTION, THOUGHTFUL, QUESTION, UNTHINKING, QUESTION, THOUGHTFUL),
        talk(SYSTEM, QUESTION, thought, SUNNY, THOUGHTFUL, QUESTION, ANSWER, tools=[TOOL]),
    ]
    for name in FAMILIES:
        for chat in chats:
            apart = talk(*map(thinking_apart, chat.messages), tools=chat.tools)
            for setting in ("keep", "strip", "mask"):
                found = turns_of(family(name), chat, thinking=setting)
                assert found == turns_of(family(name), apart, thinking=setting)
                assert not any(isinstance(sample, Drop) for sample in found)


def test_a_template_that_reads_thinking_from_the_text_alone_is_given_it_there(
    tiny_folder: Path,
) -> None:
    template = ChatTemplate(INSTRUCT, {}, "x")
    assert "<think>\nThey ask.\n</think>\n\nFine." in template.render([QUESTION, THOUGHTFUL])


MIXED = talk(QUESTION, REASONED, QUESTION, ANSWER, QUESTION, REASONED, QUESTION, ANSWER)


def test_turns_of_the_same_switch_share_a_sample_where_thinking_is_kept(family: Family) -> None:
    on, off = ("assistant\n<think>\n", FINE), ("assistant\n" + EMPTY, "Fine, 谢谢!<|im_end|>")
    assert turns_of(family("qwen3.8"), MIXED) == [[on, on], [off, off]]
    for name in ("qwen3.5", "qwen3.6"):
        assert turns_of(family(name), MIXED) == [[on], [off], [on], [off]]
    assert turns_of(family("qwen3.6"), MIXED, chat_template_kwargs={"preserve_thinking": True}) == [
        [on, off, on, off]
    ]
    assert turns_of(family("qwen3.8"), MIXED, chat_template_kwargs={"preserve_thinking": False}) == [
        [on], [off], [on], [off],
    ]  # fmt: skip
    first, second = encoder(family("qwen3.8")).encode([MIXED])[0]
    assert isinstance(first, Sample) and first.asked_to_think == (True, True)
    assert isinstance(second, Sample) and second.asked_to_think == (False, False)


@pytest.mark.parametrize(("effort", "written"), [(None, "xhigh"), ("low", "low"), ("medium", None)])
def test_samples_are_rendered_with_the_variables_of_the_config(
    family: Family, effort: str | None, written: str | None
) -> None:
    folder, kwargs = family("qwen3.8"), {} if effort is None else {"reasoning_effort": effort}
    (sample,) = encoder_with(folder, chat_template_kwargs=kwargs).encode(
        [talk(SYSTEM, QUESTION, REASONED)]
    )[0]
    assert isinstance(sample, Sample)
    ((given, _),) = supervised_turns(sample)
    options = {"add_generation_prompt": True, "enable_thinking": True, "return_dict": False}
    assert given == judge(folder).apply_chat_template([SYSTEM, QUESTION], **options, **kwargs)
    assert (f"Effort: {written}\n" in judge(folder).decode(given)) == (written is not None)
    prompt = judge(folder).decode(given)
    assert render_prompts(folder, [[SYSTEM, QUESTION]], kwargs=kwargs, enable_thinking=True) == [
        prompt
    ]


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        (
            "qwen3.6",
            {"reasoning_effort": "low"},
            "reads no variable 'reasoning_effort'; those that can be set are preserve_thinking$",
        ),
        (
            "qwen3.8",
            {"reasoning_efort": "low"},
            "'reasoning_efort'; did you mean 'reasoning_effort'.; .* preserve_thinking, "
            "reasoning_effort$",
        ),
        (
            "qwen3.5",
            {"preserve_thinking": True},
            "reads no variable 'preserve_thinking'; those that can be set are none$",
        ),
        ("qwen3.8", {"eos_token": "low"}, "reads no variable 'eos_token'"),
        ("qwen3.8", {"tojson": "low"}, "reads no variable 'tojson'"),
        ("qwen3.8", {"reasoning_effort": "high"}, "fails on messages of user: no effort high"),
        ("qwen3.8", {"reasoning_effort": 3}, "fails on messages of user: no effort 3"),
    ],
)
def test_variables_that_the_template_cannot_use_are_refused(
    tiny_folder: Path, tmp_path: Path, name: str, kwargs: dict[str, Any], message: str
) -> None:
    folder = change_template(tiny_folder, tmp_path, FAMILIES[name])
    with pytest.raises(DataError, match=message):
        encoder_with(folder, chat_template_kwargs=kwargs).encode([talk(QUESTION, REASONED)])


@pytest.mark.parametrize(
    ("name", "default"),
    [("qwen3.5", "on"), ("qwen3.5-2b", "off"), ("qwen3.6", "on"), ("qwen3.8", "on")],
)
def test_the_default_of_each_family_is_found(family: Family, name: str, default: str) -> None:
    assert encoder(family(name)).thinking_default() == default


def test_a_template_that_cannot_be_told_not_to_think_learns_from_data_that_does(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """As that of the largest Qwen3.8, which raises where thinking is off."""
    refusing = (
        "{%- if enable_thinking is defined and not enable_thinking %}{{- "
        "raise_exception('it thinks') }}{% endif %}"
    )
    folder = change_template(tiny_folder, tmp_path, refusing + FAMILIES["qwen3.8"])
    assert encoder(folder).thinking_default() is None
    assert learned(folder, encoder(folder).encode([talk(QUESTION, REASONED)])[0]) == [[FINE]]
    with pytest.raises(DataError, match="fails on messages of user: it thinks"):
        encoder(folder).encode([talk(QUESTION, ANSWER)])
