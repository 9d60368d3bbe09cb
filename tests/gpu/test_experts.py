"""Models with experts on real GPUs: every strategy learns alike, compiled or not.

Skipped where there are none.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline_lib.config.train import Train
from tests.model.test_moe import TRAIN, losses_and_norms, small_moe
from tests.ranks import run_ranks

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU")]
RANKS = min(2, GPUS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights as training begins: with write_random's, bf16's noise is a quarter of a gradient."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("moe")
    small_moe().save_pretrained(folder)
    return folder


def steps_of(folder: Path, ranks: int, device: str, **settings: Any) -> np.ndarray:
    """Loss and norm of each step, the same on all ranks."""
    train = Train.model_validate({**TRAIN.model_dump(), **settings})
    found = run_ranks(losses_and_norms, ranks, folder, train, device)
    assert all(each == found[0] for each in found.values())
    return np.array(found[0])


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
def test_the_curve_is_that_of_one_cpu(folder: Path, strategy: str) -> None:
    expected = steps_of(folder, 1, "cpu")
    assert steps_of(folder, RANKS, "cuda", strategy=strategy) == pytest.approx(expected, rel=1e-3)


OF_EXPERTS = {
    "method": "lora",
    "lora": {"rank": 8, "targets": ("q_proj", "experts.gate_up_proj", "experts.down_proj")},
}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_adapters_of_experts_learn_as_on_a_cpu(folder: Path, strategy: str) -> None:
    expected = steps_of(folder, 1, "cpu", **OF_EXPERTS)
    assert steps_of(folder, RANKS, "cuda", strategy=strategy, **OF_EXPERTS) == pytest.approx(
        expected, rel=1e-3
    )


@pytest.mark.parametrize(
    "settings",
    [{}, {"recompute": "selective"}, {"recompute": "full"}, {"reshard": False}, OF_EXPERTS],
    ids=["none", "selective", "full", "gathered", "adapters"],
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_compiled_layers_keep_the_curve(
    folder: Path, strategy: str, settings: dict[str, Any]
) -> None:
    plain, compiled = (
        steps_of(
            folder, RANKS, "cuda", strategy=strategy, precision="bf16", compile=value, **settings
        )
        for value in (False, True)
    )
    assert compiled == pytest.approx(plain, rel=3e-2)
