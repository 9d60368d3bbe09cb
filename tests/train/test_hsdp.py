"""FSDP within replicas: the same curve as one replica, and its own exact resume."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pipeline_lib.core.errors import TrainingError
from pipeline_lib.model.batch import loss_sum, read_batch
from pipeline_lib.model.weights import local_part
from pipeline_lib.train.fsdp import Fsdp
from pipeline_lib.train.replicas import refuse_differing_replicas
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import assert_same_result, digest_of, losses, train, train_until_killed
from tests.train.native import by_hand, state_of


def test_a_resumed_run_is_bitwise_one_that_was_not_stopped_and_has_the_curve_of_ddp(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path
) -> None:
    """Two replicas of two ranks."""
    settings: dict[str, Any] = {"strategy": "hsdp", "shard_ranks": 2}
    run_ranks(
        train_until_killed, 4, arena.job(4, tmp_path / "killed", save_every_steps=2, **settings), 5
    )
    run_ranks(train, 4, arena.job(4, tmp_path / "resumed", save_every_steps=2, **settings))
    assert_same_result(tmp_path / "resumed", whole(4, **settings))
    assert losses(tmp_path / "resumed") == pytest.approx(losses(whole(4, strategy="ddp")), rel=2e-5)


def clipped_by_hand(environ: Mapping[str, str], arena: Arena) -> tuple[float, str]:
    """The norm of a step in which ranks differ on it, and this rank's state digest after it."""
    plain: Any = Fsdp.grad_norm

    def found_otherwise(strategy: Fsdp) -> torch.Tensor:
        norm: torch.Tensor = plain(strategy)
        return norm * (1 + strategy.world.rank * 2**-23)

    with by_hand(environ, arena, strategy="hsdp", shard_ranks=2, max_grad_norm=1e-3) as hand:
        Fsdp.grad_norm = found_otherwise  # type: ignore[method-assign,assignment]  # in a process of its own
        norm = hand.step(0)
        return norm, digest_of(
            {name: local_part(tensor)[0] for name, tensor in hand.state().items()}
        )


def test_replicas_clip_by_the_same_bits(arena: Arena) -> None:
    """Though each adds up its norm by itself, and in another order.

    Ranks 0 and 1 are one replica, 2 and 3 another.
    """
    found = run_ranks(clipped_by_hand, 4, arena)
    assert len({norm for norm, _ in found.values()}) == 1
    assert found[0][1] == found[2][1] != found[1][1] == found[3][1]


def norms_by_hand(environ: Mapping[str, str], arena: Arena) -> list[tuple[float, float]]:
    """Of a few steps the norm, and this rank's own; then that of gradients with a NaN."""
    with by_hand(environ, arena, strategy="hsdp", shard_ranks=1) as hand:
        pairs = []
        for step in range(6):
            hand.accumulate(step)
            if step == 5 and hand.world.rank == 2:
                hand.strategy.gradients()[0].to_local().fill_(math.nan)
            pairs.append((float(hand.strategy.grad_norm()), float(Fsdp.grad_norm(hand.strategy))))
            hand.strategy.discard()
        return pairs


def test_a_norm_that_replicas_agree_on_keeps_its_bits(arena: Arena) -> None:
    """With three, a number that divides no binary fraction; if one's is not finite, none is."""
    for pairs in run_ranks(norms_by_hand, 3, arena).values():
        assert all(agreed == own for agreed, own in pairs[:-1])
        assert math.isnan(pairs[-1][0])


def compared_by_hand(
    environ: Mapping[str, str], arena: Arena, strategy: str, odd_rank: int | None
) -> tuple[bool, str]:
    """Compare ranks after a validation; if weights stayed gathered, and what is said of them.

    One bit of a weight of `odd_rank` is another.
    """
    with by_hand(
        environ, arena, strategy=strategy, shard_ranks=2, precision="bf16", reshard=False
    ) as hand:
        with torch.no_grad():
            loss_sum(hand.wrapped, read_batch(hand.reader, [0]))
        gathered = any(
            not isinstance(parameter, DTensor) for parameter in hand.wrapped.parameters()
        )
        if hand.world.rank == odd_rank:
            shard = next(iter(state_of(hand.strategy, ("weights",)).values())).to_local()
            shard.view(torch.int32).view(-1)[:1] ^= 1
        group = dist.group.WORLD
        assert group is not None
        try:
            refuse_differing_replicas(hand.wrapped, hand.world, group)
        except TrainingError as error:
            return gathered, str(error)
        return gathered, ""


def test_replicas_are_compared_shard_by_shard(arena: Arena) -> None:
    """Ranks 1 and 3 hold the same part; weights left gathered by a validation are no part of it."""
    for gathered, said in run_ranks(compared_by_hand, 4, arena, "hsdp", None).values():
        assert gathered
        assert said == ""
    for _, said in run_ranks(compared_by_hand, 4, arena, "hsdp", 3).values():
        assert "is not the same on ranks 1, 3. Nothing was saved" in said


def test_parts_of_one_copy_are_not_compared(arena: Arena) -> None:
    found = run_ranks(compared_by_hand, 2, arena, "fsdp", 1)
    assert {said for _, said in found.values()} == {""}
