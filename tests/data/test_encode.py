"""The encoder's settings and refusals, one by one.

That samples are exact is in test_encode_exact.py.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline_lib.config.compile import compile_config
from pipeline_lib.config.content import Content as Hashes
from pipeline_lib.config.schema import Config, Tokenize
from pipeline_lib.config.section import read_settings
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.store import Store
from pipeline_lib.data.conversations import Content, Conversation, Text
from pipeline_lib.data.encode import Drop, Encoder, Sample, load_tokenizer
from pipeline_lib.data.thinking import thinking_of, without_thinking

from .chats import (
    ANSWER,
    CALLING,
    INSTRUCT,
    QUESTION,
    RAINY,
    REASONED,
    SUNNY,
    SYSTEM,
    THINKING,
    THOUGHTFUL,
    TOOL,
    UNTHINKING,
    call,
    change_template,
    encoder,
    expected_turns,
    judge,
    learned,
    say,
    supervised_turns,
    talk,
)

LOOKED_UP = talk(
    SYSTEM, QUESTION, CALLING, SUNNY, RAINY, THOUGHTFUL, QUESTION, ANSWER, tools=[TOOL]
)
CONVERSATIONS = [
    talk(QUESTION, ANSWER),
    talk(QUESTION, ANSWER, QUESTION),
    talk(QUESTION, THOUGHTFUL, QUESTION, ANSWER),
    talk(QUESTION, UNTHINKING),
    talk(QUESTION, ANSWER, QUESTION, THOUGHTFUL, QUESTION, ANSWER, supervised=(3,)),
    LOOKED_UP,
]


def decode(folder: Path, tokens: Any) -> str:
    return str(judge(folder).decode(list(tokens)))


def only(found: list[Sample | Drop]) -> Sample:
    (sample,) = found
    assert isinstance(sample, Sample)
    return sample


def test_turns_share_a_sample_where_the_history_stays_as_it_was(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = change_template(tiny_folder, tmp_path, INSTRUCT)
    for supervised in ((1, 3, 5), (1, 5)):
        chat = talk(QUESTION, ANSWER, QUESTION, ANSWER, QUESTION, ANSWER, supervised=supervised)
        assert len(supervised_turns(only(encoder(folder).encode([chat])[0]))) == len(supervised)


def test_each_turn_has_its_own_sample_where_the_history_is_rewritten(folder: Path) -> None:
    samples = encoder(folder).encode([talk(QUESTION, THOUGHTFUL, QUESTION, THOUGHTFUL)])[0]
    assert learned(folder, samples) == [["<think>\nThey ask.\n</think>\n\nFine.<|im_end|>"]] * 2
    last = samples[1]
    assert isinstance(last, Sample)
    assert decode(folder, last.tokens).count("They ask.") == 1  # not in the history


def test_the_steps_of_one_question_share_a_sample(folder: Path) -> None:
    calls = [
        '{"name": "weather", "arguments": {"place": "北京"}}',
        '{"name": "weather", "arguments": {"place": "Bonn"}}',
    ]
    written = "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in calls)
    assert learned(folder, encoder(folder).encode([LOOKED_UP])[0]) == [
        [
            f"<think>\nLook it up.\n</think>\n\n{written}<|im_end|>",
            "<think>\nThey ask.\n</think>\n\nFine.<|im_end|>",
        ],
        ["Fine, 谢谢!<|im_end|>"],
    ]


def test_the_empty_thinking_block_is_given_and_not_learned(folder: Path) -> None:
    for answer in (say("assistant", "Fine."), UNTHINKING):
        ((prompt, written),) = supervised_turns(
            only(encoder(folder).encode([talk(QUESTION, answer)])[0])
        )
        assert decode(folder, prompt).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert decode(folder, written) == "Fine.<|im_end|>"


@pytest.mark.parametrize("answer", [THOUGHTFUL, REASONED])
def test_thinking_can_be_stripped(folder: Path, answer: dict[str, Any]) -> None:
    found = encoder(folder, thinking="strip").encode([talk(QUESTION, answer, QUESTION, answer)])[0]
    assert learned(folder, found) == [["Fine.<|im_end|>"]] * 2
    assert "They ask." not in decode(
        folder, [t for sample in found for t in getattr(sample, "tokens", [])]
    )


@pytest.mark.parametrize("answer", [THOUGHTFUL, REASONED])
def test_thinking_can_be_masked(folder: Path, answer: dict[str, Any]) -> None:
    sample = only(encoder(folder, thinking="mask").encode([talk(QUESTION, answer)])[0])
    ((prompt, written),) = supervised_turns(sample)
    assert decode(folder, prompt).endswith("assistant\n<think>\nThey ask.\n</think>\n\n")
    assert decode(folder, written) == "Fine.<|im_end|>"
    kept = only(encoder(folder).encode([talk(QUESTION, answer)])[0])
    assert np.array_equal(sample.tokens, kept.tokens)


def test_thinking_that_a_token_joins_to_the_answer_cannot_be_masked(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = change_template(tiny_folder, tmp_path, INSTRUCT)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = [
        token for token in content["added_tokens"] if "think" not in token["content"]
    ]
    last = content["model"]["merges"][-1] = [">", "!"]  # instead of the last token one that is ">!"
    vocab = content["model"]["vocab"]
    *_, dropped = sorted(vocab, key=lambda text: vocab[text])
    vocab["".join(last)] = vocab.pop(dropped)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    joined, parted = (
        talk(QUESTION, say("assistant", f"<think>They ask.</think>{rest}"))
        for rest in ("!", "\n\nFine!")
    )
    refused, taken = encoder(folder, thinking="mask").encode([joined, parted])
    assert refused == [Drop.THINKING_NOT_SEPARABLE]
    ((prompt, written),) = supervised_turns(only(taken))
    decode_here = load_tokenizer(folder).decode
    assert decode_here(prompt).endswith("</think>\n\n") and decode_here(written) == "Fine!"


LOOKING = {**CALLING, "reasoning_content": "place"}  # stands in the call as well


@pytest.mark.parametrize("thinking", ["keep", "mask"])
@pytest.mark.parametrize(
    "chat",
    [
        talk(QUESTION, REASONED),
        talk(
            QUESTION, say("assistant", "Fine.", reasoning_content="Fine.")
        ),  # the answer alone holds these words
        talk(
            QUESTION, say("assistant", "m", reasoning_content="im")
        ),  # so does the end of the turn
        talk(QUESTION, say("assistant", "word " * 50, reasoning_content="word " * 20)),
        talk(QUESTION, LOOKING, SUNNY, RAINY, ANSWER, tools=[TOOL], supervised=(1,)),
    ],
)
def test_thinking_that_the_template_leaves_out_drops_the_turn(
    tiny_folder: Path, tmp_path: Path, thinking: str, chat: Conversation
) -> None:
    folder = change_template(tiny_folder, tmp_path, INSTRUCT)
    assert encoder(folder, thinking=thinking).encode([chat]) == [[Drop.THINKING_NOT_RENDERED]]
    assert isinstance(encoder(folder, thinking="strip").encode([chat])[0][0], Sample)
    written = THINKING.replace("if loop.last", "if true")
    folder = change_template(
        tiny_folder, tmp_path / "thinks", written.replace("assistant\n<think>\n'", "assistant\n'")
    )
    assert isinstance(encoder(folder, thinking=thinking).encode([chat])[0][0], Sample)


def test_thinking_in_the_text_that_the_template_cuts_out_drops_the_turn(
    tiny_folder: Path, tmp_path: Path
) -> None:
    # As templates of DeepSeek's distilled models do with every answer.
    template = INSTRUCT.replace("message.content }}", "message.content.split('</think>')[-1] }}")
    folder = change_template(tiny_folder, tmp_path, template)
    chat = talk(QUESTION, THOUGHTFUL, QUESTION, ANSWER)
    dropped, kept = encoder(folder).encode([chat])[0]
    assert dropped == Drop.THINKING_NOT_RENDERED
    # the thinking of an earlier turn is history
    assert learned(folder, [kept]) == [["Fine, 谢谢!<|im_end|>"]]


def test_masked_thinking_that_ends_in_another_way_is_not_trained_on(
    tiny_folder: Path, tmp_path: Path
) -> None:
    template = INSTRUCT.replace(
        "message.content }}",
        "(message.reasoning_content or 'nothing') + '[answer]' + message.content }}",
    )
    folder = change_template(tiny_folder, tmp_path, template)
    for answer in ("Fine.", "</think>"):
        chat = talk(QUESTION, say("assistant", answer, reasoning_content="They ask."))
        assert encoder(folder, thinking="mask").encode([chat]) == [[Drop.THINKING_NOT_SEPARABLE]]
        assert learned(folder, encoder(folder).encode([chat])[0]) == [
            [f"They ask.[answer]{answer}<|im_end|>"]
        ]


# Qwen's vocabulary joins the two line ends of an empty thinking block; the tiny one does not, so
# there is no block.
@pytest.mark.parametrize("thinking", ["keep", "strip", "mask"])
@pytest.mark.parametrize(
    ("kind", "condition"), [("qwen", "loop.last"), ("tiny", "loop.last and thought")]
)
def test_a_model_that_always_thinks_learns_only_from_data_that_does(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, condition: str, thinking: str
) -> None:
    template = THINKING.replace("loop.last", condition)
    folder = change_template(request.getfixturevalue(f"{kind}_folder"), tmp_path, template)
    encoding = encoder(folder, thinking=thinking)
    refused, taken = encoding.encode([talk(QUESTION, ANSWER), talk(QUESTION, REASONED)])
    assert refused == [Drop.PROMPT_NOT_PREFIX]
    assert "opens a thinking block, and these turns do not think" in encoding.hint(
        Drop.PROMPT_NOT_PREFIX
    )
    if thinking == "strip":
        assert taken == [Drop.PROMPT_NOT_PREFIX]
    else:
        written = (
            "They ask.\n</think>\n\nFine.<|im_end|>" if thinking == "keep" else "Fine.<|im_end|>"
        )
        assert learned(folder, taken) == [[written]]


def test_every_drop_has_a_hint(folder: Path) -> None:
    for drop in Drop:
        assert encoder(folder).hint(drop)
    assert "opens a thinking block" not in encoder(folder).hint(Drop.PROMPT_NOT_PREFIX)


def test_of_all_turns_only_the_last_is_trained_on_or_none(folder: Path) -> None:
    last = encoder(folder, train_on="last_assistant")
    messages = [QUESTION, THOUGHTFUL, QUESTION, ANSWER, QUESTION]
    for supervised in ((1, 3), (3,)):
        assert learned(folder, last.encode([talk(*messages, supervised=supervised)])[0]) == [
            ["Fine, 谢谢!<|im_end|>"]
        ]
    excluded = talk(*messages, supervised=(1,))
    assert last.encode([excluded, talk(QUESTION, ANSWER)])[0] == [Drop.LAST_TURN_EXCLUDED]
    assert isinstance(last.encode([excluded, talk(QUESTION, ANSWER)])[1][0], Sample)


# A server is told once for a question whether to think, so all steps towards the answer have the
# same prompts.
CALLS_AT_ONCE = say("assistant", "", tool_calls=[call(place="Bonn")])
CALLED = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn"}}\n</tool_call><|im_end|>'
EMPTY = "<think>\n\n</think>\n\n"


def texts_of(folder: Path, found: list[Any]) -> list[list[tuple[str, str]]]:
    """For each sample the last line and a half given to each turn, and what is learned."""
    decoded = [
        [[decode(folder, part) for part in turn] for turn in supervised_turns(sample)]
        for sample in found
    ]
    return [
        [(given.rpartition("<|im_start|>")[2], written) for given, written in turns]
        for turns in decoded
    ]


def test_a_step_without_thinking_learns_the_empty_block_if_another_thinks(folder: Path) -> None:
    first = talk(QUESTION, CALLS_AT_ONCE, SUNNY, THOUGHTFUL, QUESTION, ANSWER, tools=[TOOL])
    assert texts_of(folder, encoder(folder).encode([first])[0]) == [
        [("assistant\n", EMPTY + CALLED)],
        [("assistant\n", "<think>\nThey ask.\n</think>\n\nFine.<|im_end|>")],
        [(f"assistant\n{EMPTY}", "Fine, 谢谢!<|im_end|>")],
    ]
    assert texts_of(folder, encoder(folder, thinking="mask").encode([first])[0])[0] == [
        (f"assistant\n{EMPTY}", CALLED)
    ]
    thinks = {**CALLS_AT_ONCE, "reasoning_content": "Look."}
    ((_, last),) = texts_of(
        folder, encoder(folder).encode([talk(QUESTION, thinks, SUNNY, ANSWER, tools=[TOOL])])[0]
    )
    assert last == ("assistant\n", f"{EMPTY}Fine, 谢谢!<|im_end|>")


@pytest.mark.parametrize("thinking", ["keep", "strip", "mask"])
def test_steps_none_of_which_thinks_are_given_the_empty_block(folder: Path, thinking: str) -> None:
    chat = talk(
        QUESTION,
        THOUGHTFUL,
        QUESTION,
        CALLS_AT_ONCE,
        SUNNY,
        ANSWER,
        tools=[TOOL],
        supervised=(3, 5),
    )
    assert texts_of(folder, encoder(folder, thinking=thinking).encode([chat])[0]) == [
        [(f"assistant\n{EMPTY}", CALLED)],
        [(f"assistant\n{EMPTY}", "Fine, 谢谢!<|im_end|>")],
    ]


@pytest.mark.parametrize("thinking", ["keep", "strip"])
def test_answers_without_thinking_can_be_asked_for_as_with_thinking(
    folder: Path, thinking: str
) -> None:
    """As by default: then the model writes the empty block itself, and learns it."""
    asking = encoder(folder, thinking=thinking, prompt_thinking="on")
    chat = talk(QUESTION, ANSWER, QUESTION, CALLS_AT_ONCE, SUNNY, UNTHINKING, tools=[TOOL])
    found = asking.encode([chat])[0]
    assert texts_of(folder, found) == [
        [("assistant\n", f"{EMPTY}Fine, 谢谢!<|im_end|>")],
        [("assistant\n", EMPTY + CALLED)],
        [("assistant\n", f"{EMPTY}Fine.<|im_end|>")],
    ]
    for turn in [turn for sample in found for turn in supervised_turns(sample)]:
        assert judge(folder).decode(turn[0]).endswith("<|im_start|>assistant\n")
    assert [sample.asked_to_think for sample in found if isinstance(sample, Sample)] == [
        (True,)
    ] * 3


def test_a_prompt_that_opens_the_thinking_is_kept_to_where_the_config_asks_for_it(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """By default such a turn is asked for without thinking, which this template can do too."""
    template = INSTRUCT.replace(
        "assistant\n' }}", "assistant\n' + ('<think>\n' if enable_thinking else '') }}"
    )
    folder = change_template(tiny_folder, tmp_path, template)
    chat = talk(QUESTION, ANSWER)
    assert template != INSTRUCT
    assert learned(folder, encoder(folder).encode([chat])[0]) == [["Fine, 谢谢!<|im_end|>"]]
    assert encoder(folder, prompt_thinking="on").encode([chat]) == [[Drop.PROMPT_NOT_PREFIX]]


def test_a_sample_knows_how_its_turns_are_asked_for(tiny_folder: Path, tmp_path: Path) -> None:
    mixed = talk(QUESTION, THOUGHTFUL, QUESTION, ANSWER, QUESTION, ANSWER)
    found = encoder(tiny_folder).encode([mixed, Text("To be")])
    assert [
        [getattr(sample, "asked_to_think", None) for sample in samples] for samples in found
    ] == [
        [(True,), (False,), (False,)],
        [()],
    ]
    folder = change_template(tiny_folder, tmp_path, INSTRUCT)
    whole = only(encoder(folder).encode([mixed])[0])
    assert whole.asked_to_think == (True, False, False)
    first_end, second_start = np.flatnonzero(np.diff(whole.supervised, append=False))[1:3].tolist()
    for limit, over_long, begun in (
        (len(whole.tokens) - 1, "split", (True, False)),
        (len(whole.tokens) - 1, "truncate", (True, False, False)),
        (first_end + 1, "truncate", (True,)),
        (second_start + 1, "truncate", (True,)),  # the turn begins behind the cut
        (second_start + 2, "truncate", (True, False)),
    ):
        cut = encoder(folder, max_tokens=limit, over_long=over_long).encode([mixed])[0][0]
        assert isinstance(cut, Sample) and cut.asked_to_think == begun


def test_the_default_of_a_template_is_found(
    folder: Path, tmp_path: Path, tiny_folder: Path
) -> None:
    assert encoder(folder).thinking_default() == "on"
    for number, (template, default) in enumerate(
        (
            (INSTRUCT, None),
            (THINKING, None),
            ("{{ raise_exception('no question of this kind') }}", None),
            ("{{ enable_thinking }}", "other"),
            ("{{ 'think' if enable_thinking is defined and enable_thinking else '' }}", "off"),
        )
    ):
        assert (
            encoder(
                change_template(tiny_folder, tmp_path / str(number), template)
            ).thinking_default()
            == default
        )


def test_masking_leaves_think_tags_in_arguments_alone(folder: Path) -> None:
    tagged = say("assistant", "", tool_calls=[call(place="</think>")])
    found = encoder(folder, thinking="mask").encode(
        [talk(QUESTION, tagged, SUNNY, THOUGHTFUL, tools=[TOOL])]
    )[0]
    assert texts_of(folder, found)[0] == [
        (f"assistant\n{EMPTY}", CALLED.replace("Bonn", "</think>"))
    ]


def test_conversations_that_bring_no_system_message_are_given_one(folder: Path) -> None:
    given = encoder(folder, system="Be brief.")
    with_it = talk(SYSTEM, QUESTION, THOUGHTFUL)
    brought = talk(say("system", "Be long."), QUESTION, THOUGHTFUL)
    for chat, wanted in [
        (talk(QUESTION, THOUGHTFUL), with_it),
        (with_it, with_it),
        (brought, brought),
    ]:
        found, expected = only(given.encode([chat])[0]), only(encoder(folder).encode([wanted])[0])
        assert np.array_equal(found.tokens, expected.tokens) and np.array_equal(
            found.supervised, expected.supervised
        )


def test_conversations_that_bring_no_tools_are_given_some(folder: Path) -> None:
    given, other = encoder_with_tools(folder), {**TOOL, "note": "other"}
    for tools, wanted in [(None, [TOOL]), ([], [TOOL]), ([other], [other])]:
        found = only(given.encode([talk(QUESTION, ANSWER, tools=tools)])[0])
        assert [*supervised_turns(found)] == expected_turns(
            folder, talk(QUESTION, ANSWER, tools=wanted)
        )


def encoder_with_tools(folder: Path) -> Encoder:
    return Encoder(
        folder, encoder(folder).settings.model_copy(update={"tools": (json.dumps(TOOL),)})
    )


def test_a_prompt_that_is_no_prefix_drops_the_turn_alone(tiny_folder: Path, tmp_path: Path) -> None:
    # A space and a word are one token: a model that is given the space cannot go on with the word.
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant {% endif %}"
    folder = change_template(tiny_folder, tmp_path, template)
    chat = talk(QUESTION, say("assistant", "the end"), QUESTION, say("assistant", "42"))
    refused, taken = encoder(folder).encode([chat])[0]
    assert refused == Drop.PROMPT_NOT_PREFIX
    assert learned(folder, [taken]) == [["42<|im_end|>"]]
    context_only = talk(
        *chat.messages, supervised=(3,)
    )  # what is not trained on needs no prompt that fits
    assert learned(folder, encoder(folder).encode([context_only])[0]) == [["42<|im_end|>"]]


@pytest.mark.parametrize(
    ("template", "drop"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
         "{% if add_generation_prompt %}assistant:{% endif %}", Drop.NO_END_OF_TURN),
        ("{{ messages[0].content }}<|im_start|>{% if not add_generation_prompt %}<|im_end|>{% "
        "endif %}",
         Drop.NOTHING_SUPERVISED),
        ("{% if not add_generation_prompt %}{{ messages[1].content }}<|im_end|>{% endif %}", Drop.PROMPT_NOT_PREFIX),
    ],
    ids=["no end of turn", "a turn that only ends", "no prompt"],
)  # fmt: skip
def test_some_templates_teach_nothing(
    tiny_folder: Path, tmp_path: Path, template: str, drop: Drop
) -> None:
    folder = change_template(tiny_folder, tmp_path, template)
    assert encoder(folder).encode([talk(QUESTION, ANSWER)]) == [[drop]]


def test_what_is_too_long_is_dropped_or_cut(tiny_folder: Path) -> None:
    chat = talk(QUESTION, ANSWER)
    whole = only(encoder(tiny_folder).encode([chat])[0])
    length, prompt = len(whole.tokens), int(whole.supervised.argmax())
    for over_long in ("drop", "error"):
        short, enough = (
            encoder(tiny_folder, max_tokens=n, over_long=over_long) for n in (length - 1, length)
        )
        assert short.encode([chat]) == [[Drop.OVER_LONG]]
        assert np.array_equal(only(enough.encode([chat])[0]).tokens, whole.tokens)
    for limit in range(1, length):
        (cut,) = encoder(tiny_folder, max_tokens=limit, over_long="truncate").encode([chat])[0]
        if limit <= prompt:
            assert cut == Drop.OVER_LONG
            continue
        assert isinstance(cut, Sample) and cut.truncated and not cut.split
        assert np.array_equal(cut.tokens, whole.tokens[:limit])
        assert np.array_equal(cut.supervised, whole.supervised[:limit])


def test_of_a_conversation_that_is_too_long_the_turns_that_fit_are_kept(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = change_template(tiny_folder, tmp_path, INSTRUCT)
    chat = talk(QUESTION, ANSWER, QUESTION, ANSWER, QUESTION, ANSWER, supervised=(1, 5))
    whole = only(encoder(folder).encode([chat])[0])
    wanted = supervised_turns(whole)
    ends = [len(prompt) + len(written) for prompt, written in wanted]
    assert len(ends) == 2 and ends[-1] == len(whole.tokens)
    for limit in range(1, ends[-1] + 1):
        found = encoder(folder, max_tokens=limit, over_long="split").encode([chat])[0]
        fitting = sum(end <= limit for end in ends)
        assert found[bool(fitting) :] == [Drop.OVER_LONG] * (2 - fitting)
        if fitting:
            sample = only(found[:1])
            assert (
                supervised_turns(sample) == wanted[:fitting]
                and len(sample.tokens) == ends[fitting - 1]
            )
            assert not sample.split and not sample.truncated


def test_what_is_too_long_of_a_text_is_split_into_consecutive_pieces(tiny_folder: Path) -> None:
    content = Text("Once upon a time there was a tokenizer.")
    whole = only(encoder(tiny_folder).encode([content])[0])
    for limit in range(1, len(whole.tokens) + 2):
        found = encoder(tiny_folder, max_tokens=limit, over_long="split").encode([content])[0]
        starts = range(0, len(whole.tokens), limit)
        assert len(found) == len(starts)
        for start, piece in zip(starts, found, strict=True):
            supervised = whole.supervised[start : start + limit].copy()
            supervised[0] = False  # nothing comes before it in its piece
            if not isinstance(piece, Sample):
                assert piece == Drop.NOTHING_SUPERVISED and not supervised.any()
                continue
            assert np.array_equal(piece.tokens, whole.tokens[start : start + limit])
            assert np.array_equal(piece.supervised, supervised) and supervised.any()
            assert piece.split == (len(starts) > 1) and not piece.truncated


def test_a_text_is_learned_whole_up_to_its_end(folder: Path) -> None:
    (sample,) = encoder(folder).encode([Text("To be, or not\n\n to be? 生存还是毁灭 <think>")])[0]
    assert isinstance(sample, Sample)
    assert (
        decode(folder, sample.tokens)
        == "To be, or not\n\n to be? 生存还是毁灭 <think><|endoftext|>"
    )
    assert sample.supervised.tolist() == [False] + [True] * (len(sample.tokens) - 1)
    assert encoder(folder).encode([Text("")]) == [[Drop.NOTHING_SUPERVISED]]


def test_a_text_ends_with_the_token_that_the_model_has_for_it(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = change_template(tiny_folder, tmp_path, INSTRUCT)
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<|nothing|>"))
    sample = only(Encoder(folder, encoder(tiny_folder).settings).encode([Text("To be")])[0])
    assert decode(folder, sample.tokens) == "To be<|im_end|>"
    path.write_text(path.read_text().replace("<|im_end|>", "<|nothing more|>"))
    assert Encoder(folder, encoder(tiny_folder).settings).encode([Text("To be")]) == [
        [Drop.NO_END_OF_TURN]
    ]


def test_texts_need_no_chat_template(tiny_folder: Path, tmp_path: Path) -> None:
    folder = change_template(tiny_folder, tmp_path, "")
    assert isinstance(encoder(folder).encode([Text("To be")])[0][0], Sample)
    with pytest.raises(DataError, match="has no chat template"):
        encoder(folder).encode([talk(QUESTION, ANSWER)])


def test_a_batch_is_encoded_as_each_alone(folder: Path) -> None:
    contents: list[Content] = [*CONVERSATIONS, Text("a text")]
    for content, found in zip(
        contents, encoder(folder, thinking="mask").encode(contents), strict=True
    ):
        for sample, alone in zip(
            found, encoder(folder, thinking="mask").encode([content])[0], strict=True
        ):
            assert (
                isinstance(sample, Sample)
                and isinstance(alone, Sample)
                and sample.tokens.dtype == np.int32
            )
            assert not sample.truncated and not sample.split
            assert np.array_equal(sample.tokens, alone.tokens)
            assert np.array_equal(sample.supervised, alone.supervised)


END = "<|im_end|>"


@pytest.mark.parametrize(
    "content",
    [
        talk(QUESTION, say("assistant", f"a{END}b")),
        talk(say("user", END), ANSWER),
        talk(QUESTION, say("assistant", "b", reasoning_content=END)),
        talk(
            QUESTION,
            say("assistant", "", tool_calls=[call(place=[1, {"deep": f"x{END}"}])]),
            SUNNY,
            ANSWER,
        ),
        talk(
            QUESTION,
            say(
                "assistant",
                "",
                tool_calls=[{"type": "function", "function": {"name": "f", "arguments": {END: 1}}}],
            ),
            SUNNY,
            ANSWER,
        ),
        talk(QUESTION, ANSWER, tools=[{**TOOL, "note": END}]),
        Text(f"a {END}"),
    ],
)
def test_control_tokens_are_found_in_every_text(folder: Path, content: Any) -> None:
    assert encoder(folder).control_token_in(content) == END


@pytest.mark.parametrize("settings", [{"system": f"a{END}"}, {"tools": ({**TOOL, "note": END},)}])
def test_control_tokens_in_the_settings_are_refused(
    tiny_folder: Path, settings: dict[str, Any]
) -> None:
    with pytest.raises(DataError, match="holds the control token <.im_end.>"):
        Encoder(tiny_folder, Tokenize(**settings))


def test_what_is_no_control_token_is_legitimate(folder: Path) -> None:
    chat = talk(
        QUESTION,
        ANSWER,
        QUESTION,
        THOUGHTFUL,
        QUESTION,
        CALLING,
        SUNNY,
        RAINY,
        UNTHINKING,
        tools=[TOOL],
    )
    assert encoder(folder).control_token_in(chat) is None
    assert encoder(folder).control_token_in(Text("<think>a</think> <| im_end |>")) is None


def test_thinking_is_what_the_template_takes_for_it() -> None:
    assert thinking_of(THOUGHTFUL) == thinking_of(REASONED) == "They ask."
    assert thinking_of(say("assistant", " <think>a</think>b")) == "a"
    assert not any(
        map(thinking_of, (ANSWER, UNTHINKING, say("assistant", "", reasoning_content="\n")))
    )


@pytest.mark.parametrize(
    ("content", "left"),
    [
        ("<think>\na\n</think>\n\nb", "b"),
        ("\n<think></think>b", "b"),
        ("<think>\na\n</think>", ""),
        ("a </think", "a </think"),
        ("", ""),
    ],
)
def test_thinking_blocks_are_cut_out_of_the_text(content: str, left: str) -> None:
    message = say("assistant", content, reasoning_content="r", tool_calls=[call()])
    assert without_thinking(message) == say("assistant", left, tool_calls=[call()])
    assert without_thinking(say("user", content)) == say("user", content)


def test_a_tokenizer_that_cuts_and_pads_is_told_not_to(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "a b c d e f g h i"
    assert load_tokenizer(tmp_path).encode(text).ids == load_tokenizer(tiny_folder).encode(text).ids


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no tokenizer.json"),
        (b"{", "tokenizer.json: not a tokenizer .*EOF while parsing"),
        (b'{"model": {}}', "tokenizer.json: not a tokenizer .*data did not match"),
        (
            b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
            "tokenizer.json: the tokenizer has an empty vocab",
        ),
    ],
)
def test_a_missing_or_damaged_tokenizer_is_a_data_error(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    for load in (load_tokenizer, lambda folder: Encoder(folder, Tokenize())):
        with pytest.raises(DataError, match=message):
            load(tmp_path)


def test_tools_of_the_config_are_shown_as_they_were_written(
    tiny_folder: Path, tmp_path: Path
) -> None:
    """Also after a spec, which sorts its keys, was written and read."""
    config = {
        "experiment": "test",
        "model": {"source": "tiny"},
        "data": {"train": [{"source": "pydoc"}]},
        "tokenize": {"tools": [TOOL], "max_tokens": 1000},
    }
    store = Store(tmp_path)
    spec = compile_config(Config.model_validate_json(json.dumps(config)), Hashes({}, ({},))).specs[
        "tokenize"
    ]
    store.write_specs([spec])
    settings = read_settings(Tokenize, store.read_spec(store.spec_path(spec.digest)).settings)
    found = only(Encoder(tiny_folder, settings).encode([talk(QUESTION, ANSWER)])[0])
    assert [*supervised_turns(found)] == expected_turns(
        tiny_folder, talk(QUESTION, ANSWER, tools=[TOOL])
    )


def test_tools_of_the_config_that_are_no_tools_are_refused(tiny_folder: Path) -> None:
    settings = Tokenize().model_copy(update={"tools": ('{"type": "function", "function": {}}',)})
    with pytest.raises(
        DataError, match=r"tokenize.tools\[0\].function: expected the name of a function"
    ):
        Encoder(tiny_folder, settings)


def test_a_greeting_is_context_as_transformers_renders_it(tiny_folder: Path) -> None:
    messages = [{"role": "assistant", "content": "Who is there?"}, *talk(QUESTION, ANSWER).messages]
    sample = only(encoder(tiny_folder).encode([Conversation(messages, None, (2,))])[0])
    prompt = judge(tiny_folder).apply_chat_template(
        messages[:2], add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    assert sample.tokens[: len(prompt)].tolist() == prompt
    assert np.flatnonzero(sample.supervised).tolist() == list(
        range(len(prompt), len(sample.tokens))
    )
