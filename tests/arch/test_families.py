"""The table of published models against their makers' words and transformers' own classes."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline_lib.arch.families import PUBLISHED, geometry_in, published
from pipeline_lib.arch.geometry import EMBEDDING, HEAD

# Parameters in all, and without embedding and head, in billions: as model cards and blogs of Qwen
# give them.
CARDS: dict[str, tuple[float, float]] = {
    "Qwen/Qwen3-1.7B": (1.72, 1.41),
    "Qwen/Qwen3-4B": (4.0, 3.6),
    "Qwen/Qwen3-14B": (14.8, 13.2),
    "Qwen/Qwen3-32B": (32.8, 31.2),
    "Qwen/Qwen3-235B-A22B": (235, 234),
    "Qwen/Qwen2.5-1.5B": (1.54, 1.31),
    "Qwen/Qwen2.5-7B": (7.61, 6.53),
    "Qwen/Qwen2-72B": (72.71, 70.21),
}
# Exact counts that others read off the loaded checkpoints.
EXACT = {
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3.5-0.8B": 752_393_024,  # the text model, as the next
    "Qwen/Qwen3.5-2B": 1_881_825_088,
    "Qwen/Qwen2-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
}
POSITIONS = {
    "Qwen/Qwen3-8B": 40_960,
    "Qwen/Qwen3-8B-Base": 32_768,
    "Qwen/Qwen3-4B-Instruct-2507": 262_144,
    "Qwen/Qwen3-235B-A22B-Thinking-2507": 262_144,
    "Qwen/Qwen2.5-7B": 131_072,
    "Qwen/Qwen2.5-7B-Instruct": 32_768,
    "Qwen/Qwen2.5-3B": 32_768,
    "Qwen/Qwen2.5-Coder-7B": 32_768,
    "Qwen/Qwen2-7B": 131_072,
    "Qwen/Qwen2-7B-Instruct": 32_768,
}


def config_of(name: str) -> dict[str, Any]:
    config = published(name)
    assert config is not None
    return config


def test_parameters_are_those_of_the_model_card() -> None:
    for name, said in CARDS.items():
        geometry = geometry_in(config_of(name))
        ends = sum(
            geometry.vocab * geometry.hidden
            for each in (EMBEDDING, HEAD)
            if each in geometry.shapes()
        )
        found = [billions / 1e9 for billions in (geometry.parameters, geometry.parameters - ends)]
        assert found == pytest.approx(said, rel=0.012), name  # some cards cut off, and do not round


@pytest.mark.parametrize(
    ("name", "total", "activated"),
    [
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", 30.5, 3.3),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", 480, 35),
    ],
)
def test_so_are_those_that_a_token_activates(name: str, total: float, activated: float) -> None:
    geometry = geometry_in(config_of(name))
    embedding = geometry.vocab * geometry.hidden
    assert geometry.parameters / 1e9 == pytest.approx(total, rel=0.005)
    assert (geometry.matmul_parameters + embedding) / 1e9 == pytest.approx(activated, rel=0.02)
    assert geometry.max_positions == 262_144


def test_parameters_and_positions_are_those_that_were_published() -> None:
    assert {name: geometry_in(config_of(name)).parameters for name in EXACT} == EXACT
    assert {name: geometry_in(config_of(name)).max_positions for name in POSITIONS} == POSITIONS


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_makes_the_same_model_of_it(name: str) -> None:
    """A layer of each kind, to find keys of the table that transformers knows otherwise.

    Otherwise means: not at all, or not as this.
    """
    config = config_of(name)
    config["num_hidden_layers"] = 4 if "linear_num_key_heads" in config else 1
    real = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(real)  # type: ignore[no-untyped-call]
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert geometry_in(config).shapes() == shapes
    assert not getattr(real, "use_sliding_window", False)
    assert real.max_position_embeddings == config["max_position_embeddings"]


def test_a_name_is_found_in_any_case_and_without_its_owner() -> None:
    expected = config_of("Qwen/Qwen3-8B")
    assert expected["hidden_size"] == 4096
    assert published("qwen/QWEN3-8b") == published("Qwen3-8B") == expected


@pytest.mark.parametrize(
    "name",
    [
        "Qwen/Qwen3-9B",
        "Qwen/Qwen3-32B-Base",  # was not published
        "Qwen/Qwen2.5-Coder-72B",
        "someone/Qwen3-8B",  # may be another model
        "",
    ],
)
def test_what_is_not_in_the_table_is_not_made_up(name: str) -> None:
    assert published(name) is None


def test_a_caller_may_change_what_it_gets() -> None:
    config_of("Qwen3-8B")["hidden_size"] = 1
    assert config_of("Qwen3-8B")["hidden_size"] == 4096
