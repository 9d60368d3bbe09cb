"""Each family of models and each published template goes through all stages; full and LoRA in turn.

The stages run one after the other in a process that has the slow imports behind it, and the
training is its one rank.
"""

import json
import shutil
from itertools import chain, cycle
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pipeline_lib.config.schema import FileData, Tokenize
from pipeline_lib.data.encode import Encoder, Sample
from pipeline_lib.data.layouts import layout_of, to_content
from pipeline_lib.data.model_folder import problems_of
from tests.data.chats import NO_TEMPLATE, TEMPLATES, TEXT_ONLY, set_template
from tests.families import FAMILIES, run_family, write_family, write_rows
from tests.ranks import run_ranks

# Each family and each template once; the methods alternate.
PAIRS = {
    "instruct-2507": "qwen3",
    "thinking-2507": "qwen3-moe",
    "qwen2.5": "qwen2.5",
    "qwen3.5": "qwen3.5",
    "hybrid": "qwen3.5-moe",
    "r1-distill": "qwen2.5",
    "chatml": "qwen2",
    "no generation prompt": "qwen3",
    NO_TEMPLATE: "qwen3-moe",
}
WALKS = list(zip(PAIRS, cycle(("full", "lora")), strict=False))
WALKS.append(("qwen3.5", "muon"))  # orthogonal updates for matrices of a delta rule


def test_each_family_and_each_template_is_among_the_pairs() -> None:
    assert PAIRS.keys() == TEMPLATES.keys()
    assert set(PAIRS.values()) == set(FAMILIES)


@pytest.mark.parametrize(("template", "method"), WALKS)
def test_it_goes_through_all_stages(template: str, method: str, tmp_path: Path) -> None:
    base = write_family(tmp_path / "base", PAIRS[template], template)
    walked = run_ranks(run_family, 1, tmp_path, base, template, method, timeout_s=900.0)
    (merged,) = walked.values()
    weights = [
        load_file(file) for file in (base / "model.safetensors", merged / "model.safetensors")
    ]
    assert weights[0].keys() == weights[1].keys()
    assert any(not weights[0][name].equal(weights[1][name]) for name in weights[0])
    tokenizer = AutoTokenizer.from_pretrained(merged)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(base).chat_template
    stops = GenerationConfig.from_pretrained(merged).eos_token_id
    if template not in TEXT_ONLY:
        assert tokenizer.convert_tokens_to_ids("<|im_end|>") in stops
    parity = json.loads((merged / "parity.json").read_text())
    assert parity["relative_difference"] <= parity["tolerance"]
    AutoModelForCausalLM.from_pretrained(merged)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of each family, in a folder of its name."""
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        write_family(root / family, family, "hybrid")
    return root


def two_families_each() -> list[tuple[str, str]]:
    """Each template with two families, and each family with three templates."""
    return [
        (family, name)
        for number, name in enumerate(TEMPLATES)
        for family in list(FAMILIES)[number % 3 :: 3]
    ]


@pytest.mark.parametrize(("family", "template"), two_families_each())
def test_each_family_is_tokenized_with_each_kind_of_template_and_ends_its_answers(
    families: Path, tmp_path: Path, family: str, template: str
) -> None:
    folder = Path(shutil.copytree(families / family, tmp_path / "model"))
    set_template(folder, TEMPLATES[template])
    assert problems_of(folder) == []
    state = Encoder(folder, Tokenize(), fast=False)
    lines = write_rows(tmp_path / "rows.jsonl", template).read_text().splitlines()
    contents = [
        to_content(row, layout_of(row, FileData(source="file", path="x")))
        for row in map(json.loads, lines)
    ]
    samples = chain.from_iterable(state.encode(contents))
    ends = {int(sample.tokens[-1]) if isinstance(sample, Sample) else sample for sample in samples}
    end = "<|endoftext|>" if template in TEXT_ONLY else "<|im_end|>"
    assert ends == {state.tokenizer.token_to_id(end)}
    assert template in TEXT_ONLY or {state.end_of_turn()} == ends
