"""The merge stage refuses what is not the trained model."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from pipeline_lib.config.schema import TinyModel
from pipeline_lib.core.errors import DataError, TrainingError
from pipeline_lib.data.demo import build_tiny
from pipeline_lib.data.pool import Limits
from pipeline_lib.export.merge import judge, stop_at_end_of_turn, stored_dtype
from tests.train.conftest import write_model


def test_logits_that_differ_are_refused_with_the_figures() -> None:
    expected = torch.randn(4, 10)
    assert judge(expected + 1e-6, expected, 1e-4)["relative_difference"] < 1e-4
    with pytest.raises(TrainingError, match="logits differ by .* tolerance 1e-04; nothing was published"):
        judge(expected * 1.01, expected, 1e-4)
    with pytest.raises(TrainingError, match="logits differ by nan"):
        judge(expected * float("nan"), expected, 1e-4)
    with pytest.raises(TrainingError, match="shape"):
        judge(expected[:2], expected, 1e-4)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_model(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("stops", [None, 0, [0]])
def test_generation_stops_where_turns_end(tmp_path: Path, stops: object) -> None:
    """Qwen3-Base names only <|endoftext|> (0 here); the tuned model ends its turns with <|im_end|>."""
    build_tiny(TinyModel(source="tiny", vocab_tokens=512, hidden_size=32, layers=1), tmp_path, lambda _: None)
    path = tmp_path / "generation_config.json"
    config = json.loads(path.read_text())
    end = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("<|im_end|>")
    assert end in config["eos_token_id"]
    config.pop("eos_token_id")
    config = {**config, "eos_token_id": stops} if stops is not None else config
    assert stop_at_end_of_turn(config, tmp_path)["eos_token_id"] == [end, *([0] if stops is not None else [])]


def test_a_template_that_never_ends_is_one_clear_error(tmp_path: Path) -> None:
    build_tiny(TinyModel(source="tiny", vocab_tokens=512, hidden_size=32, layers=1), tmp_path, lambda _: None)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(loop)
    with pytest.raises(DataError, match="rendering the chat template of .*: more than 0.5 s of CPU time"):
        stop_at_end_of_turn({}, tmp_path, Limits(cpu_s=0.5))


def test_the_exported_precision_is_the_base_models(base: Path) -> None:
    assert stored_dtype(base) == torch.float32
    config = base / "config.json"
    config.write_text(config.read_text().replace('"float32"', '"bfloat16"'))
    assert stored_dtype(base) == torch.bfloat16
