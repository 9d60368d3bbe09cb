"""What the models are asked: as they were trained, and no more than users will give them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.config.schema import Tokenize
from pipeline_lib.data.conversations import Conversation, Message
from pipeline_lib.data.documents import Document, prompt_length, question
from pipeline_lib.data.encode import Encoder, Sample, load_tokenizer
from pipeline_lib.data.how_to_call import trained_modes
from pipeline_lib.evaluate.answers import GREEDY, Context, answers_to, generate, rendered
from pipeline_lib.evaluate.loading import load_to_answer
from pipeline_lib.export.merge import stop_at_end_of_turn
from pipeline_lib.plan.evaluation import Answers, answer_bytes
from tests.data.chats import FAMILIES, change_template
from tests.families import FAMILIES as FAMILIES_OF_MODELS
from tests.families import write_family

ASKED: Message = {"role": "user", "content": "17*3?"}
EMPTY_BLOCK = "assistant\n<think>\n\n</think>\n\n"
TOOL = '{"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}'


def encoded(tiny: Path, answer: Message, **settings: str) -> tuple[Document, Tokenizer]:
    encoder = Encoder(tiny, Tokenize.model_validate({"max_tokens": 512, **settings}))
    sample = encoder.encode([Conversation([ASKED, answer], None, (1,))])[0][-1]
    assert isinstance(sample, Sample)
    document = Document(np.array(sample.tokens, np.int32), np.array(sample.supervised, np.bool_))
    return document, load_tokenizer(tiny)


@pytest.mark.parametrize(
    ("thinking", "is_cut"), [("mask", True), ("keep", False), ("strip", False)]
)
def test_masked_thinking_of_the_reference_is_not_given(
    tiny: Path, thinking: str, is_cut: bool
) -> None:
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
        (
            {"thinking_off": 1, "thinking_on": 9},
            "on",
            EMPTY_BLOCK,
        ),  # of both, as it was before either was counted
        ({}, None, EMPTY_BLOCK),
    ],
)
def test_prompts_are_asked_with_the_switch_that_was_trained(
    tiny: Path, prompts: dict[str, int], default: str | None, asked: str
) -> None:
    (text,) = rendered(
        tiny, ["Who are you?"], Context.of({}, trained_modes(prompts, default)), print
    )
    assert text.endswith(asked)


def test_prompts_are_asked_with_the_variables_that_were_trained(tiny: Path, tmp_path: Path) -> None:
    folder = change_template(tiny, tmp_path, FAMILIES["qwen3.8"])
    modes = trained_modes({"thinking_on": 9}, "on")
    for kwargs, begins in (({"reasoning_effort": "low"}, "low"), ({}, "xhigh")):
        context = Context.of({"chat_template_kwargs": kwargs}, modes)
        (text,) = rendered(folder, ["Who are you?"], context, print)
        assert text.startswith(f"<|im_start|>system\nEffort: {begins}\n") and text.endswith(
            "assistant\n<think>\n"
        )


def test_without_a_template_texts_are_continued_and_the_merge_changes_no_stop(
    tmp_path: Path, tiny: Path
) -> None:
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        json.dumps(
            {k: v for k, v in json.loads(config.read_text()).items() if k != "chat_template"}
        )
    )
    assert rendered(tmp_path, ["Once"], Context(system="unused"), print) == ["Once"]
    assert stop_at_end_of_turn({"eos_token_id": 0}, tmp_path) == {"eos_token_id": 0}


def test_a_template_that_fails_leaves_prompts_as_they_are(tiny: Path, tmp_path: Path) -> None:
    """The model was trained on raw text, which needs none; a late evaluation does not fail.

    Late is after hours.
    """
    folder = change_template(tiny, tmp_path, "{{ raise_exception('not today') }}")
    said = list[str]()
    assert rendered(folder, ["Once"], Context(), said.append) == ["Once"]
    assert "not today" in said[0]


def test_one_answer_is_taken_however_many_a_model_gives_by_itself(tiny: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(tiny)
    model.generation_config = GenerationConfig.from_dict(
        {"do_sample": True, "num_return_sequences": 2}
    )
    (answer,) = answers_to(model, load_tokenizer(tiny), [[3, 4, 5]], 1, read_geometry(tiny))
    assert isinstance(answer, str)


PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 9, 10, 9, 300], [11], list(range(20, 110)), [4, 4, 4, 9]]
NEW_TOKENS = 12


def counted(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list that will get the number of prompts of each batch the model is asked."""
    rows: list[int] = []
    generate = model.generate

    def count(tokens: Tensor, **options: Any) -> Tensor:
        rows.append(len(tokens))
        found: Tensor = generate(tokens, **options)
        return found

    monkeypatch.setattr(model, "generate", count)
    return rows


# The first is what transformers writes for a model without a generation config.
@pytest.mark.parametrize(
    "settings",
    [{"output_attentions": False}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES_OF_MODELS)
def test_answers_of_a_batch_are_those_of_each_prompt_by_itself(
    tmp_path: Path, family: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32. One of them ends early.

    What forbids n-grams would see those of the padding, and is asked one by one.
    """
    folder = write_family(tmp_path / "model", family, "instruct-2507")
    model: Any = load_to_answer(folder, Answers("cpu", 0, 5, NEW_TOKENS, 5, NEW_TOKENS))
    model.generation_config = GenerationConfig.from_dict(settings)
    (free,) = generate(model, [PROMPTS[1]], NEW_TOKENS, **GREEDY)
    model.generation_config.eos_token_id = [free[NEW_TOKENS // 2]]
    alone = [generate(model, [prompt], NEW_TOKENS, **GREEDY)[0] for prompt in PROMPTS]
    assert len(alone[1]) <= NEW_TOKENS // 2 + 1
    assert max(map(len, alone)) == NEW_TOKENS
    assert len(set(map(tuple, alone))) == len(PROMPTS)

    if "no_repeat_ngram_size" not in settings:
        assert generate(model, PROMPTS, NEW_TOKENS, **GREEDY) == alone
    tokenizer, rows = load_tokenizer(folder), counted(model, monkeypatch)
    texts = answers_to(model, tokenizer, PROMPTS, NEW_TOKENS, read_geometry(folder))
    assert texts == [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in alone]
    assert rows == ([1] * len(PROMPTS) if "no_repeat_ngram_size" in settings else [len(PROMPTS)])


def test_a_batch_has_as_many_prompts_as_have_room(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest is asked by itself, and the others together."""
    geometry = read_geometry(tiny)
    model: Any = load_to_answer(tiny, Answers("cpu", 0, 5, NEW_TOKENS, 5, NEW_TOKENS))
    room_bytes = answer_bytes(geometry, 90, NEW_TOKENS, 4)
    assert 4 * answer_bytes(geometry, 9, NEW_TOKENS, 4) < room_bytes
    expected = answers_to(model, load_tokenizer(tiny), PROMPTS, NEW_TOKENS, geometry)
    monkeypatch.setattr("pipeline_lib.evaluate.answers.host_free_bytes", lambda: 2 * room_bytes)
    rows = counted(model, monkeypatch)
    assert answers_to(model, load_tokenizer(tiny), PROMPTS, NEW_TOKENS, geometry) == expected
    assert rows == [1, 4]


def test_attention_is_not_planned_anew_for_each_length(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = load_to_answer(tiny, Answers("cpu", 0, 1, NEW_TOKENS, 1, NEW_TOKENS))
    forward, seen = model.forward, set[bool]()
    uses_cudnn: Callable[[], bool] = torch.backends.cuda.cudnn_sdp_enabled

    def seeing(*arguments: Any, **options: Any) -> Any:
        seen.add(uses_cudnn())
        return forward(*arguments, **options)

    before = uses_cudnn()
    monkeypatch.setattr(model, "forward", seeing)
    generate(model, [[3, 4, 5]], NEW_TOKENS, **GREEDY)
    assert seen == {False}
    assert uses_cudnn() == before
