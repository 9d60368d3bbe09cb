"""DeepSpeed on real GPUs: fp16 with its loss scale, which it refuses on CPUs.

Skipped where there are none.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import digest_of, load_weights, losses, train, train_until_killed

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU")]
RANKS = min(GPUS, 2)
ZERO = ("zero1", "zero2", "zero3")


def pieces(folder: Path) -> str:
    """A DeepSpeed config under which the little model's weights are gathered and let go again."""
    path = folder / "pieces.json"
    path.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 40}}))
    return str(path)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", ZERO)
def test_the_curve_is_near_that_of_one_cpu(
    whole: Callable[..., Path], tmp_path: Path, strategy: str, precision: str
) -> None:
    settings: dict[str, Any] = {
        "strategy": strategy,
        "precision": precision,
        "deepspeed_json": pieces(tmp_path),
    }
    gpu = losses(whole(RANKS, device="cuda", **settings))
    assert gpu == pytest.approx(losses(whole(1)), rel=1e-3 if precision == "fp32" else 3e-2)


@pytest.mark.parametrize(
    ("strategy", "offload"),
    [("zero1", "optimizer"), ("zero2", "optimizer"), ("zero3", "optimizer+params")],
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_offload_keeps_the_curve(
    whole: Callable[..., Path], strategy: str, offload: str, precision: str
) -> None:
    settings: dict[str, Any] = {"device": "cuda", "strategy": strategy, "precision": precision}
    offloaded = losses(whole(RANKS, offload=offload, **settings))
    assert offloaded == pytest.approx(losses(whole(RANKS, **settings)), rel=1e-2)


@pytest.mark.parametrize("strategy", ZERO)
def test_a_killed_run_in_fp16_resumes_with_its_loss_scale(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path, strategy: str
) -> None:
    settings: dict[str, Any] = {"device": "cuda", "strategy": strategy, "precision": "fp16"}
    run_ranks(
        train_until_killed,
        RANKS,
        arena.job(RANKS, tmp_path / "killed", save_every_steps=2, **settings),
        5,
    )
    resumed, expected = tmp_path / "resumed", whole(RANKS, **settings)
    run_ranks(train, RANKS, arena.job(RANKS, resumed, save_every_steps=2, **settings))
    assert losses(resumed) == pytest.approx(losses(expected), rel=1e-3)
    print(
        f"{strategy}: resumed bitwise: "
        f"{digest_of(load_weights(resumed)) == digest_of(load_weights(expected))}"
    )


@pytest.mark.parametrize("strategy", ZERO)
def test_lora_in_bf16_learns_like_fsdp(whole: Callable[..., Path], strategy: str) -> None:
    lora: dict[str, Any] = {
        "method": "lora",
        "precision": "bf16",
        "lora": {"rank": 4, "alpha": 8},
        "device": "cuda",
    }
    expected = losses(whole(RANKS, strategy="fsdp", **lora))
    assert losses(whole(RANKS, strategy=strategy, **lora)) == pytest.approx(expected, rel=1e-2)
