"""Torch's own strategies on GPUs: fp16, offload, units, compression, recomputation, compilation.

Skipped where there are none; run on the GPU machine.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline_lib.train.rank import RankJob
from pipeline_lib.train.state import own_part
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import digest_of, load_weights, losses, train, train_until_killed
from tests.train.native import by_hand, same, state_of

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU"),
]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")
four_gpus = pytest.mark.skipif(GPUS < 4, reason="needs four CUDA GPUs")
RANKS = min(2, GPUS)


def run(arena: Arena, out: Path, ranks: int, device: str = "cuda", **settings: Any) -> Path:
    run_ranks(train, ranks, arena.job(ranks, out, device=device, **settings))
    return out


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_fp16_is_near_the_fp32_curve(arena: Arena, tmp_path: Path, strategy: str) -> None:
    exact = losses(run(arena, tmp_path / "exact", RANKS, strategy=strategy, replica="exact"))
    rounded = losses(run(arena, tmp_path / "rounded", RANKS, strategy=strategy, precision="fp16"))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-2)


def overflow_by_hand(
    environ: Mapping[str, str], arena: Arena, strategy: str
) -> tuple[list[float], bool]:
    """Loss scales after steps that begin far too large; and if what was skipped kept all bits."""
    with by_hand(environ, arena, device="cuda", precision="fp16", strategy=strategy) as hand:
        hand.strategy.load_own_state(
            {"loss_scale": torch.tensor([2.0**40, 0.0], dtype=torch.float64)}
        )
        before, scales, kept = hand.state(), [], True
        while hand.strategy.updates < 2:
            hand.step(0)
            scales.append(float(hand.strategy.own_state()["loss_scale"][0]))
            local = {
                name: getattr(tensor, "_local_tensor", tensor)
                for name, tensor in hand.state().items()
            }
            was = {
                name: getattr(tensor, "_local_tensor", tensor) for name, tensor in before.items()
            }
            kept = kept and (hand.strategy.updates > 0 or same(local, was))
        return scales, kept


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_overflow_halves_the_loss_scale_and_changes_nothing_else(
    arena: Arena, strategy: str
) -> None:
    found = run_ranks(overflow_by_hand, RANKS, arena, strategy)
    scales, kept = found[0]
    assert all(other == (scales, kept) for other in found.values())
    assert kept
    assert scales[0] == 2.0**39
    assert scales[-1] < 2.0**36


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_muon_resumes_bitwise_near_the_curve_of_a_cpu(
    arena: Arena, tmp_path: Path, strategy: str
) -> None:
    settings: dict[str, Any] = {"optimizer": "muon", "strategy": strategy, "save_every_steps": 2}
    whole = run(arena, tmp_path / "whole", RANKS, replica="whole", **settings)
    on_cpu = run(arena, tmp_path / "cpu", 1, device="cpu", replica="cpu", **settings)
    assert losses(whole) == pytest.approx(losses(on_cpu), rel=1e-3)
    job = arena.job(RANKS, tmp_path / "killed", device="cuda", **settings)
    run_ranks(train_until_killed, RANKS, job, 4)
    resumed = run(arena, tmp_path / "resumed", RANKS, **settings)
    assert losses(resumed) == losses(whole)
    assert digest_of(load_weights(resumed)) == digest_of(load_weights(whole))


@pytest.mark.parametrize(
    "settings", [{"offload": "optimizer+params"}, {"unit_layers": 2}], ids=["offload", "units"]
)
def test_offload_and_units_keep_the_curve(
    arena: Arena, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Host and GPU make the same update up to rounding."""
    plain = losses(run(arena, tmp_path / "plain", RANKS, strategy="fsdp", replica="plain"))
    found = losses(
        run(arena, tmp_path / "found", RANKS, strategy="fsdp", replica="found", **settings)
    )
    assert found == pytest.approx(plain, rel=1e-4)


def devices_by_hand(environ: Mapping[str, str], arena: Arena) -> set[str]:
    """Where weights and moments lie."""
    with by_hand(
        environ, arena, device="cuda", strategy="fsdp", offload="optimizer+params"
    ) as hand:
        hand.step(0)
        return {tensor.to_local().device.type for tensor in state_of(hand.strategy).values()}


def test_what_is_offloaded_lies_on_the_host(arena: Arena) -> None:
    assert run_ranks(devices_by_hand, RANKS, arena)[0] == {"cpu"}


def page_locked_by_hand(environ: Mapping[str, str], arena: Arena) -> list[bool]:
    """Which gradients lie in page-locked memory after two micro-batches."""
    with by_hand(
        environ, arena, device="cuda", strategy="fsdp", offload="optimizer+params"
    ) as hand:
        hand.accumulate(0, 2)
        return [own_part(gradient).is_pinned() for gradient in hand.strategy.gradients()]


def test_offloaded_gradients_of_every_micro_batch_come_to_page_locked_memory(arena: Arena) -> None:
    """To pageable memory a copy takes 40 times as long, and the training waits for it."""
    found = run_ranks(page_locked_by_hand, RANKS, arena)[0]
    assert found
    assert all(found)


def test_an_offloaded_run_resumes_on_the_same_curve(arena: Arena, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "strategy": "fsdp",
        "offload": "optimizer+params",
        "save_every_steps": 2,
    }
    whole = losses(run(arena, tmp_path / "whole", RANKS, replica="whole", **settings))
    job = arena.job(RANKS, tmp_path / "killed", device="cuda", replica="killed", **settings)
    run_ranks(train_until_killed, RANKS, job, 4)
    assert losses(
        run(arena, tmp_path / "resumed", RANKS, replica="killed", **settings)
    ) == pytest.approx(whole, rel=1e-4)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "settings", [{"recompute": "full"}, {"recompute": "selective"}], ids=["full", "selective"]
)
def test_recomputed_layers_keep_the_curve(
    arena: Arena, tmp_path: Path, strategy: str, settings: dict[str, Any]
) -> None:
    plain = losses(
        run(arena, tmp_path / "plain", RANKS, strategy=strategy, precision="bf16", replica="plain")
    )
    found = losses(
        run(arena, tmp_path / "found", RANKS, strategy=strategy, precision="bf16", **settings)
    )
    assert found == pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_compiled_layers_keep_the_curve(arena: Arena, tmp_path: Path, recompute: str) -> None:
    settings: dict[str, Any] = {"strategy": "fsdp", "precision": "bf16"}
    plain = losses(run(arena, tmp_path / "plain", RANKS, replica="plain", **settings))
    found = losses(
        run(arena, tmp_path / "found", RANKS, compile=True, recompute=recompute, **settings)
    )
    assert found == pytest.approx(plain, rel=3e-2)


@two_gpus
@pytest.mark.parametrize(
    ("strategy", "compression", "tolerance"),
    [
        ("ddp", "bf16", 5e-3),
        ("ddp", "powersgd", 0.1),
        ("fsdp", "bf16", 5e-3),
        ("zero2", "bf16", 5e-3),
        ("zero3", "bf16", 5e-3),
    ],
)
def test_compressed_gradients_lead_down_the_same_way(
    arena: Arena, tmp_path: Path, strategy: str, compression: str, tolerance: float
) -> None:
    settings: dict[str, Any] = {"strategy": strategy, "epochs": 2}
    plain = losses(run(arena, tmp_path / "plain", 2, replica="plain", **settings))
    found = losses(run(arena, tmp_path / "found", 2, gradient_compression=compression, **settings))
    assert found == pytest.approx(plain, rel=tolerance)
    assert found[-1] < found[0]


@two_gpus
def test_local_sgd_learns(arena: Arena, tmp_path: Path) -> None:
    plain = losses(run(arena, tmp_path / "plain", 2, epochs=4, replica="plain"))
    found = losses(
        run(arena, tmp_path / "found", 2, epochs=4, local_sgd_steps=4, save_every_steps=4)
    )
    assert found == pytest.approx(plain, rel=0.05)


@four_gpus
def test_two_replicas_of_two_have_the_curve_of_ddp(arena: Arena, tmp_path: Path) -> None:
    ddp = losses(run(arena, tmp_path / "ddp", 4, strategy="ddp", replica="ddp"))
    hsdp = losses(run(arena, tmp_path / "hsdp", 4, strategy="hsdp", shard_ranks=2, replica="hsdp"))
    assert hsdp == pytest.approx(ddp, rel=1e-4)


@four_gpus
def test_hsdp_resumes_on_the_same_curve(arena: Arena, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"strategy": "hsdp", "shard_ranks": 2, "save_every_steps": 2}
    whole = run(arena, tmp_path / "whole", 4, replica="whole", **settings)
    run_ranks(
        train_until_killed,
        4,
        arena.job(4, tmp_path / "killed", device="cuda", replica="killed", **settings),
        4,
    )
    resumed = run(arena, tmp_path / "resumed", 4, replica="killed", **settings)
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-4)
    print(
        "hsdp: resumed bitwise: "
        f"{digest_of(load_weights(resumed)) == digest_of(load_weights(whole))}"
    )


def train_as_launched(environ: Mapping[str, str], job: RankJob) -> None:
    """Train with what the launcher puts into the environment for `deterministic`."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    train(environ, job)


@pytest.mark.parametrize(
    "settings", [{"precision": "bf16"}, {"precision": "bf16", "compile": True}]
)
def test_deterministic_runs_give_the_same_bits(
    arena: Arena, tmp_path: Path, settings: dict[str, Any]
) -> None:
    found = []
    for name in ("one", "two"):
        job = arena.job(
            1, tmp_path / name, device="cuda", replica=name, deterministic=True, **settings
        )
        run_ranks(train_as_launched, 1, job)
        found.append((losses(tmp_path / name), digest_of(load_weights(tmp_path / name))))
    assert found[0] == found[1]
