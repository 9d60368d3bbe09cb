"""The rows of optimizers and strategies: every name has one, and what it names exists."""

from typing import get_args

import pytest

from pipeline_lib.config.optimizers import DEFAULT, OPTIMIZERS, OptimizerName
from pipeline_lib.config.strategies import STRATEGIES, StrategyName, with_key
from pipeline_lib.config.train import Train
from pipeline_lib.train.strategies import STRATEGY_CLASSES


def test_every_name_has_a_row() -> None:
    assert get_args(OptimizerName) == tuple(OPTIMIZERS)
    assert get_args(StrategyName) == tuple(STRATEGIES) == tuple(STRATEGY_CLASSES)
    assert Train().optimizer == DEFAULT


def test_no_two_optimizers_have_the_same_name_in_other_tools() -> None:
    names = [name for row in OPTIMIZERS.values() for name in row.known_as]
    assert len(names) == len(set(names))
    assert all(name in row.known_as for name, row in OPTIMIZERS.items())


def test_keys_of_strategies_are_keys_of_the_section() -> None:
    keys = {key.partition(":")[0] for row in STRATEGIES.values() for key in row.keys}
    for key in keys:
        name, _, inner = key.partition(".")
        assert name in Train.model_fields
        assert not inner or hasattr(getattr(Train(), name), inner)
    assert with_key("unit_layers") == ("fsdp", "hsdp")
    assert with_key("no such key") == ()


@pytest.mark.parametrize(
    ("name", "shape", "moments"),
    [
        ("model.layers.3.mlp.up_proj.weight", (64, 32), ("momentum_buffer",)),
        ("model.layers.3.self_attn.q_proj.bias", (64,), ("exp_avg", "exp_avg_sq")),
        ("model.layers.3.linear_attn.conv1d.weight", (64, 1, 4), ("exp_avg", "exp_avg_sq")),
        ("model.embed_tokens.weight", (64, 32), ("exp_avg", "exp_avg_sq")),
        ("lm_head.weight", (64, 32), ("exp_avg", "exp_avg_sq")),
    ],
)
def test_muon_is_for_matrices_of_layers(
    name: str, shape: tuple[int, ...], moments: tuple[str, ...]
) -> None:
    assert OPTIMIZERS["muon"].rule_of(name, shape).moments == moments
    for other in ("adamw", "adamw_8bit"):
        assert OPTIMIZERS[other].rule_of(name, shape).moments == ("exp_avg", "exp_avg_sq")
