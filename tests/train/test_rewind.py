"""A rewound run continues with the bits of one that was interrupted at the named checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.core.events import read_events
from pipeline_lib.core.files import read_json, read_jsonl
from pipeline_lib.train.rank import RankJob
from pipeline_lib.upkeep.rewind import rewind
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import assert_same_result, rows, train, train_until_killed
from tests.train.poison import INF_GRADIENT, NAN_LOSS, Poison, train_poisoned


def rewound(job: RankJob, step: int) -> list[str]:
    """Rewind the run of `job`; what is set aside then."""
    rewind(job.spec, step, job.store, lambda _: None)
    return sorted(path.name for path in (job.run_dir / "set-aside").iterdir())


def resumed_steps(job: RankJob) -> list[int]:
    return [
        event["step"]
        for event in read_events(job.run_dir / "events.jsonl")
        if event["event"] == "run.resumed"
    ]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_killed_run_that_is_rewound_ends_with_the_bits_of_an_uninterrupted_one(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path, strategy: str
) -> None:
    adapters: dict[str, Any] = {
        "method": "lora",
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.3},
        "epochs": 2,
    }
    settings: dict[str, Any] = {
        **adapters,
        "strategy": strategy,
        "save_every_steps": 2,
        "keep_last": 9,
    }
    settings |= {"save_async": False}
    run_ranks(train_until_killed, 2, arena.job(2, tmp_path / "killed", **settings), 10)
    aside = rewound(arena.job(2, tmp_path / "rewound", **settings), 4)
    assert aside == ["step-00000006", "step-00000008"]
    job = arena.job(2, tmp_path / "resumed", **settings)
    run_ranks(train, 2, job)
    assert resumed_steps(job) == [4]
    assert_same_result(job.out, whole(2, strategy=strategy, **adapters))
    live = [row["step"] for row in read_jsonl(job.run_dir / "metrics.jsonl")]
    # what was after the checkpoint stays, as after a kill
    assert live == [*range(1, 10), *range(5, 13)]
    assert [row["step"] for row in rows(job.out)] == list(range(1, 13))


def test_stopped_by_until_step_rewound_twice_and_continued(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"epochs": 2, "save_every_steps": 3, "keep_last": 9}
    run_ranks(train, 2, arena.job(2, tmp_path / "nine", until_step=9, **settings))
    rewound(arena.job(2, tmp_path / "x", **settings), 3)
    run_ranks(train, 2, arena.job(2, tmp_path / "seven", until_step=7, **settings))
    aside = rewound(arena.job(2, tmp_path / "x", **settings), 3)
    assert aside == ["step-00000006", "step-00000006.2", "step-00000007", "step-00000009"]
    job = arena.job(2, tmp_path / "rest", **settings)
    run_ranks(train, 2, job)
    assert resumed_steps(job) == [3, 3]
    assert_same_result(job.out, whole(2, epochs=2))


BAD = Poison({8: NAN_LOSS, 9: INF_GRADIENT})
GUARDED: dict[str, Any] = {"save_every_steps": 2, "epochs": 2, "keep_last": 9}
GUARDED["guards"] = {"max_skips": 1, "rollback_every_steps": 3}


def test_refused_steps_and_the_way_back_are_the_same_again(arena: Arena, tmp_path: Path) -> None:
    """Step 8 is refused and saved; step 9 takes the run back to 6, and is made again later.

    It is made again after the rewinding.
    """
    run_ranks(train_poisoned, 2, arena.job(2, tmp_path / "whole", **GUARDED), BAD)
    aside = rewound(arena.job(2, tmp_path / "x", **GUARDED), 8)
    assert aside == ["step-00000009", "step-00000010", "step-00000012"]
    job = arena.job(2, tmp_path / "again", **GUARDED)
    again = run_ranks(train_poisoned, 2, job, BAD)
    assert again[0].error == ""
    assert resumed_steps(job) == [8]
    assert [(event["step"], event["to_step"]) for event in again[0].named("run.rolled_back")] == [
        (9, 6)
    ]
    assert_same_result(job.out, tmp_path / "whole")
    verdicts = [[row.get("verdict") for row in rows(out)] for out in (job.out, tmp_path / "whole")]
    assert verdicts[0] == verdicts[1]


def test_the_best_step_is_the_same_again(arena: Arena, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "validate_every_steps": 2,
        "lr": 2e-2,
        "epochs": 4,
        "save_every_steps": 5,
    }
    settings |= {"keep_best": True, "keep_last": 2}
    run_ranks(train, 2, arena.job(2, tmp_path / "whole", **settings))
    saved = sorted(
        int(path.name[-8:])
        for path in arena.job(2, tmp_path / "x", **settings).run_dir.glob("c*/step-*")
    )
    assert len(saved) == 3, "the best and the last two"
    rewound(arena.job(2, tmp_path / "x", **settings), saved[0])
    job = arena.job(2, tmp_path / "again", **settings)
    run_ranks(train, 2, job)
    assert resumed_steps(job) == [saved[0]]
    assert_same_result(job.out, tmp_path / "whole")
    one, other = (read_json(out / "summary.json") for out in (job.out, tmp_path / "whole"))
    assert one["result_step"] == other["result_step"] == one["best_step"] < 24
