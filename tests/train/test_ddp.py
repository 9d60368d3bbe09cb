"""Whole models on every rank: compressed and rare exchange, fp16, and who writes what."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeline_lib.train.keepers import balanced
from pipeline_lib.train.loss_scale import FIRST
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import assert_same_result, digest_of, losses, train, train_until_killed
from tests.train.native import by_hand, same, state_of


@pytest.mark.parametrize(
    ("ranks", "killed_in", "settings"),
    [
        pytest.param(  # residuals are in use since step 3
            *(4, 6, {"gradient_compression": "powersgd", "powersgd_rank": 2}),
            marks=pytest.mark.slow,
        ),
        (2, 6, {"local_sgd_steps": 2}),
        (2, 4, {"precision": "fp16"}),
    ],
    ids=["powersgd", "local sgd", "fp16"],
)
def test_a_resumed_run_is_bitwise_one_that_was_not_stopped(
    arena: Arena,
    whole: Callable[..., Path],
    tmp_path: Path,
    ranks: int,
    killed_in: int,
    settings: dict[str, Any],
) -> None:
    settings = {"strategy": "ddp", "save_every_steps": 2, **settings}
    run_ranks(
        train_until_killed, ranks, arena.job(ranks, tmp_path / "killed", **settings), killed_in
    )
    run_ranks(train, ranks, arena.job(ranks, tmp_path / "resumed", **settings))
    assert_same_result(tmp_path / "resumed", whole(ranks, **settings))


def replicas_by_hand(environ: Mapping[str, str], arena: Arena, settings: dict[str, Any]) -> bool:
    with by_hand(environ, arena, **settings) as hand:
        return all_same(hand.state())


@pytest.mark.parametrize(
    "settings", [{}, {"method": "lora", "lora": {"rank": 4, "alpha": 8}}], ids=["full", "lora"]
)
def test_replicas_begin_alike_though_nothing_is_sent(
    arena: Arena, settings: dict[str, Any]
) -> None:
    assert run_ranks(replicas_by_hand, 2, arena, settings) == {0: True, 1: True}


# Compression


SLOWER = [
    pytest.param(strategy, "bf16", 2e-3, marks=pytest.mark.slow)
    for strategy in ("hsdp", "zero1", "zero2", "zero3")
]


@pytest.mark.parametrize(
    ("strategy", "compression", "tolerance"),
    [("ddp", "bf16", 2e-3), ("ddp", "powersgd", 0.1), ("fsdp", "bf16", 2e-3), *SLOWER],
)
def test_compressed_gradients_lead_down_the_same_way(
    whole: Callable[..., Path], strategy: str, compression: str, tolerance: float
) -> None:
    """bf16 rounds by 2**-9; PowerSGD's residuals come a step late."""
    ranks = 4 if strategy == "hsdp" else 2
    settings: dict[str, Any] = {"strategy": strategy, "epochs": 2}
    if strategy == "hsdp":
        settings["shard_ranks"] = 2
    plain = losses(whole(ranks, **settings))
    found = losses(whole(ranks, **settings, gradient_compression=compression, powersgd_rank=2))
    assert found != plain
    assert found == pytest.approx(plain, rel=tolerance)
    assert found[-1] < found[0]


def power_by_hand(environ: Mapping[str, str], arena: Arena) -> tuple[list[str], list[str], bool]:
    with by_hand(environ, arena, gradient_compression="powersgd", powersgd_rank=2) as hand:
        after_warm_up = list(hand.strategy.own_state())
        for step in range(4):
            hand.step(step)
        state = hand.strategy.own_state()
        residuals = [state[name] for name in state if "residual" in name]
        is_remembered = bool(residuals) and all(bool(residual.any()) for residual in residuals)
        hand.accumulate(4)
        hand.strategy.discard()
        return after_warm_up, list(hand.strategy.own_state()), is_remembered


def test_what_is_discarded_leaves_nothing_in_powersgd(arena: Arena) -> None:
    for after_warm_up, after_discard, is_remembered in run_ranks(power_by_hand, 2, arena).values():
        assert is_remembered
        assert after_warm_up == after_discard == ["powersgd.steps"]


# Local SGD


def local_by_hand(environ: Mapping[str, str], arena: Arena) -> list[bool]:
    """After each of 5 updates: whether all ranks hold the same."""
    with by_hand(environ, arena, local_sgd_steps=4) as hand:
        found = []
        for step in range(5):
            hand.step(step)
            found.append(all_same(hand.state()))
        hand.strategy.snapshot()
        return [*found, all_same(hand.state())]


def all_same(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether every rank holds these bits."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, digest_of(tensors))
    return len(set(gathered)) == 1


def test_ranks_go_on_by_themselves_and_meet_every_k_updates(arena: Arena) -> None:
    for found in run_ranks(local_by_hand, 2, arena).values():
        assert found == [False, False, False, True, False, True]


def test_local_sgd_learns_as_plain_training_does(whole: Callable[..., Path]) -> None:
    plain = losses(whole(2, strategy="ddp", epochs=4))
    found = losses(whole(2, strategy="ddp", epochs=4, local_sgd_steps=4, save_every_steps=4))
    assert found != plain
    assert found == pytest.approx(plain, rel=0.05)
    assert found[-1] < found[0] - 0.1


# fp16


def test_fp16_is_near_the_fp32_curve(whole: Callable[..., Path]) -> None:
    exact = losses(whole(2, strategy="ddp", epochs=2))
    rounded = losses(whole(2, strategy="ddp", epochs=2, precision="fp16"))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=1e-2)


def overflow_by_hand(
    environ: Mapping[str, str], arena: Arena
) -> tuple[list[float], list[float], bool]:
    """Norms and loss scales of steps from far too large a scale; if what was skipped kept bits.

    That is, all bits.
    """
    with by_hand(environ, arena, precision="fp16", strategy="ddp") as hand:
        hand.strategy.load_own_state(
            {"loss_scale": torch.tensor([2.0**40, 0.0], dtype=torch.float64)}
        )
        before = hand.state()
        norms, scales, kept = [], [], True
        while hand.strategy.updates < 2:
            norms.append(hand.step(0))
            scales.append(float(hand.strategy.own_state()["loss_scale"][0]))
            kept = kept and (hand.strategy.updates > 0 or same(hand.state(), before))
        return norms, scales, kept


def test_an_overflow_halves_the_loss_scale_and_changes_nothing_else(arena: Arena) -> None:
    found = run_ranks(overflow_by_hand, 2, arena)
    norms, scales, kept = found[0]
    overflows = sum(1 for norm in norms if norm == float("inf") or norm != norm)
    assert found[1][1] == scales
    assert kept
    assert overflows >= 5
    assert scales == [2.0 ** (40 - number) for number in range(1, overflows + 1)] + [scales[-1]] * 2
    # the gradients' own, without the scale
    assert all(0.01 < norm < 100 for norm in norms[overflows:])


def test_the_first_loss_scale_is_that_of_torch() -> None:
    assert torch.amp.GradScaler("cpu").get_scale() == FIRST


# Who writes what


def test_shares_are_balanced_and_cover_everything() -> None:
    sizes = {f"layer.{number}": 100 for number in range(7)} | {"embedding": 250, "norm": 1}
    keepers = balanced(sizes, 3)
    kept = [
        sum(size for name, size in sizes.items() if keepers[name] == holder) for holder in range(3)
    ]
    assert sum(kept) == sum(sizes.values())
    assert max(kept) - min(kept) <= 100
    assert balanced(dict(reversed(sizes.items())), 3) == keepers


def snapshot_by_hand(
    environ: Mapping[str, str], arena: Arena, strategy: str
) -> tuple[dict[str, int], list[str]]:
    """Bytes that this rank would write, and all names."""
    with by_hand(
        environ, arena, strategy=strategy, shard_ranks=2 if strategy == "hsdp" else None
    ) as hand:
        hand.step(0)
        written = hand.strategy.snapshot()
        local = {
            name: tensor.to_local() if strategy == "hsdp" else tensor
            for name, tensor in written.items()
        }
        return {name: tensor.nbytes for name, tensor in local.items()}, list(
            state_of(hand.strategy)
        )


@pytest.mark.parametrize("strategy", ["ddp", "hsdp"])
def test_what_several_ranks_hold_one_of_them_writes(arena: Arena, strategy: str) -> None:
    found = run_ranks(snapshot_by_hand, 4, arena, strategy)
    names = found[0][1]
    writers = [name for written, _ in found.values() for name in written]
    # two shards of each, in hsdp
    assert sorted(writers) == sorted(names * (2 if strategy == "hsdp" else 1))
    sizes = [sum(written.values()) for written, _ in found.values()]
    assert max(sizes) < 1.2 * min(sizes)
