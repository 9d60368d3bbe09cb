"""Sharded models: units, offload, precision, and moving to other strategies."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeline_lib.config.train import Train
from pipeline_lib.model.batch import loss_sum, read_batch
from pipeline_lib.model.weights import local_part
from pipeline_lib.train.dist import World
from pipeline_lib.train.fsdp import Fsdp
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import assert_same_result, losses, train, train_until_killed
from tests.train.native import by_hand, state_of


@pytest.mark.parametrize(
    "settings",
    [{"unit_layers": 2}, {"unit_layers": 5}, {"offload": "optimizer+params"}],
    ids=["2", "5", "offload"],
)
def test_units_and_offload_change_no_bit(
    whole: Callable[..., Path], settings: dict[str, Any]
) -> None:
    """What is gathered at a time, and where shards lie, is no part of the arithmetic."""
    assert_same_result(whole(2, strategy="fsdp", **settings), whole(2, strategy="fsdp"))


def accumulated_by_hand(
    environ: Mapping[str, str], arena: Arena, settings: dict[str, Any]
) -> dict[str, bytes]:
    """This rank's weights after steps of 3 micro-batches, each followed by a no-gradient pass."""
    with by_hand(environ, arena, strategy="fsdp", **settings) as hand:
        for step in range(3):
            hand.accumulate(step, 3)
            hand.strategy.update(1e-2, float(hand.strategy.grad_norm()))
            with torch.no_grad():
                loss_sum(hand.wrapped, read_batch(hand.reader, [0]))
        return {
            name: local_part(tensor)[0].numpy().tobytes() for name, tensor in hand.weights().items()
        }


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{}, {"recompute": "full"}, {"method": "lora", "lora": {"rank": 4, "alpha": 8}}],
    ids=["plain", "recompute", "lora"],
)
def test_layers_that_stay_gathered_change_no_bit(arena: Arena, settings: dict[str, Any]) -> None:
    """They are gathered anew after every update, though kept over the micro-batches of a step."""
    given_back, kept = (
        run_ranks(accumulated_by_hand, 2, arena, {**settings, "reshard": value})
        for value in (True, False)
    )
    assert given_back == kept
    assert any(given_back[0].values())


OFFLOADED = {"offload": "optimizer+params"}


def test_offloaded_gradients_of_several_micro_batches_have_the_same_sum(arena: Arena) -> None:
    """A micro-batch's come by themselves and join the earlier ones; bit by bit the same update."""
    plain, offloaded = (
        run_ranks(accumulated_by_hand, 2, arena, settings) for settings in ({}, OFFLOADED)
    )
    assert offloaded == plain


def test_offloaded_gradients_are_kept_where_a_micro_batch_does_not_use_a_parameter() -> None:
    strategy = Fsdp(
        World(0, 0, 1, torch.device("cpu")), Train(strategy="fsdp", offload="optimizer+params"), 3
    )
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    strategy.parameters = {"one": one, "other": other}
    strategy.optimizer = torch.optim.AdamW([one, other])
    for loss in (2 * one.sum(), 3 * other.sum(), 5 * one.sum() + other.sum()):
        strategy.backward(loss)
    assert [gradient.tolist() for gradient in strategy.gradients()] == [[7.0] * 3, [4.0] * 3]


def norms_by_hand(
    environ: Mapping[str, str], arena: Arena, settings: dict[str, Any]
) -> tuple[float, float]:
    """The gradient norm, as of offloaded gradients on a GPU, and as torch computes it."""
    with by_hand(environ, arena, **settings) as hand:
        hand.accumulate(0)
        assert isinstance(hand.strategy, Fsdp)
        return float(hand.strategy.norm_on_device()), float(hand.strategy.grad_norm())


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {}),
        (2, {}),
        (2, {"method": "lora", "lora": {"rank": 4, "alpha": 8}}),
        (4, {"strategy": "hsdp", "shard_ranks": 2}),
    ],
    ids=["1", "2", "lora", "hsdp"],
)
def test_the_norm_of_offloaded_gradients_is_torchs(
    arena: Arena, ranks: int, settings: dict[str, Any]
) -> None:
    found = run_ranks(norms_by_hand, ranks, arena, {"strategy": "fsdp", **OFFLOADED, **settings})
    for on_device, by_torch in found.values():
        assert on_device == pytest.approx(by_torch, rel=1e-6)
        assert by_torch > 0


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 3e-2), ("fp16", 1e-2)])
def test_half_precision_is_near_the_fp32_curve(
    whole: Callable[..., Path], precision: str, tolerance: float
) -> None:
    """Products round by 2**-9 and 2**-12 of themselves; masters, sums and updates are fp32."""
    exact = losses(whole(2, strategy="fsdp"))
    rounded = losses(whole(2, strategy="fsdp", precision=precision))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=tolerance)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"strategy": "ddp"}, {"strategy": "hsdp", "shard_ranks": 2}),
        ({"strategy": "hsdp", "shard_ranks": 2}, {"strategy": "ddp"}),
    ],
    ids=["ddp to hsdp", "hsdp to ddp"],
)
def test_a_run_moves_between_strategies(
    arena: Arena,
    whole: Callable[..., Path],
    tmp_path: Path,
    before: dict[str, Any],
    after: dict[str, Any],
) -> None:
    run_ranks(
        train_until_killed, 4, arena.job(4, tmp_path / "killed", save_every_steps=2, **before), 4
    )
    run_ranks(train, 4, arena.job(4, tmp_path / "moved", save_every_steps=2, **after))
    assert losses(tmp_path / "moved") == pytest.approx(losses(whole(4, strategy="ddp")), rel=2e-5)


def bytes_by_hand(environ: Mapping[str, str], arena: Arena, settings: dict[str, Any]) -> int:
    """Bytes of weights and moments that this rank holds."""
    with by_hand(environ, arena, **settings) as hand:
        hand.step(0)
        return sum(tensor.to_local().nbytes for tensor in state_of(hand.strategy).values())


def test_a_rank_holds_its_part_of_the_state(arena: Arena) -> None:
    whole = run_ranks(bytes_by_hand, 1, arena, {"strategy": "fsdp"})[0]
    parts = run_ranks(bytes_by_hand, 4, arena, {"strategy": "fsdp"}).values()
    halves = run_ranks(bytes_by_hand, 4, arena, {"strategy": "hsdp", "shard_ranks": 2}).values()
    assert set(parts) == {whole // 4}
    assert set(halves) == {whole // 2}
