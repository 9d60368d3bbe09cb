"""8-bit products: their meaning, and what is said where they fail; tests/gpu/test_fp8.py runs."""

import importlib.util

import pytest
import torch
from torch import nn

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.model.build import _is_meant, use_fp8


@pytest.mark.skipif(importlib.util.find_spec("torchao") is not None, reason="torchao is installed")
def test_without_torchao_the_extra_is_named() -> None:
    with pytest.raises(ConfigError, match=r"fp8 needs torchao: pip install -e '.\[fp8\]'"):
        use_fp8(nn.Linear(16, 16))


@pytest.mark.parametrize(
    ("name", "outputs", "is_meant"),
    [
        ("self_attn.q_proj", 32, True),
        ("mlp.gate", 32, False),
        ("mlp.gate_proj", 32, True),
        ("self_attn.q_proj", 24, False),
    ],
)
def test_routers_and_odd_sizes_are_left_alone(name: str, outputs: int, is_meant: bool) -> None:
    assert _is_meant(nn.Linear(16, outputs, device="meta", dtype=torch.bfloat16), name) is is_meant
