"""DeepSpeed on real GPUs: fp16 with its loss scale, which it refuses on CPUs. Skipped where there are none."""

import json
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


def run(arena: Arena, out: Path, ranks: int = RANKS, device: str = "cuda", **settings: Any) -> Path:
    run_ranks(train, ranks, arena.job(ranks, out, device=device, **settings))
    return out


def pieces(folder: Path) -> str:
    """A DeepSpeed config under which the little model's weights are gathered and let go again."""
    path = folder / "pieces.json"
    path.write_text(json.dumps({"zero_optimization": {"stage3_param_persistence_threshold": 40}}))
    return str(path)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", ZERO)
def test_the_curve_is_near_that_of_one_cpu(arena: Arena, tmp_path: Path, strategy: str, precision: str) -> None:
    cpu = losses(run(arena, tmp_path / "cpu", 1, "cpu", replica="cpu"))
    settings: dict[str, Any] = {"strategy": strategy, "precision": precision, "deepspeed_json": pieces(tmp_path)}
    gpu = losses(run(arena, tmp_path / "gpu", replica="gpu", **settings))
    assert gpu == pytest.approx(cpu, rel=1e-3 if precision == "fp32" else 3e-2)


@pytest.mark.parametrize(
    ("strategy", "offload"), [("zero1", "optimizer"), ("zero2", "optimizer"), ("zero3", "optimizer+params")]
)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_offload_keeps_the_curve(arena: Arena, tmp_path: Path, strategy: str, offload: str, precision: str) -> None:
    settings: dict[str, Any] = {"strategy": strategy, "precision": precision}
    kept = losses(run(arena, tmp_path / "gpu", replica="gpu", **settings))
    offloaded = losses(run(arena, tmp_path / "host", replica="host", offload=offload, **settings))
    assert offloaded == pytest.approx(kept, rel=1e-2)


@pytest.mark.parametrize("strategy", ZERO)
def test_a_killed_run_in_fp16_resumes_with_its_loss_scale(arena: Arena, tmp_path: Path, strategy: str) -> None:
    settings: dict[str, Any] = {"strategy": strategy, "precision": "fp16", "save_every_steps": 2}
    whole = run(arena, tmp_path / "whole", replica="whole", **settings)
    killed = arena.job(RANKS, tmp_path / "killed", device="cuda", replica="killed", **settings)
    run_ranks(train_until_killed, RANKS, killed, 5)
    resumed = run(arena, tmp_path / "resumed", replica="killed", **settings)
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-3)
    print(f"{strategy}: resumed bitwise: {digest_of(load_weights(resumed)) == digest_of(load_weights(whole))}")


@pytest.mark.parametrize("strategy", ZERO)
def test_lora_in_bf16_learns_like_fsdp(arena: Arena, tmp_path: Path, strategy: str) -> None:
    lora: dict[str, Any] = {"method": "lora", "precision": "bf16", "lora": {"rank": 4, "alpha": 8}}
    expected = losses(run(arena, tmp_path / "fsdp", strategy="fsdp", replica="fsdp", **lora))
    assert losses(run(arena, tmp_path / "out", strategy=strategy, **lora)) == pytest.approx(expected, rel=1e-2)
