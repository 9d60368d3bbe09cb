"""The promises of the training loop, on real gloo ranks."""

from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.base.events import read_events
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import (
    digest_of,
    load_weights,
    losses,
    rows,
    train,
    train_and_signal_one_rank,
    train_until_killed,
    train_while_one_rank_hangs,
)


def run(arena: Arena, out: Path, ranks: int, resumes_at: int | None = None, **settings: Any) -> Path:
    """Train; what it says of where it began has to be `resumes_at`."""
    job = arena.job(ranks, out, **settings)
    run_ranks(train, ranks, job)
    resumed = [e["step"] for e in read_events(job.run_dir / "events.jsonl") if e["event"] == "run.resumed"]
    assert resumed == ([] if resumes_at is None else [resumes_at])
    return out


def test_it_learns_and_records_every_step(arena: Arena, tmp_path: Path) -> None:
    out = run(arena, tmp_path / "out", 2, strategy="ddp", epochs=4)
    curve = losses(out)
    assert [row["step"] for row in rows(out)] == list(range(1, 25))
    assert curve[-1] < curve[0] - 0.1


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_loss_is_the_same_however_the_batch_is_spread(arena: Arena, tmp_path: Path, strategy: str) -> None:
    reference = losses(run(arena, tmp_path / "one", 1, strategy="ddp", replica="one"))
    spread = losses(run(arena, tmp_path / "two", 2, strategy=strategy, micro_batch_blocks=2, replica="two"))
    assert spread == pytest.approx(reference, rel=2e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_resume_on_the_same_world_is_bitwise(arena: Arena, tmp_path: Path, strategy: str) -> None:
    settings: dict[str, Any] = {"strategy": strategy, "save_every_steps": 2, "epochs": 2}
    whole = run(arena, tmp_path / "whole", 4, replica="whole", **settings)
    run_ranks(train_until_killed, 4, arena.job(4, tmp_path / "killed", replica="killed", **settings), 5)
    resumed = run(arena, tmp_path / "resumed", 4, resumes_at=4, replica="killed", **settings)
    assert digest_of(load_weights(resumed)) == digest_of(load_weights(whole))
    assert losses(resumed) == losses(whole)


def test_resume_on_another_world_and_strategy_keeps_the_curve(arena: Arena, tmp_path: Path) -> None:
    whole = run(arena, tmp_path / "whole", 4, strategy="ddp", epochs=2, replica="whole")
    settings: dict[str, Any] = {"save_every_steps": 2, "epochs": 2, "replica": "moved"}
    run_ranks(train_until_killed, 4, arena.job(4, tmp_path / "killed", strategy="ddp", **settings), 5)
    moved = run(arena, tmp_path / "moved", 2, resumes_at=4, strategy="fsdp", **settings)
    assert losses(moved) == pytest.approx(losses(whole), rel=2e-5)
    assert [row["step"] for row in rows(moved)] == list(range(1, 13))


def test_until_step_stops_and_a_later_run_continues_from_there(arena: Arena, tmp_path: Path) -> None:
    whole = run(arena, tmp_path / "whole", 2, replica="whole")
    half = run(arena, tmp_path / "half", 2, replica="split", until_step=3)
    rest = run(arena, tmp_path / "rest", 2, resumes_at=3, replica="split")
    assert [row["step"] for row in rows(half)] == [1, 2, 3]
    assert losses(half) == losses(whole)[:3]
    assert digest_of(load_weights(rest)) == digest_of(load_weights(whole))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_lora_trains_adapters_only_and_matches_one_rank(arena: Arena, tmp_path: Path, strategy: str) -> None:
    lora: dict[str, Any] = {"method": "lora", "lora": {"rank": 4, "alpha": 8}, "epochs": 2}
    one = run(arena, tmp_path / "one", 1, strategy="ddp", replica="one", **lora)
    two = run(arena, tmp_path / "two", 2, strategy=strategy, replica="two", **lora)
    assert losses(two) == pytest.approx(losses(one), rel=2e-5)
    assert losses(two)[-1] < losses(two)[0]
    assert all("lora_" in name for name in load_weights(two))


def test_a_loss_that_is_not_finite_stops_every_rank_and_names_it(arena: Arena, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="TrainingError: loss .* not finite"):
        run(arena, tmp_path / "out", 2, strategy="ddp", lr=1e30, warmup_fraction=0.0, max_grad_norm=1e30)


def test_sigterm_saves_the_agreed_step_and_the_next_run_is_bitwise(arena: Arena, tmp_path: Path) -> None:
    whole = run(arena, tmp_path / "whole", 2, strategy="fsdp", epochs=2, replica="whole")
    job = arena.job(2, tmp_path / "out", strategy="fsdp", epochs=2, replica="signalled")
    stopped = run_ranks(train_and_signal_one_rank, 2, job, 4)
    assert stopped[0] == stopped[1]
    resumed = run(arena, tmp_path / "resumed", 2, resumes_at=4, strategy="fsdp", epochs=2, replica="signalled")
    assert digest_of(load_weights(resumed)) == digest_of(load_weights(whole))


def test_dropout_continues_with_the_same_random_numbers(arena: Arena, tmp_path: Path) -> None:
    adapters = {"rank": 4, "alpha": 8, "dropout": 0.3}
    lora: dict[str, Any] = {"method": "lora", "lora": adapters, "save_every_steps": 2}
    whole = run(arena, tmp_path / "whole", 2, replica="whole", **lora)
    run_ranks(train_until_killed, 2, arena.job(2, tmp_path / "killed", replica="killed", **lora), 4)
    resumed = run(arena, tmp_path / "resumed", 2, resumes_at=2, replica="killed", **lora)
    assert digest_of(load_weights(resumed)) == digest_of(load_weights(whole))


def test_a_hanging_rank_ends_the_run_at_the_deadline(arena: Arena, tmp_path: Path) -> None:
    job = arena.job(2, tmp_path / "out", timeout_s=3)
    said = run_ranks(train_while_one_rank_hangs, 2, job, 3, 8.0)
    waited_s, message = said[0]
    assert "rank 0 lost a peer" in message
    assert 2.0 < waited_s < 7.0


def test_a_run_told_to_stop_earlier_keeps_its_own_checkpoints(arena: Arena, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"replica": "shorter", "save_every_steps": 3, "keep_last": 1}
    run(arena, tmp_path / "long", 2, **settings)
    short = run(arena, tmp_path / "short", 2, until_step=2, **settings)
    assert [row["step"] for row in rows(short)] == [1, 2]
    steps = sorted(path.name for path in arena.job(2, tmp_path / "x", **settings).run_dir.glob("checkpoints/step-*"))
    assert steps == ["step-00000002", "step-00000006"]
