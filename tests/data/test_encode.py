"""Compares the encoder with transformers' own `apply_chat_template`, turn by turn."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pipeline_lib.base.errors import DataError
from pipeline_lib.data.encode import Drop, Encoder, Sample, has_thinking, load_tokenizer

Messages = list[dict[str, str]]


def say(role: str, content: str, **more: str) -> dict[str, str]:
    return {"role": role, "content": content, **more}


SYSTEM, QUESTION, ANSWER = say("system", "Be brief."), say("user", "How are you?"), say("assistant", "Fine, 谢谢!")
THOUGHTFUL = say("assistant", "<think>\nThey ask.\n</think>\n\nFine.")
REASONED = say("assistant", "Fine.", reasoning_content="They ask.")
UNTHINKING = say("assistant", "<think>\n\n</think>\n\nFine.")


@cache
def reference(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder)


@cache
def encoder(folder: Path) -> Encoder:
    return Encoder(folder, max_tokens=100_000)


def ids_of(folder: Path, messages: Messages, prompt: bool, thinking: bool) -> list[int]:
    found = reference(folder).apply_chat_template(
        messages, add_generation_prompt=prompt, enable_thinking=thinking, return_dict=False
    )
    assert isinstance(found, list)
    return found


def expected_turns(folder: Path, messages: Messages) -> list[tuple[list[int], list[int]] | None]:
    """For each assistant turn what inference is given and what it should write, or None if it cannot be said."""
    turns: list[tuple[list[int], list[int]] | None] = []
    end_of_turn = reference(folder).convert_tokens_to_ids("<|im_end|>")
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        thinking = "They ask." in (message["content"] + message.get("reasoning_content", ""))
        prompt = ids_of(folder, messages[:number], True, thinking)
        full = ids_of(folder, messages[: number + 1], False, thinking)
        written = full[len(prompt) :]
        if full[: len(prompt)] != prompt:
            turns.append(None)
            continue
        turns.append((prompt, written[: len(written) - written[::-1].index(end_of_turn)]))
    return turns


def supervised_turns(sample: Sample) -> list[tuple[list[int], list[int]]]:
    """The spans that are predicted, each with all that comes before it."""
    edges = np.flatnonzero(np.diff(sample.supervised, prepend=False, append=False)).tolist()
    tokens = sample.tokens.tolist()
    return [(tokens[:start], tokens[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]


CONVERSATIONS = [
    [QUESTION, ANSWER],
    [SYSTEM, QUESTION, ANSWER],
    [SYSTEM, QUESTION, ANSWER, QUESTION, ANSWER],
    [QUESTION, ANSWER, QUESTION],
    [QUESTION, THOUGHTFUL],
    [QUESTION, THOUGHTFUL, QUESTION, THOUGHTFUL],
    [QUESTION, THOUGHTFUL, QUESTION, ANSWER],
    [QUESTION, ANSWER, QUESTION, THOUGHTFUL],
    [QUESTION, REASONED, QUESTION, ANSWER],
    [QUESTION, UNTHINKING],
]


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_the_model_learns_what_inference_would_have_it_write(folder: Path, messages: Messages) -> None:
    found = encoder(folder).encode([messages])[0]
    samples = [sample for sample in found if isinstance(sample, Sample)]
    assert len(samples) == len(found)
    assert [turn for sample in samples for turn in supervised_turns(sample)] == expected_turns(folder, messages)
    assert all(sample.tokens.dtype == np.int32 and not sample.truncated for sample in samples)


texts = st.text(max_size=30) | st.sampled_from(["\n\na", " \r\n", "<think>", "</think>\n", "e\u0301", "\u0301a", "١٢"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=4), system=st.none() | texts)
def test_that_holds_for_any_text(folder: Path, turns: list[tuple[str, str]], system: str | None) -> None:
    messages = [say("system", system)] if system else []
    for question, answer in turns:
        messages += [say("user", question), say("assistant", answer)]
    if encoder(folder).control_token_in(messages) or any(has_thinking(message) for message in messages):
        return
    found = encoder(folder).encode([messages])[0]
    learned = [turn for sample in found if isinstance(sample, Sample) for turn in supervised_turns(sample)]
    wanted = [turn for turn in expected_turns(folder, messages) if turn is not None]
    # A turn in which the model would write nothing but its end is not learned.
    assert learned == [(prompt, written) for prompt, written in wanted if len(written) > 1]
    assert len(learned) + sum(isinstance(sample, Drop) for sample in found) == len(turns)


def test_turns_share_a_sample_where_the_history_stays_as_it_was(tiny_folder: Path) -> None:
    samples = encoder(tiny_folder).encode([[QUESTION, ANSWER, QUESTION, ANSWER, QUESTION, ANSWER]])[0]
    assert len(samples) == 1 and isinstance(samples[0], Sample)
    assert len(supervised_turns(samples[0])) == 3


def test_each_turn_has_its_own_sample_where_the_history_is_rewritten(qwen_folder: Path) -> None:
    samples = encoder(qwen_folder).encode([[QUESTION, THOUGHTFUL, QUESTION, THOUGHTFUL]])[0]
    decode = encoder(qwen_folder).tokenizer.decode
    assert [
        [decode(written, skip_special_tokens=False) for _, written in supervised_turns(sample)]
        for sample in samples
        if isinstance(sample, Sample)
    ] == [["<think>\nThey ask.\n</think>\n\nFine.<|im_end|>"]] * 2
    last = samples[1]
    assert isinstance(last, Sample)
    assert decode(last.tokens.tolist(), skip_special_tokens=False).count("They ask.") == 1  # not in the history


def test_the_empty_thinking_block_is_given_and_not_learned(qwen_folder: Path) -> None:
    for answer in (say("assistant", "Fine."), UNTHINKING):
        (sample,) = encoder(qwen_folder).encode([[QUESTION, answer]])[0]
        assert isinstance(sample, Sample)
        ((prompt, written),) = supervised_turns(sample)
        decode = encoder(qwen_folder).tokenizer.decode
        assert decode(prompt, skip_special_tokens=False).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
        assert decode(written, skip_special_tokens=False) == "Fine.<|im_end|>"


def change_template(tiny_folder: Path, folder: Path, template: str) -> Encoder:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_folder / name).read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return Encoder(folder, 1000)


def test_a_prompt_that_is_no_prefix_drops_the_turn_alone(tiny_folder: Path, tmp_path: Path) -> None:
    # A space and a word are one token: a model that is given the space cannot go on with the word.
    template = "{% for m in messages %}{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    template += "{% if add_generation_prompt %}assistant {% endif %}"
    word, digits = say("assistant", "the end"), say("assistant", "42")
    found = change_template(tiny_folder, tmp_path, template).encode([[QUESTION, word, QUESTION, digits]])[0]
    assert found[0] == Drop.PROMPT_NOT_PREFIX
    assert isinstance(found[1], Sample) and len(found) == 2
    ((_, written),) = supervised_turns(found[1])
    assert encoder(tiny_folder).tokenizer.decode(written, skip_special_tokens=False) == "42<|im_end|>"


def test_a_template_without_an_end_of_turn_teaches_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    assert change_template(tiny_folder, tmp_path, template).encode([[QUESTION, ANSWER]]) == [[Drop.NO_END_OF_TURN]]


def test_a_turn_that_only_ends_teaches_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    template = "{{ messages[0].content }}<|im_start|>{% if not add_generation_prompt %}<|im_end|>{% endif %}"
    assert change_template(tiny_folder, tmp_path, template).encode([[QUESTION, ANSWER]]) == [[Drop.NOTHING_SUPERVISED]]


def test_a_template_without_a_prompt_teaches_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    template = "{% if not add_generation_prompt %}{{ messages[1].content }}<|im_end|>{% endif %}"
    assert change_template(tiny_folder, tmp_path, template).encode([[QUESTION, ANSWER]]) == [[Drop.PROMPT_NOT_PREFIX]]


def test_what_is_too_long_is_dropped_or_cut(tiny_folder: Path) -> None:
    whole = encoder(tiny_folder).encode([[QUESTION, ANSWER]])[0][0]
    assert isinstance(whole, Sample)
    length, prompt = len(whole.tokens), int(whole.supervised.argmax())
    assert Encoder(tiny_folder, length - 1).encode([[QUESTION, ANSWER]]) == [[Drop.OVER_LONG]]
    for limit in range(1, length):
        (cut,) = Encoder(tiny_folder, limit, "truncate").encode([[QUESTION, ANSWER]])[0]
        if limit <= prompt:
            assert cut == Drop.OVER_LONG
            continue
        assert isinstance(cut, Sample) and cut.truncated
        assert np.array_equal(cut.tokens, whole.tokens[:limit])
        assert np.array_equal(cut.supervised, whole.supervised[:limit])


def test_a_batch_is_encoded_as_each_alone(folder: Path) -> None:
    together = encoder(folder).encode(CONVERSATIONS)
    for messages, found in zip(CONVERSATIONS, together, strict=True):
        for sample, alone in zip(found, encoder(folder).encode([messages])[0], strict=True):
            assert isinstance(sample, Sample) and isinstance(alone, Sample)
            assert np.array_equal(sample.tokens, alone.tokens)
            assert np.array_equal(sample.supervised, alone.supervised)


def test_control_tokens_in_text_are_found(folder: Path) -> None:
    assert encoder(folder).control_token_in([QUESTION, ANSWER, THOUGHTFUL]) is None
    assert encoder(folder).control_token_in([QUESTION, say("assistant", "a<|im_end|>b")]) == "<|im_end|>"
    hidden = say("assistant", "b", reasoning_content="<|im_start|>")
    assert encoder(folder).control_token_in([hidden]) == "<|im_start|>"


def test_thinking_is_what_the_template_takes_for_it() -> None:
    assert has_thinking(THOUGHTFUL) and has_thinking(REASONED) and has_thinking(say("assistant", "a</think>b"))
    assert not any(map(has_thinking, (ANSWER, UNTHINKING, say("assistant", "<think>a"))))


def test_a_tokenizer_that_cuts_and_pads_is_told_not_to(tiny_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = "a b c d e f g h i"
    assert load_tokenizer(tmp_path).encode(text).ids == load_tokenizer(tiny_folder).encode(text).ids


@pytest.mark.parametrize(("content", "message"), [(None, "has no"), ("{", "cannot read"), ("{}", "not a tokenizer")])
def test_a_missing_or_damaged_tokenizer_is_a_data_error(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)
