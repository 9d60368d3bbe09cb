"""The training stage on real GPUs with NCCL. Skipped where there are none; run on the GPU machine."""

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


def run(arena: Arena, out: Path, ranks: int, device: str = "cuda", **settings: Any) -> Path:
    run_ranks(train, ranks, arena.job(ranks, out, device=device, **settings))
    return out


@two_gpus
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_fp32_curve_equals_the_cpu_curve(arena: Arena, tmp_path: Path, strategy: str, method: str) -> None:
    settings: dict[str, Any] = {"method": method, "epochs": 2, "strategy": strategy}
    cpu = losses(run(arena, tmp_path / "cpu", 1, device="cpu", replica="cpu", **settings))
    gpu = losses(run(arena, tmp_path / "gpu", 2, replica="gpu", **settings))
    assert gpu == pytest.approx(cpu, rel=1e-3)


@two_gpus
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_bf16_curve_is_near_the_fp32_curve_and_learns(arena: Arena, tmp_path: Path, strategy: str, method: str) -> None:
    settings: dict[str, Any] = {"method": method, "epochs": 3, "strategy": strategy}
    exact = losses(run(arena, tmp_path / "fp32", 2, replica="fp32", **settings))
    rounded = losses(run(arena, tmp_path / "bf16", 2, precision="bf16", replica="bf16", **settings))
    assert rounded == pytest.approx(exact, rel=3e-2)
    assert rounded[-1] < rounded[0]


@two_gpus
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_run_resumes_on_the_same_curve(arena: Arena, tmp_path: Path, strategy: str) -> None:
    settings: dict[str, Any] = {"strategy": strategy, "save_every_steps": 2, "epochs": 2}
    whole = run(arena, tmp_path / "whole", 2, replica="whole", **settings)
    run_ranks(train_until_killed, 2, arena.job(2, tmp_path / "killed", device="cuda", replica="killed", **settings), 5)
    resumed = run(arena, tmp_path / "resumed", 2, replica="killed", **settings)
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-4)
    assert rows(resumed)[-1]["peak_memory_bytes"] > 0
    print(f"{strategy}: resumed bitwise: {digest_of(load_weights(resumed)) == digest_of(load_weights(whole))}")


@two_gpus
def test_a_run_moves_from_two_gpus_with_fsdp_to_one_with_ddp(arena: Arena, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_every_steps": 2, "epochs": 2}
    whole = run(arena, tmp_path / "whole", 2, strategy="fsdp", replica="whole", **settings)
    job = arena.job(2, tmp_path / "killed", device="cuda", strategy="fsdp", replica="moved", **settings)
    run_ranks(train_until_killed, 2, job, 5)
    moved = run(arena, tmp_path / "moved", 1, strategy="ddp", replica="moved", **settings)
    assert losses(moved) == pytest.approx(losses(whole), rel=1e-3)
