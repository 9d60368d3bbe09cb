import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from pipeline_lib.config.schema import TinyModel
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import list_files, read_json, sha256_file
from pipeline_lib.data.chat_template import ChatTemplate
from pipeline_lib.data.tiny_model import build_tiny
from pipeline_lib.data.tiny_tokenizer import MARKS

from .chats import ANSWER, QUESTION, RAINY, REASONED, SUNNY, SYSTEM, THOUGHTFUL, TOOL, call
from .conftest import SMALL, silent

FILES = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


def load(folder: Path) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model, report = loaded
    assert not any(report.values()), report
    assert isinstance(model, Qwen3ForCausalLM)
    return model


def test_transformers_loads_all_of_it_and_would_save_the_same_config(
    tiny_folder: Path, tmp_path: Path
) -> None:
    assert list_files(tiny_folder) == FILES
    model = load(tiny_folder)
    assert model.dtype == torch.float32
    assert model.config.tie_word_embeddings and model.config.num_key_value_heads == 1
    assert model.config.intermediate_size == 128  # 3 * 32, rounded up to a multiple of 64
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(20)[None]).logits).all()
    model.save_pretrained(tmp_path)
    saved = read_json(tmp_path / "config.json")
    saved.pop("transformers_version")
    assert saved == read_json(tiny_folder / "config.json")


def test_it_generates_and_knows_where_to_stop(tiny_folder: Path) -> None:
    model = load(tiny_folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_folder)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, tokenizer.pad_token_id]
    assert (
        model.generation_config.pad_token_id == model.config.pad_token_id == tokenizer.pad_token_id
    )
    assert model.config.eos_token_id == tokenizer.eos_token_id
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    assert (
        model.generate(**inputs, max_new_tokens=4, do_sample=False).shape[1]
        <= inputs["input_ids"].shape[1] + 4
    )


@pytest.mark.parametrize(
    "text",
    ["import os\n\n\nprint(1234)", "e\u0301 caf\u00e9 你好 \U0001f600", "  a\r\n\t b ", "I'm"],
)
def test_the_trained_tokenizer_loses_nothing_but_the_form_of_accents(
    tiny_folder: Path, text: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text.replace("e\u0301", "\u00e9")
    assert all(len(tokenizer.tokenize(digit)) == 1 for digit in "0123456789")
    assert len(tokenizer.tokenize("1234")) == 4


def test_the_marks_of_the_template_are_tokens_but_no_control_tokens(tiny_folder: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_folder)
    ids = tokenizer("".join(MARKS))["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == MARKS
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(MARKS)
    assert max(ids) < SMALL.vocab_tokens == len(tokenizer)


def test_its_template_knows_tools_and_thinking(tiny_folder: Path) -> None:
    made = [call(place="Bonn"), call(place="北京")]
    messages = [
        SYSTEM,
        QUESTION,
        THOUGHTFUL,
        QUESTION,
        {**REASONED, "tool_calls": made},
        SUNNY,
        RAINY,
        ANSWER,
    ]
    text = ChatTemplate.load(tiny_folder).render(
        messages, [TOOL], add_generation_prompt=True, enable_thinking=False
    )
    system, first, answer, second, calls, results, last, prompt, *rest = text.split("<|im_start|>")[
        1:
    ]
    assert not rest and system.startswith("system\nBe brief.\n\n") and json.dumps(TOOL) in system
    # thought away
    assert (first, answer) == ("user\nHow are you?<|im_end|>\n", "assistant\nFine.<|im_end|>\n")
    assert second == first and calls.startswith(
        "assistant\n<think>\nThey ask.\n</think>\n\nFine.\n<tool_call>\n"
    )
    assert [
        json.loads(part.split("\n</tool_call>")[0]) for part in calls.split("<tool_call>\n")[1:]
    ] == [one["function"] for one in made]
    responses = [
        f"<tool_response>\n{message['content']}\n</tool_response>" for message in (SUNNY, RAINY)
    ]
    assert results == "user\n" + "\n".join(responses) + "<|im_end|>\n"
    assert last == "assistant\n<think>\n\n</think>\n\nFine, 谢谢!<|im_end|>\n"
    assert prompt == "assistant\n<think>\n\n</think>\n\n"


def test_it_is_the_same_every_time_and_another_seed_makes_other_weights(
    tiny_folder: Path, tmp_path: Path
) -> None:
    for name, seed in (("again", SMALL.seed), ("other", 1)):
        (tmp_path / name).mkdir()
        build_tiny(SMALL.model_copy(update={"seed": seed}), tmp_path / name, silent)
    again, other = tmp_path / "again", tmp_path / "other"
    assert [sha256_file(again / name) for name in FILES] == [
        sha256_file(tiny_folder / name) for name in FILES
    ]
    name = "model.layers.0.self_attn.q_proj.weight"
    first, second = (
        load_file(folder / "model.safetensors")[name] for folder in (tiny_folder, other)
    )
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.15


def test_the_weights_are_distributed_as_a_normal_initialisation(tiny_folder: Path) -> None:
    weights = load_file(tiny_folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].astype(np.float64) / 0.02
    assert abs(embedding.mean()) < 0.03 and abs(embedding.std() - 1) < 0.03
    assert abs((embedding**4).mean() - 3) < 0.3 and np.abs(embedding).max() < 6
    assert (weights["model.norm.weight"] == 1).all()
    layers = [weights[f"model.layers.{number}.mlp.up_proj.weight"].ravel() for number in range(2)]
    assert abs(np.corrcoef(layers[0], layers[1])[0, 1]) < 0.1


def test_the_default_is_about_a_million_parameters(tmp_path: Path) -> None:
    build_tiny(TinyModel(source="tiny"), tmp_path, silent)
    model = load(tmp_path)
    assert 0.9e6 < model.num_parameters() < 1.1e6
    assert model.config.vocab_size == 2048 == len(AutoTokenizer.from_pretrained(tmp_path))


def test_it_is_built_around_a_real_vocabulary(qwen_folder: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(qwen_folder / name, tmp_path / name)
    build_tiny(SMALL.model_copy(update={"hidden_size": 16}), tmp_path, silent)
    model, tokenizer = load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 151_669
    assert model.config.vocab_size == 151_680  # the next multiple of 128
    assert model.generation_config.eos_token_id == [151_645, 151_643]


def test_a_tokenizer_without_an_end_token_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    shutil.copyfile(tiny_folder / "tokenizer.json", tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"pad_token": "<|endoftext|>", "eos_token": "<nope>"})
    )
    with pytest.raises(DataError, match="names no eos_token that the tokenizer has"):
        build_tiny(SMALL, tmp_path, silent)
