"""FSDP within replicas: the same curve as one replica, and its own exact resume."""

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import digest_of, load_weights, losses, train, train_until_killed


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
