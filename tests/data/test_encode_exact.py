"""Any conversation, any kind of template: samples are what transformers gives at inference.

That is what it would give and want.
"""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings

from pipeline_lib.data.conversations import Conversation
from pipeline_lib.data.encode import Drop, Sample

from .chats import (
    FAMILIES,
    INSTRUCT,
    THINKING,
    change_template,
    conversations,
    encoder,
    expected_turns,
    is_thinking_on,
    judge,
    supervised_turns,
)

some = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


# The vocabulary of Qwen joins the two line ends of an empty thinking block, and the tiny one does
# not. Asked without its own variables and with a switch, Qwen3.6 is as 3.5, of all sizes.
TEMPLATES = {
    "instruct": INSTRUCT,
    "thinking": THINKING,
    **{name: FAMILIES[name] for name in ("qwen3.5", "qwen3.8")},
}
KINDS = ["tiny", "qwen", *(f"tiny {name}" for name in TEMPLATES), "qwen qwen3.5", "qwen qwen3.8"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocabulary, _, name = request.param.partition(" ")
    folder = request.getfixturevalue(f"{vocabulary}_folder")
    assert isinstance(folder, Path)
    return (
        change_template(folder, tmp_path_factory.mktemp("kind"), TEMPLATES[name])
        if name
        else folder
    )


@some
@given(conversation=conversations())
def test_the_model_learns_what_inference_would_have_it_write_and_nothing_else(
    kind: Path, conversation: Conversation
) -> None:
    assume(encoder(kind).control_token_in(conversation) is None)
    found = encoder(kind).encode([conversation])[0]
    turns = [
        turn for sample in found if isinstance(sample, Sample) for turn in supervised_turns(sample)
    ]
    wanted = [turn for turn in expected_turns(kind, conversation) if turn is not None]
    # A turn in which the model would write nothing but its end is not learned. Turns may share an
    # earlier sample.
    assert sorted(turns) == sorted(
        (prompt, written) for prompt, written in wanted if len(written) > 1
    )
    assert len(turns) + sum(isinstance(sample, Drop) for sample in found) == len(
        conversation.supervised
    )
    for sample in found:
        assert not isinstance(sample, Sample) or sample.supervised[-1]


@some
@given(conversation=conversations())
def test_masked_thinking_is_given_and_not_learned(kind: Path, conversation: Conversation) -> None:
    masking = encoder(kind, thinking="mask")
    assume(masking.control_token_in(conversation) is None)
    for number in conversation.supervised:
        alone = Conversation(conversation.messages, conversation.tools, (number,))
        kept, masked = encoder(kind).encode([alone])[0][0], masking.encode([alone])[0][0]
        if not isinstance(masked, Sample):
            assert not isinstance(kept, Sample) or masked in (
                Drop.THINKING_NOT_SEPARABLE,
                Drop.NOTHING_SUPERVISED,
            )
            continue
        ((prompt, written),) = supervised_turns(kept)
        ((context, answer),) = supervised_turns(masked)
        assert [*context, *answer] == [*prompt, *written]
        hidden = judge(kind).decode(context[len(prompt) :])
        if not is_thinking_on(conversation.messages, number):
            assert hidden == ""
        elif hidden:
            assert hidden.rstrip().endswith("</think>") and hidden.count("</think>") == 1


@some
@given(conversation=conversations())
def test_stripped_thinking_is_nowhere(kind: Path, conversation: Conversation) -> None:
    stripping = encoder(kind, thinking="strip")
    assume(stripping.control_token_in(conversation) is None)
    bare = [
        {key: value for key, value in message.items() if key != "reasoning_content"}
        for message in conversation.messages
    ]
    for message in bare:
        if message["role"] == "assistant" and message["content"].startswith("<think>\n"):
            message["content"] = message["content"].split("</think>")[1].lstrip("\n")
    expected = encoder(kind).encode(
        [Conversation(bare, conversation.tools, conversation.supervised)]
    )[0]
    assert list(map(comparable, stripping.encode([conversation])[0])) == list(
        map(comparable, expected)
    )


def comparable(found: Sample | Drop) -> Drop | tuple[bytes, bytes]:
    return (
        found if isinstance(found, Drop) else (found.tokens.tobytes(), found.supervised.tobytes())
    )
