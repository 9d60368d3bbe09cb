"""A model whose tokenizer or template transformers reads otherwise is refused on arrival."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer
from transformers.activations import get_activation

from pipeline_lib.core.errors import DataError
from pipeline_lib.core.files import read_json, write_json
from pipeline_lib.data.agreement import _TAKEN, refuse_differences
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


SEES_TORCH = """
import sys
from pathlib import Path
from pipeline_lib.core.errors import DataError
from pipeline_lib.data.agreement import _Both
try:
    _Both.load(Path(sys.argv[1]), Path(sys.argv[1]))
    print("taken")
except DataError as error:
    print(error)
print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("key", "value", "said", "loads_torch"),
    [
        ("hidden_act", "silu", "taken", False),
        ("hidden_act", "mish", "taken", True),
        ("dtype", "float7", "float7", True),
    ],
)
def test_torch_is_asked_only_of_what_is_not_known(
    model: Path, key: str, value: str, said: str, loads_torch: bool
) -> None:
    write_json(model / "config.json", {**read_json(model / "config.json"), key: value})
    command = [sys.executable, "-c", SEES_TORCH, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told, loaded = done.stdout.splitlines()
    assert said in told
    assert loaded == str(loads_torch)


def test_what_is_known_is_taken_by_transformers() -> None:
    for activation in _TAKEN["hidden_act"]:
        get_activation(activation)  # type: ignore[no-untyped-call]
    assert all(hasattr(torch, dtype) for dtype in _TAKEN["dtype"] if dtype)


@pytest.mark.parametrize("template", ["hybrid", "r1-distill", "none"])
def test_a_model_as_it_is_saved_agrees(model: Path, template: str) -> None:
    set_template(model, TEMPLATES[template])
    refuse_differences(model)


def test_templates_by_name_are_rendered_as_by_transformers(model: Path) -> None:
    add_named(model)
    refuse_differences(model)
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
    entry = {
        "content": "<|new|>",
        "special": True,
        "normalized": False,
        "lstrip": False,
        "rstrip": False,
    }
    added = {**config.get("added_tokens_decoder", {}), str(number): {**entry, "single_word": False}}
    write_json(model / "tokenizer_config.json", {**config, "added_tokens_decoder": added})
    with pytest.raises(DataError, match="gives other ids than transformers"):
        refuse_differences(model)


def test_files_that_only_transformers_reads_are_compared_where_they_are(
    model: Path, tmp_path: Path
) -> None:
    taken = Path(shutil.copytree(model, tmp_path / "taken"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<|late|>", special=True, normalized=False)])
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(DataError, match="gives other ids than transformers"):
        refuse_differences(taken, model)


def test_a_template_that_never_ends_is_ended(model: Path) -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (model / "chat_template.jinja").write_text(loop)
    with pytest.raises(DataError, match=r"more than 0\.5 s of CPU time"):
        refuse_differences(model, limits=Limits(cpu_s=0.5))
