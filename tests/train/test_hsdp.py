"""FSDP within replicas: the same curve as one replica, and its own exact resume."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pipeline_lib.train.batch import loss_sum, read_batch
from pipeline_lib.train.parallel.fsdp import Fsdp
from pipeline_lib.train.replicas import refuse_differing_replicas
from pipeline_lib.train.weights import local_part
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import digest_of, load_weights, losses, train, train_until_killed
from tests.train.native import by_hand


def run(arena: Arena, out: Path, ranks: int, **settings: Any) -> Path:
    run_ranks(train, ranks, arena.job(ranks, out, **settings))
    return out


def test_two_replicas_of_two_ranks_have_the_curve_of_ddp(arena: Arena, tmp_path: Path) -> None:
    ddp = losses(run(arena, tmp_path / "ddp", 4, strategy="ddp", replica="ddp"))
    hsdp = losses(run(arena, tmp_path / "hsdp", 4, strategy="hsdp", shard_ranks=2, replica="hsdp"))
    assert hsdp == pytest.approx(ddp, rel=2e-5)


def test_resume_is_bitwise(arena: Arena, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"strategy": "hsdp", "shard_ranks": 2, "save_every_steps": 2}
    whole = run(arena, tmp_path / "whole", 4, replica="whole", **settings)
    run_ranks(train_until_killed, 4, arena.job(4, tmp_path / "killed", replica="killed", **settings), 5)
    resumed = run(arena, tmp_path / "resumed", 4, replica="killed", **settings)
    assert digest_of(load_weights(resumed)) == digest_of(load_weights(whole))
    assert losses(resumed) == losses(whole)


def clipped_by_hand(environ: Mapping[str, str], arena: Arena) -> tuple[float, str]:
    """The norm of a step of which each rank finds another, and a digest of this rank's state after it."""
    plain: Any = Fsdp.grad_norm

    def found_otherwise(strategy: Fsdp) -> float:
        strategy._norm = plain(strategy) * (1 + strategy.world.rank * 2**-23)
        return strategy._norm

    with by_hand(environ, arena, strategy="hsdp", shard_ranks=2, max_grad_norm=1e-3) as hand:
        Fsdp.grad_norm = found_otherwise  # type: ignore[method-assign,assignment]  # in a process of its own
        norm = hand.step(0)
        return norm, digest_of({name: local_part(tensor)[0] for name, tensor in hand.state().items()})


def test_replicas_clip_by_the_same_bits(arena: Arena) -> None:
    """Though each adds up its norm by itself, and in another order. Ranks 0 and 1 are one replica, 2 and 3 another."""
    found = run_ranks(clipped_by_hand, 4, arena)
    assert len({norm for norm, _ in found.values()}) == 1
    assert found[0][1] == found[2][1] != found[1][1] == found[3][1]


def norms_by_hand(environ: Mapping[str, str], arena: Arena) -> list[tuple[float, float]]:
    """Of a few steps the norm, and that which this rank found; then that of gradients with a NaN."""
    with by_hand(environ, arena, strategy="hsdp", shard_ranks=1) as hand:
        pairs = []
        for step in range(6):
            hand.accumulate(step)
            if step == 5 and hand.world.rank == 2:
                hand.strategy.gradients()[0].to_local().fill_(math.nan)
            pairs.append((hand.strategy.grad_norm(), Fsdp.grad_norm(hand.strategy)))
            hand.strategy.discard()
        return pairs


def test_a_norm_that_replicas_agree_on_keeps_its_bits(arena: Arena) -> None:
    """With three of them, a number by which no binary fraction divides; and if one's is not finite, none is."""
    for pairs in run_ranks(norms_by_hand, 3, arena).values():
        assert all(agreed == own for agreed, own in pairs[:-1])
        assert math.isnan(pairs[-1][0])


def compared_by_hand(environ: Mapping[str, str], arena: Arena) -> bool:
    """Compare replicas, one of which differs in its weights, after a validation; whether weights were gathered."""
    with by_hand(environ, arena, strategy="hsdp", shard_ranks=2, precision="bf16", reshard=False) as hand:
        if hand.world.rank >= 2:
            for tensor in hand.strategy.tensors(("weights",)).values():
                tensor.to_local().mul_(1.5)
        with torch.no_grad():
            loss_sum(hand.wrapped, read_batch(hand.reader, [0]))
        group = dist.group.WORLD
        assert group is not None
        refuse_differing_replicas(hand.wrapped, hand.world, group)
        return any(not isinstance(parameter, DTensor) for parameter in hand.wrapped.parameters())


def test_what_a_validation_leaves_gathered_is_not_compared(arena: Arena) -> None:
    assert set(run_ranks(compared_by_hand, 4, arena).values()) == {True}
