"""The merge stage refuses what is not the trained model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from pipeline_lib.core.errors import TrainingError
from pipeline_lib.data.pool import Limits
from pipeline_lib.export.merge import stop_at_end_of_turn
from pipeline_lib.export.proof import judge


def test_logits_that_differ_are_refused_with_the_figures() -> None:
    expected = torch.randn(4, 10)
    assert judge(expected + 1e-6, expected, 1e-4, has_experts=False)["relative_difference"] < 1e-4
    with pytest.raises(
        TrainingError, match="logits differ by .* at 4 of 4 by more than the tolerance, 1e-04"
    ):
        judge(expected * 1.01, expected, 1e-4, has_experts=True)
    with pytest.raises(TrainingError, match="logits differ by nan"):
        judge(expected * float("nan"), expected, 1e-4, has_experts=True)
    with pytest.raises(TrainingError, match="shape"):
        judge(expected[:2], expected, 1e-4, has_experts=False)


def test_positions_at_which_other_experts_were_chosen_are_judged_apart() -> None:
    expected = torch.randn(9, 10)
    found = expected + 1e-6
    found[:2] += 0.05 * expected[:2].norm(dim=1, keepdim=True) / 10**0.5
    figures = judge(found, expected, 1e-4, has_experts=True)
    assert figures["positions_apart"] == 2
    assert figures["relative_difference"] < 1e-5
    with pytest.raises(TrainingError, match="at 2 of 9"):
        judge(found, expected, 1e-4, has_experts=False)
    found[0] = -expected[0]
    with pytest.raises(TrainingError, match=r"differ by 2\.0"):
        judge(found, expected, 1e-4, has_experts=True)


@pytest.mark.parametrize("stops", [None, 0, [0]])
def test_generation_stops_where_turns_end(tiny: Path, stops: object) -> None:
    """Qwen3-Base names only <|endoftext|> (0 here); the tuned model ends turns with <|im_end|>."""
    config = json.loads((tiny / "generation_config.json").read_text())
    end = Tokenizer.from_file(str(tiny / "tokenizer.json")).token_to_id("<|im_end|>")
    assert end in config["eos_token_id"]
    assert stop_at_end_of_turn(config, tiny) == config
    config.pop("eos_token_id")
    config = {**config, "eos_token_id": stops} if stops is not None else config
    assert stop_at_end_of_turn(config, tiny)["eos_token_id"] == [
        end,
        *([0] if stops is not None else []),
    ]


def test_a_template_that_never_ends_changes_no_stop(tmp_path: Path, tiny: Path) -> None:
    """No conversation is trained with it, and raw text needs none."""
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(loop)
    assert stop_at_end_of_turn({"eos_token_id": 0}, tmp_path, Limits(cpu_s=0.5)) == {
        "eos_token_id": 0
    }
