"""What the models are asked: as they were trained, and no more than users will give them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

from pipeline_lib.config.schema import Evaluate, Tokenize
from pipeline_lib.data.chat_template import trained_modes
from pipeline_lib.data.conversations import Conversation, Message
from pipeline_lib.data.documents import Document, prompt_length, question
from pipeline_lib.data.encode import Encoder, Sample, load_tokenizer
from pipeline_lib.evaluate.answers import Context, answer_to, rendered
from pipeline_lib.export.merge import stop_at_end_of_turn
from tests.data.chats import FAMILIES, change_template

ASKED: Message = {"role": "user", "content": "17*3?"}
EMPTY_BLOCK = "assistant\n<think>\n\n</think>\n\n"
TOOL = '{"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}'


def encoded(tiny: Path, answer: Message, **settings: str) -> tuple[Document, Tokenizer]:
    encoder = Encoder(tiny, Tokenize.model_validate({"max_tokens": 512, **settings}))
    sample = encoder.encode([Conversation([ASKED, answer], None, (1,))])[0][-1]
    assert isinstance(sample, Sample)
    document = Document(np.array(sample.tokens, np.int32), np.array(sample.supervised, np.bool_))
    return document, load_tokenizer(tiny)


@pytest.mark.parametrize(("thinking", "is_cut"), [("mask", True), ("keep", False), ("strip", False)])
def test_masked_thinking_of_the_reference_is_not_given(tiny: Path, thinking: str, is_cut: bool) -> None:
    answer: Message = {"role": "assistant", "content": "51", "reasoning_content": "It is 51."}
    document, tokenizer = encoded(tiny, answer, thinking=thinking)
    asked = tokenizer.decode(question(document, tokenizer), skip_special_tokens=False)
    assert "It is 51" not in asked
    assert asked.endswith("<|im_start|>assistant\n") == (thinking != "strip")
    assert (len(question(document, tokenizer)) < prompt_length(document)) == is_cut


def test_an_empty_thinking_block_stays_since_inference_gives_it(tiny: Path) -> None:
    document, tokenizer = encoded(tiny, {"role": "assistant", "content": "51"}, thinking="mask")
    assert question(document, tokenizer) == document.tokens[: prompt_length(document)].tolist()


def test_prompts_are_asked_in_the_context_that_was_trained(tiny: Path) -> None:
    (plain,) = rendered(tiny, ["Who are you?"], Context(), print)
    assert "system" not in plain
    context = Context.of({"system": "You are Zhen Huan.", "tools": [TOOL]})
    (text,) = rendered(tiny, ["Who are you?"], context, print)
    assert text.startswith("<|im_start|>system\nYou are Zhen Huan.")
    assert '"name": "add"' in text
    assert text.endswith(plain)


@pytest.mark.parametrize(
    ("prompts", "default", "asked"),
    [
        ({"thinking_on": 9}, "on", "assistant\n"),
        ({"thinking_off": 9}, "on", EMPTY_BLOCK),
        ({"thinking_off": 1, "thinking_on": 9}, "on", EMPTY_BLOCK),  # of both, as it was before either was counted
        ({}, None, EMPTY_BLOCK),
    ],
)
def test_prompts_are_asked_with_the_switch_that_was_trained(
    tiny: Path, prompts: dict[str, int], default: str | None, asked: str
) -> None:
    (text,) = rendered(tiny, ["Who are you?"], Context.of({}, trained_modes(prompts, default)), print)
    assert text.endswith(asked)


def test_prompts_are_asked_with_the_variables_that_were_trained(tiny: Path, tmp_path: Path) -> None:
    folder, modes = change_template(tiny, tmp_path, FAMILIES["qwen3.8"]), trained_modes({"thinking_on": 9}, "on")
    for kwargs, begins in (({"reasoning_effort": "low"}, "low"), ({}, "xhigh")):
        context = Context.of({"chat_template_kwargs": kwargs}, modes)
        (text,) = rendered(folder, ["Who are you?"], context, print)
        assert text.startswith(f"<|im_start|>system\nEffort: {begins}\n") and text.endswith("assistant\n<think>\n")


def test_without_a_template_texts_are_continued_and_the_merge_changes_no_stop(tmp_path: Path, tiny: Path) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "chat_template"}))
    assert rendered(tmp_path, ["Once"], Context(system="unused"), print) == ["Once"]
    assert stop_at_end_of_turn({"eos_token_id": 0}, tmp_path) == {"eos_token_id": 0}


def test_a_template_that_fails_leaves_prompts_as_they_are(tiny: Path, tmp_path: Path) -> None:
    """The model was trained on raw text, which needs none; an evaluation after hours does not fail for it."""
    folder, said = change_template(tiny, tmp_path, "{{ raise_exception('not today') }}"), list[str]()
    assert rendered(folder, ["Once"], Context(), said.append) == ["Once"]
    assert "not today" in said[0]


def test_one_answer_is_taken_however_many_a_model_gives_by_itself(tiny: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny)
    model.generation_config = GenerationConfig.from_dict({"do_sample": True, "num_return_sequences": 2})
    assert isinstance(answer_to(model, load_tokenizer(tiny), [3, 4, 5], Evaluate(max_new_tokens=1)), str)
