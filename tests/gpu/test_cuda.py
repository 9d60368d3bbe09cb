"""The training stage on real GPUs with NCCL.

Skipped where there are none; run on the GPU machine.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import digest_of, load_weights, losses, rows, train, train_until_killed

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU"),
]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")


@two_gpus
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_fp32_curve_equals_the_cpu_curve(
    whole: Callable[..., Path], strategy: str, method: str
) -> None:
    cpu = losses(whole(1, strategy="ddp", method=method, epochs=2))
    gpu = losses(whole(2, device="cuda", strategy=strategy, method=method, epochs=2))
    assert gpu == pytest.approx(cpu, rel=1e-3)


@two_gpus
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bf16_curve_is_near_the_fp32_curve_and_learns(
    whole: Callable[..., Path], strategy: str, method: str
) -> None:
    settings: dict[str, Any] = {
        "device": "cuda",
        "method": method,
        "epochs": 3,
        "strategy": strategy,
    }
    exact, rounded = losses(whole(2, **settings)), losses(whole(2, precision="bf16", **settings))
    assert rounded == pytest.approx(exact, rel=3e-2)
    assert rounded[-1] < rounded[0]


@two_gpus
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_run_resumes_on_the_same_curve(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path, strategy: str
) -> None:
    settings: dict[str, Any] = {"device": "cuda", "strategy": strategy, "epochs": 2}
    run_ranks(
        train_until_killed, 2, arena.job(2, tmp_path / "killed", save_every_steps=2, **settings), 5
    )
    resumed, expected = tmp_path / "resumed", whole(2, **settings)
    run_ranks(train, 2, arena.job(2, resumed, save_every_steps=2, **settings))
    assert losses(resumed) == pytest.approx(losses(expected), rel=1e-4)
    assert rows(resumed)[-1]["peak_memory_bytes"] > 0
    print(
        f"{strategy}: resumed bitwise: "
        f"{digest_of(load_weights(resumed)) == digest_of(load_weights(expected))}"
    )


@two_gpus
def test_a_run_moves_from_two_gpus_with_fsdp_to_one_with_ddp(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"device": "cuda", "save_every_steps": 2, "epochs": 2}
    run_ranks(
        train_until_killed, 2, arena.job(2, tmp_path / "killed", strategy="fsdp", **settings), 5
    )
    run_ranks(train, 1, arena.job(1, tmp_path / "moved", strategy="ddp", **settings))
    expected = losses(whole(2, device="cuda", strategy="fsdp", epochs=2))
    assert losses(tmp_path / "moved") == pytest.approx(expected, rel=1e-3)


@two_gpus
@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "bf16", "recompute": "full", "compile": True}],
    ids=["fp32", "bf16"],
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gpus_that_share_blocks_have_the_curve_of_whole_ones(
    whole: Callable[..., Path], strategy: str, settings: dict[str, Any]
) -> None:
    placement: dict[str, Any] = {"device": "cuda", "strategy": strategy, "epochs": 2, **settings}
    expected = losses(whole(2, **placement))
    tolerance = 3e-2 if settings else 1e-4
    assert losses(whole(2, context_ranks=2, **placement)) == pytest.approx(expected, rel=tolerance)
