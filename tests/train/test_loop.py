"""The promises of the training loop, on real gloo ranks."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.core.events import read_events
from pipeline_lib.core.files import read_json
from pipeline_lib.core.stage import processor
from pipeline_lib.data.blocks import BlockReader
from pipeline_lib.train.metrics import print_progress
from tests.ranks import run_ranks, run_ranks_that_may_fail
from tests.train.conftest import BLOCK_TOKENS, Arena, small_disk
from tests.train.helpers import (
    assert_same_result,
    losses,
    rows,
    train,
    train_and_listen,
    train_and_save_often,
    train_and_say,
    train_and_signal_again_and_again,
    train_and_signal_one_rank,
    train_until_killed,
    train_until_killed_on_an_older_cpu,
    train_until_one_rank_is_killed,
    train_while_one_rank_hangs,
    train_with_a_flipped_bit,
)


def run(
    arena: Arena, out: Path, ranks: int, resumes_at: int | None = None, **settings: Any
) -> Path:
    """Train; what it says of where it began has to be `resumes_at`."""
    job = arena.job(ranks, out, **settings)
    run_ranks(train, ranks, job)
    resumed = [
        e["step"] for e in read_events(job.run_dir / "events.jsonl") if e["event"] == "run.resumed"
    ]
    assert resumed == ([] if resumes_at is None else [resumes_at])
    return out


def test_it_learns_and_records_every_step(whole: Callable[..., Path]) -> None:
    out = whole(2, strategy="ddp", epochs=4)
    curve = losses(out)
    assert [row["step"] for row in rows(out)] == list(range(1, 25))
    assert curve[-1] < curve[0] - 0.1


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_loss_is_the_same_however_the_batch_is_spread(
    whole: Callable[..., Path], strategy: str
) -> None:
    spread = losses(whole(2, strategy=strategy, micro_batch_blocks=2))
    assert spread == pytest.approx(losses(whole(1, strategy="ddp")), rel=2e-5)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
def test_ranks_without_a_block_change_nothing(whole: Callable[..., Path], strategy: str) -> None:
    settings = {"global_batch_tokens": BLOCK_TOKENS, "max_steps": 4}
    idle = losses(whole(4, strategy=strategy, **settings))
    assert idle == pytest.approx(losses(whole(1, strategy="ddp", **settings)), rel=2e-5)


@pytest.mark.parametrize(
    ("strategy", "save_async"), [("ddp", True), ("fsdp", True), ("ddp", False)]
)
def test_resume_on_the_same_world_is_bitwise(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path, strategy: str, save_async: bool
) -> None:
    settings: dict[str, Any] = {
        "strategy": strategy,
        "save_every_steps": 2,
        "epochs": 2,
        "save_async": save_async,
    }
    run_ranks(train_until_killed, 4, arena.job(4, tmp_path / "killed", **settings), 5)
    resumed = run(arena, tmp_path / "resumed", 4, resumes_at=4, **settings)
    assert_same_result(resumed, whole(4, strategy=strategy, epochs=2))


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 1), ("fsdp", 2), ("zero1", 2)])
def test_the_last_checkpoint_has_weights_alone_and_a_run_killed_before_its_seal_needs_no_more(
    arena: Arena, tmp_path: Path, strategy: str, ranks: int
) -> None:
    settings: dict[str, Any] = {"strategy": strategy, "save_every_steps": 2}
    whole = run(arena, tmp_path / "whole", ranks, **settings)
    checkpoints = arena.job(ranks, tmp_path / "unused", **settings).run_dir / "checkpoints"
    before, last = sorted(checkpoints.glob("step-*"))[-2:]
    last_step = rows(whole)[-1]["step"]
    assert last.name.endswith(str(last_step))
    assert (before / "tensors").exists()
    assert not (last / "tensors").exists()
    again = run(arena, tmp_path / "again", ranks, resumes_at=last_step, **settings)
    assert_same_result(again, whole)
    assert {row["attempt"] for row in rows(again)} == {1}


@pytest.mark.parametrize("save_async", [True, False])
def test_by_auto_all_ranks_save_when_the_first_ones_clock_says_so(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path, save_async: bool
) -> None:
    """A step of a rank that waited for the others in vain would never end."""
    settings: dict[str, Any] = {
        "save_every_steps": "auto",
        "epochs": 2,
        "save_async": save_async,
        "keep_last": 20,
    }
    job = arena.job(2, tmp_path / "out", **settings)
    run_ranks(train_and_save_often, 2, job)
    events = read_events(job.run_dir / "events.jsonl")
    saved = [event["step"] for event in events if event["event"] == "checkpoint.saved"]
    assert saved[0] < 12, "it saved at the end alone"
    assert saved[-1] == 12
    assert_same_result(job.out, whole(2, epochs=2))


def test_by_auto_a_short_training_is_saved_at_its_end_alone(arena: Arena, tmp_path: Path) -> None:
    job = arena.job(2, tmp_path / "out", save_every_steps="auto")
    run_ranks(train, 2, job)
    assert [path.name for path in job.run_dir.glob("checkpoints/step-*")] == ["step-00000006"]


def test_resume_on_another_world_and_strategy_keeps_the_curve(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"save_every_steps": 2, "epochs": 2}
    run_ranks(
        train_until_killed, 4, arena.job(4, tmp_path / "killed", strategy="ddp", **settings), 5
    )
    moved = run(arena, tmp_path / "moved", 2, resumes_at=4, strategy="fsdp", **settings)
    assert losses(moved) == pytest.approx(losses(whole(4, strategy="ddp", epochs=2)), rel=2e-5)
    assert [row["step"] for row in rows(moved)] == list(range(1, 13))


def test_a_resume_on_another_kind_of_processor_is_recorded_and_said(
    arena: Arena, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"save_every_steps": 2, "epochs": 2}
    run_ranks(
        train_until_killed_on_an_older_cpu, 2, arena.job(2, tmp_path / "killed", **settings), 3
    )
    run_ranks(train_until_killed, 2, arena.job(2, tmp_path / "other", **settings), 5)
    job = arena.job(2, tmp_path / "same", **settings)
    said = run_ranks(train_and_listen, 2, job)[0]

    events = read_events(job.run_dir / "events.jsonl")
    [changed] = [event for event in events if event["event"] == "run.processor_changed"]
    kind = processor({})
    assert (changed["step"], changed["now"]) == (2, kind)
    assert set(changed["before"].split(" and ")) == {kind, f"{kind}, ATEN_CPU_CAPABILITY=default"}
    assert [event["processor"] for event in events if event["event"] == "run.start"] == [kind] * 3
    assert not any(line.startswith("warning:") for line in said)
    print_progress(said.append, last_step=6)("run.processor_changed", changed)
    assert said[-1].startswith("warning:")
    assert changed["before"] in said[-1]


def test_until_step_stops_and_a_later_run_continues_from_there(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path
) -> None:
    half = run(arena, tmp_path / "half", 2, until_step=3)
    rest = run(arena, tmp_path / "rest", 2, resumes_at=3)
    assert [row["step"] for row in rows(half)] == [1, 2, 3]
    assert losses(half) == losses(whole(2))[:3]
    assert_same_result(rest, whole(2))


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_a_step_of_samples_is_the_same_on_ranks_that_cannot_share_it_evenly(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path, strategy: str
) -> None:
    """Five blocks a step, and the schedule ends in the second epoch, which continues the first."""
    reader = BlockReader(arena.store.sealed(arena.shard) / "train")
    samples = round(5 * reader.index.documents / len(reader))
    settings: dict[str, Any] = {
        "strategy": strategy,
        "global_batch_samples": samples,
        "max_steps": 12,
    }
    run_ranks(
        train_until_killed, 2, arena.job(2, tmp_path / "killed", save_every_steps=2, **settings), 5
    )
    resumed = run(arena, tmp_path / "resumed", 2, resumes_at=4, save_every_steps=2, **settings)
    assert_same_result(resumed, whole(2, **settings))
    summary = read_json(resumed / "summary.json")
    assert (summary["batch_blocks"], summary["steps"], summary["epochs"]) == (
        5,
        12,
        round(12 * 5 / 22, 2),
    )
    assert losses(resumed) == pytest.approx(
        losses(whole(1, **{**settings, "strategy": "ddp"})), rel=2e-5
    )


def test_a_loss_that_is_not_finite_stops_every_rank_and_names_it(
    arena: Arena, tmp_path: Path
) -> None:
    """It begins anew once, as no step was saved before the trouble."""
    settings: dict[str, Any] = {
        "lr": 1e30,
        "warmup_fraction": 0.0,
        "max_grad_norm": 1e30,
        "epochs": 4,
    }
    with pytest.raises(AssertionError, match=r"Diverged: gave up at step \d+: the .* not finite"):
        run(arena, tmp_path / "out", 2, strategy="ddp", **settings)


def test_dropout_continues_with_the_same_random_numbers(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path
) -> None:
    lora: dict[str, Any] = {"method": "lora", "lora": {"rank": 4, "alpha": 8, "dropout": 0.3}}
    run_ranks(
        train_until_killed, 2, arena.job(2, tmp_path / "killed", save_every_steps=2, **lora), 4
    )
    resumed = run(arena, tmp_path / "resumed", 2, resumes_at=2, save_every_steps=2, **lora)
    assert_same_result(resumed, whole(2, **lora))


@pytest.mark.parametrize(
    ("ranks", "placement"),
    [
        (2, {"micro_batch_blocks": 2}),
        (2, {"context_ranks": 2}),
        (4, {"strategy": "fsdp", "recompute": "full"}),
    ],
)
def test_dropout_is_the_same_however_the_batch_is_spread(
    whole: Callable[..., Path], ranks: int, placement: dict[str, Any]
) -> None:
    lora: dict[str, Any] = {"method": "lora", "lora": {"rank": 4, "alpha": 8, "dropout": 0.3}}
    alone, spread = losses(whole(1, **lora)), losses(whole(ranks, **lora, **placement))
    assert spread == pytest.approx(alone, rel=2e-5)


def test_a_hanging_rank_ends_the_run_at_the_deadline(arena: Arena, tmp_path: Path) -> None:
    job = arena.job(2, tmp_path / "out", timeout_s=3)
    said = run_ranks(train_while_one_rank_hangs, 2, job, 3, 8.0)
    waited_s, message = said[0]
    assert "rank 0 lost a peer" in message
    assert 2.0 < waited_s < 7.0


def test_a_run_told_to_stop_earlier_keeps_its_own_checkpoints(arena: Arena, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_every_steps": 3, "keep_last": 1}
    run(arena, tmp_path / "long", 2, **settings)
    short = run(arena, tmp_path / "short", 2, until_step=2, **settings)
    assert [row["step"] for row in rows(short)] == [1, 2]
    steps = sorted(
        path.name
        for path in arena.job(2, tmp_path / "x", **settings).run_dir.glob("checkpoints/step-*")
    )
    assert steps == ["step-00000002", "step-00000006"]


def test_a_rank_that_dies_ends_the_run_at_once_and_the_next_is_bitwise(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"save_every_steps": 3, "epochs": 2}
    job = arena.job(2, tmp_path / "out", **settings)
    done, died = run_ranks_that_may_fail(train_until_one_rank_is_killed, 2, job, 8)
    noticed_s, message = done[0]
    assert noticed_s < 5
    assert "rank 0 lost a peer" in message
    assert died == {1: "ended with code -9 and no answer"}
    saved = sorted(path.name for path in (job.run_dir / "checkpoints").glob("step-*"))
    # the last was perhaps being written
    assert saved in (["step-00000003"], ["step-00000003", "step-00000006"])
    resumed = run(arena, tmp_path / "resumed", 2, resumes_at=int(saved[-1][-8:]), **settings)
    assert_same_result(resumed, whole(2, epochs=2))


@pytest.mark.parametrize("send", [train_and_signal_one_rank, train_and_signal_again_and_again])
def test_sigterm_saves_the_agreed_step_and_the_next_run_is_bitwise(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path, send: Callable[..., str]
) -> None:
    """Further signals while it saves change nothing."""
    settings: dict[str, Any] = {"strategy": "fsdp", "epochs": 2, "save_every_steps": 4}
    job = arena.job(2, tmp_path / "out", **settings)
    stopped = run_ranks(send, 2, job, 4)
    assert stopped[0] == stopped[1]
    reached = max(int(path.name[-8:]) for path in (job.run_dir / "checkpoints").glob("step-*"))
    assert f"after step {reached}," in stopped[0]
    resumed = run(arena, tmp_path / "resumed", 2, resumes_at=reached, **settings)
    assert_same_result(resumed, whole(2, strategy="fsdp", epochs=2))


def test_a_flipped_byte_costs_one_checkpoint_and_no_bit_of_the_result(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"save_every_steps": 2, "epochs": 2, "strategy": "fsdp"}
    job = arena.job(2, tmp_path / "killed", **settings)
    run_ranks(train_until_killed, 2, job, 7)
    victim = sorted((job.run_dir / "checkpoints" / "step-00000006" / "tensors").iterdir())[0]
    content = bytearray(victim.read_bytes())
    content[-100] ^= 1
    victim.write_bytes(content)
    resumed = run(arena, tmp_path / "resumed", 2, resumes_at=4, **settings)
    assert_same_result(resumed, whole(2, strategy="fsdp", epochs=2))


@pytest.mark.root
def test_a_full_disk_stops_every_rank_and_with_more_room_the_run_goes_on(
    arena: Arena, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"save_every_steps": 2, "keep_last": 1}
    with small_disk(tmp_path / "runs", "size=1m"):
        job = arena.job(2, tmp_path / "out", **settings)
        said = run_ranks(train_and_say, 2, job)
        assert said[0] == said[1]
        assert "DiskFull" in said[0]
        assert "needs 1." in said[0]
        assert list((job.run_dir / "checkpoints").iterdir()) == []
        subprocess.run(["mount", "-o", "remount,size=20m", str(tmp_path / "runs")], check=True)
        run_ranks(train, 2, job)
        assert [path.name for path in (job.run_dir / "checkpoints").iterdir()] == ["step-00000006"]


def test_a_checkpoint_of_other_settings_or_data_is_refused_by_every_rank(
    arena: Arena, tmp_path: Path
) -> None:
    run(arena, tmp_path / "out", 2, until_step=2)
    own = arena.job(2, tmp_path / "out", until_step=2)
    other = replace(
        arena.job(2, tmp_path / "other", lr=1e-3, save_every_steps=5), resume_from=own.resume_from
    )
    said = run_ranks(train_and_say, 2, other)
    assert said[0] == said[1]
    assert "IntegrityError" in said[0]
    assert "train.lr is 0.003 there and 0.001 here" in said[0]
    assert "save_every_steps" not in said[0]


def test_the_wait_for_checkpoints_is_measured(arena: Arena, tmp_path: Path) -> None:
    out = run(arena, tmp_path / "out", 2, save_every_steps=2)
    waits = [row["checkpoint_wait_s"] for row in rows(out)]
    assert [wait > 0 for wait in waits] == [False, False, True, False, True, False]
    events = read_events(arena.job(2, out, save_every_steps=2).run_dir / "events.jsonl")
    saved = [event for event in events if event["event"] == "checkpoint.saved"]
    assert [event["step"] for event in saved] == [2, 4, 6]
    assert all(
        event["bytes"] > 0 and event["wait_s"] > 0 and event["duration_s"] > 0 for event in saved
    )


def test_a_flipped_bit_on_one_replica_is_found_at_the_next_save(
    arena: Arena, tmp_path: Path
) -> None:
    job = arena.job(2, tmp_path / "out", strategy="ddp", save_every_steps=2)
    said = run_ranks(train_with_a_flipped_bit, 2, job, 3)
    assert said[0] == said[1]
    assert "embed_tokens.weight is not the same on ranks 0, 1. Nothing was saved" in said[0]
    assert [path.name for path in (job.run_dir / "checkpoints").iterdir()] == ["step-00000002"]


def test_local_sgd_saves_and_stops_only_where_the_models_are_one(
    arena: Arena, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "local_sgd_steps": 2,
        "save_every_steps": 3,
        "epochs": 2,
        "keep_last": 9,
    }
    uninterrupted = run(arena, tmp_path / "whole", 2, replica="whole", **settings)
    saved = arena.job(2, uninterrupted, replica="whole", **settings).run_dir / "checkpoints"
    assert sorted(int(path.name[-8:]) for path in saved.iterdir()) == [4, 6, 10, 12]
    job = arena.job(2, tmp_path / "out", replica="stopped", **settings)
    stopped = run_ranks(train_and_signal_one_rank, 2, job, 7)
    assert "after step 8," in stopped[0] == stopped[1]
    resumed = run(arena, tmp_path / "resumed", 2, resumes_at=8, replica="stopped", **settings)
    assert_same_result(resumed, uninterrupted)


@pytest.mark.parametrize("save_async", [True, False])
def test_local_sgd_makes_the_models_one_where_the_guards_save(
    arena: Arena, tmp_path: Path, save_async: bool
) -> None:
    settings: dict[str, Any] = {
        "local_sgd_steps": 2,
        "guards": {"rollback_every_steps": 3},
        "keep_last": 9,
    }
    out = run(
        arena, tmp_path / "out", 2, save_async=save_async, replica=str(save_async), **settings
    )
    saved = arena.job(2, out, replica=str(save_async), **settings).run_dir / "checkpoints"
    assert sorted(int(path.name[-8:]) for path in saved.iterdir()) == [3, 6]
