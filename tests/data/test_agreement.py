"""A model whose tokenizer or template is not the one that transformers has of its folder is refused when it arrives."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.data.agreement import refuse_other_tokens
from pipeline_lib.data.chat_template import ChatTemplate
from pipeline_lib.data.pool import Limits

from .chats import QUESTION, TEMPLATES, TOOL, set_template
from .conftest import Pipeline

TOOL_USE = "With tools: {{ tools | tojson }}" + TEMPLATES["hybrid"]


@pytest.fixture
def model(tiny_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_folder, tmp_path / "model"))


def add_named(folder: Path, name: str = "tool_use") -> None:
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / f"{name}.jinja").write_text(TOOL_USE)


@pytest.mark.parametrize("template", ["hybrid", "r1-distill", "none"])
def test_a_model_as_it_is_saved_agrees(model: Path, template: str) -> None:
    set_template(model, TEMPLATES[template])
    refuse_other_tokens(model)


def test_templates_by_name_are_rendered_as_by_transformers(model: Path) -> None:
    add_named(model)
    refuse_other_tokens(model)
    reference: Any = AutoTokenizer.from_pretrained(model).apply_chat_template
    for tools in (None, [TOOL]):
        text = ChatTemplate.load(model).render([QUESTION], tools)
        assert text == reference([QUESTION], tools=tools, tokenize=False)
        assert text.startswith("With tools") == (tools is not None)


def test_templates_by_name_come_along(model: Path, pipeline: Pipeline, tmp_path: Path) -> None:
    add_named(model)
    rows = tmp_path / "rows.jsonl"
    row = {"messages": [QUESTION, {"role": "assistant", "content": "Fine."}], "tools": [TOOL]}
    rows.write_text("".join(json.dumps(row) + "\n" for _ in range(9)))
    pipeline.model = model
    source = {"source": "file", "path": str(rows)}
    sizes: dict[str, Any] = {"tokenize": {"max_tokens": 512}, "shard": {"block_tokens": 512}}
    config = pipeline.compile(data=[source], train={"global_batch_tokens": 512}, **sizes)
    made = pipeline.run(config, "tokenize")
    assert "additional_chat_templates/tool_use.jinja" in made["model"].manifest.files
    preview = json.loads((made["tokenize"].path / "preview.json").read_text())
    assert preview[0]["pieces"][0]["text"].startswith("With tools")


def test_tokens_that_stand_in_another_file_alone_are_refused(model: Path) -> None:
    """Transformers adds them from tokenizer_config.json."""
    config = read_json(model / "tokenizer_config.json")
    number = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    entry = {"content": "<|new|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}
    added = {**config.get("added_tokens_decoder", {}), str(number): {**entry, "single_word": False}}
    write_json(model / "tokenizer_config.json", {**config, "added_tokens_decoder": added})
    with pytest.raises(DataError, match="gives other ids than transformers"):
        refuse_other_tokens(model)


def test_files_that_only_transformers_reads_are_compared_where_they_are(model: Path, tmp_path: Path) -> None:
    taken = Path(shutil.copytree(model, tmp_path / "taken"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<|late|>", special=True, normalized=False)])
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(DataError, match="gives other ids than transformers"):
        refuse_other_tokens(taken, model)


def test_a_template_that_never_ends_is_ended(model: Path) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (model / "chat_template.jinja").write_text(loop)
    with pytest.raises(DataError, match=r"more than 0\.5 s of CPU time"):
        refuse_other_tokens(model, limits=Limits(cpu_s=0.5))
