"""Steps that cannot be trusted: the same verdict everywhere, and nothing left of them."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.train import Guards
from pipeline_lib.core.errors import Interrupted, TrainingError
from pipeline_lib.train.checkpoint import read_state
from pipeline_lib.train.guards import MAX_OVERFLOWS, Verdict, Window, judge
from tests.ranks import run_ranks
from tests.train.conftest import Arena, make_arena
from tests.train.helpers import assert_same_result, rows
from tests.train.poison import INF_GRADIENT, NAN_LOSS, SPIKE, Course, Poison, train_poisoned

NAN, INF = math.nan, math.inf


TOKENS = 6400  # supervised, of an ordinary step


def window_after(losses: list[float | None], **settings: Any) -> Window:
    """The window after one step for each of `losses`; None is a step that was skipped."""
    window = Window(Guards(**settings))
    for step, loss in enumerate(losses, 1):
        refused = {} if loss is not None else {"verdict": "skip"}
        window.add({"step": step, "loss": loss, "supervised_tokens": TOKENS, **refused})
    return window


def verdict(
    window: Window,
    step: int,
    loss: float,
    grad_norm: float = 1.0,
    is_fp16: bool = False,
    tokens: int = TOKENS,
) -> Verdict:
    return judge(window, is_fp16, step, loss, grad_norm, tokens).verdict


@pytest.mark.parametrize(
    ("loss", "grad_norm"), [(NAN, 1.0), (INF, 1.0), (2.0, NAN), (2.0, INF), (NAN, NAN)]
)
def test_what_is_not_finite_is_skipped_from_the_first_step_on(
    loss: float, grad_norm: float
) -> None:
    assert verdict(window_after([]), 1, loss, grad_norm) == Verdict.SKIP


def test_a_short_last_step_may_deviate_more_by_the_square_root_of_its_share() -> None:
    window = window_after([2.0, 2.1] * 10)  # median 2.05, deviation 0.05
    assert verdict(window, 21, 3.2) == Verdict.SKIP
    assert verdict(window, 21, 3.2, tokens=100) == Verdict.APPLY
    assert verdict(window, 21, 2.05 + 20 * 0.05 * 8 + 0.1, tokens=100) == Verdict.SKIP


def test_a_spike_is_measured_by_the_last_accepted_losses() -> None:
    chance = random.Random(0)
    losses: list[float | None] = [2.0 + chance.uniform(-0.1, 0.1) for _ in range(30)]
    assert verdict(window_after(losses), 31, 2.5) == Verdict.APPLY
    assert verdict(window_after(losses), 31, 4.0) == Verdict.SKIP
    assert verdict(window_after(losses, spike_deviations=None), 31, 1e9) == Verdict.APPLY
    assert verdict(window_after(losses[:9]), 10, 4.0) == Verdict.APPLY
    assert verdict(window_after(losses[:10]), 11, 4.0) == Verdict.SKIP


def test_losses_that_hardly_vary_make_no_spike_of_the_next() -> None:
    assert verdict(window_after([2.0] * 30), 31, 2.1) == Verdict.APPLY
    assert verdict(window_after([2.0] * 30), 31, 2.3) == Verdict.SKIP


def test_a_curve_that_falls_is_never_a_spike() -> None:
    window = window_after([])
    chance = random.Random(1)
    for step in range(1, 400):
        loss = 8.0 * math.exp(-step / 60) + 1.0 + chance.gauss(0, 0.05)
        assert verdict(window, step, loss) == Verdict.APPLY
        window.add({"step": step, "loss": loss, "supervised_tokens": TOKENS})


def test_what_was_skipped_is_in_no_measure() -> None:
    losses: list[float | None] = [2.0, 2.1] * 10
    assert list(window_after([*losses, None]).accepted) == list(window_after(losses).accepted)


def test_more_skips_than_allowed_go_back_once_and_then_give_up() -> None:
    window = window_after([1.0, None, None])
    assert [verdict(window_after([1.0, *[None] * n]), n + 2, NAN) for n in range(4)] == [
        *[Verdict.SKIP] * 3,
        Verdict.ROLL_BACK,
    ]
    window.add({"step": 4, "loss": None, "verdict": "roll_back"})
    for step in (5, 6, 7):
        assert verdict(window, step, NAN) == Verdict.SKIP
        window.add({"step": step, "loss": None, "verdict": "skip"})
    assert verdict(window, 8, NAN) == Verdict.ABORT


def test_skips_far_apart_are_forgiven() -> None:
    losses: list[float | None] = ([None] + [2.0] * 30) * 10
    window = window_after([])
    for step, loss in enumerate(losses, 1):
        found = verdict(window, step, NAN if loss is None else loss)
        assert found == (Verdict.SKIP if loss is None else Verdict.APPLY)
        window.add(
            {"step": step, "loss": loss, "supervised_tokens": TOKENS}
            | ({"verdict": found} if loss is None else {})
        )


def test_a_skip_counts_in_as_many_steps_as_the_window_has() -> None:
    window = window_after([None], max_skips=1, window_steps=10)
    assert verdict(window, 10, NAN) == Verdict.ROLL_BACK
    assert verdict(window, 11, NAN) == Verdict.SKIP


def test_whatever_was_refused_right_before_an_overflow_is_no_longer_forgiven() -> None:
    refused: list[float | None] = [None] * MAX_OVERFLOWS
    settings = {"max_skips": MAX_OVERFLOWS + 1}
    step = MAX_OVERFLOWS + 1
    assert verdict(window_after(refused, **settings), step, 2.0, INF, is_fp16=True) == Verdict.SKIP
    assert (
        verdict(window_after(refused[1:], **settings), step, 2.0, INF, is_fp16=True)
        == Verdict.OVERFLOW
    )
    assert (
        verdict(window_after([*refused, 2.0], **settings), step + 1, 2.0, INF, is_fp16=True)
        == Verdict.OVERFLOW
    )


def test_a_window_reads_back_from_a_checkpoint_as_it_was() -> None:
    window = window_after([2.0, 2.1, None, None])
    window.add({"step": 5, "loss": None, "verdict": "roll_back"})
    for step in (6, 7):
        window.add({"step": step, "loss": None, "verdict": "skip"})
    read = Window.from_json(window.guards, json.loads(json.dumps(window.to_json())))
    assert vars(read) == vars(window)
    assert (read.refused_in_a_row, read.has_rolled_back, list(read.skipped)) == (2, True, [6, 7])


def test_overflows_of_fp16_count_apart_until_there_are_too_many() -> None:
    window = window_after([2.0] * 3)
    for step in range(4, 4 + MAX_OVERFLOWS):
        assert verdict(window, step, 2.0, INF, is_fp16=True) == Verdict.OVERFLOW
        assert verdict(window, step, NAN, INF, is_fp16=True) == Verdict.SKIP
        window.add({"step": step, "loss": 2.0, "verdict": "overflow"})
    assert verdict(window, 4 + MAX_OVERFLOWS, 2.0, INF, is_fp16=True) == Verdict.SKIP
    assert verdict(window_after([2.0]), 2, 2.0, INF, is_fp16=False) == Verdict.SKIP


def poisoned(
    arena: Arena, out: Path, poison: Poison, ranks: int = 2, **settings: Any
) -> list[Course]:
    """The course of each rank of a training with `poison`."""
    courses = run_ranks(train_poisoned, ranks, arena.job(ranks, out, **settings), poison)
    return [courses[rank] for rank in range(ranks)]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_bad_step_on_one_rank_is_skipped_by_all_and_changes_no_bit(
    arena: Arena, tmp_path: Path, strategy: str
) -> None:
    poison = Poison({4: NAN_LOSS, 6: INF_GRADIENT, 14: SPIKE})
    courses = poisoned(
        arena, tmp_path / "out", poison, strategy=strategy, epochs=3, warmup_fraction=0.0
    )
    for course in courses:
        changed = {
            step for step in range(1, 18) if course.digests[step + 1] != course.digests[step]
        }
        assert changed == set(range(1, 18)) - {4, 6, 14}
    skipped = [course.named("step.skipped") for course in courses]
    assert skipped[0] == skipped[1]
    assert [(event["step"], event["verdict"], len(event["blocks"])) for event in skipped[0]] == [
        (4, "skip", 4),
        (6, "skip", 2),
        (14, "skip", 4),
    ]
    metrics = rows(tmp_path / "out")
    assert [row["step"] for row in metrics if row.get("verdict") == "skip"] == [4, 6, 14]
    assert metrics[3]["loss"] is None
    assert metrics[5]["loss"] > 0
    assert metrics[5]["grad_norm"] is None
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["steps"], summary["updates"], summary["skipped_steps"]) == (18, 15, 3)
    for name in ("metrics.jsonl", "summary.json"):
        assert "NaN" not in (tmp_path / "out" / name).read_text()
        assert "Infinity" not in (tmp_path / "out" / name).read_text()


ROLLING_BACK: dict[str, Any] = {
    "guards": {"max_skips": 1, "rollback_every_steps": 3},
    "epochs": 2,
    "keep_last": 9,
}
TWICE_BAD = {8: NAN_LOSS, 9: INF_GRADIENT}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_too_many_bad_steps_take_the_run_back_and_their_batches_stay_used(
    arena: Arena, tmp_path: Path, strategy: str
) -> None:
    courses = poisoned(
        arena, tmp_path / "out", Poison(TWICE_BAD), strategy=strategy, **ROLLING_BACK
    )
    for course in courses:
        assert course.digests[10] == course.digests[7] != course.digests[8]
        assert course.digests[11] != course.digests[10]
        back = [(event["step"], event["to_step"]) for event in course.named("run.rolled_back")]
        assert back == [(9, 6)]
    metrics = rows(tmp_path / "out")
    assert [row["step"] for row in metrics] == list(range(1, 13))
    marked = {row["step"]: row["verdict"] for row in metrics if "verdict" in row}
    assert marked == {7: "undone", 8: "skip", 9: "roll_back"}
    run_dir = arena.job(2, tmp_path / "out", strategy=strategy, **ROLLING_BACK).run_dir
    window = read_state(run_dir / "checkpoints" / "step-00000009")["window"]
    assert window["accepted"] == [row["loss"] for row in metrics[:6]], (
        "what was undone is compared with no more"
    )
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["updates"] == 9


ADAPTERS: dict[str, Any] = {"method": "lora", "lora": {"rank": 4, "alpha": 8, "dropout": 0.3}}
WITH_DROPOUT: dict[str, Any] = {
    **ROLLING_BACK,
    **ADAPTERS,
    "guards": {"max_skips": 1, "rollback_every_steps": 6},
}


@pytest.fixture(scope="module")
def not_killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    poisoned(make_arena(root), root / "out", Poison(TWICE_BAD), **WITH_DROPOUT)
    return root / "out"


@pytest.mark.parametrize(
    "killed_at", [("run.rolled_back", 9), ("step.begin", 10), ("step.begin", 12)]
)
def test_a_kill_after_going_back_changes_nothing_of_the_result(
    arena: Arena, not_killed: Path, tmp_path: Path, killed_at: tuple[str, int]
) -> None:
    poisoned(arena, tmp_path / "killed", Poison(TWICE_BAD, killed_at), **WITH_DROPOUT)
    resumed = poisoned(arena, tmp_path / "resumed", Poison(TWICE_BAD), **WITH_DROPOUT)
    [event] = resumed[0].named("run.resumed")
    assert event["step"] == (6 if killed_at[0] == "run.rolled_back" else 9)
    assert_same_result(tmp_path / "resumed", not_killed)
    found, expected = (
        [row.get("verdict") for row in rows(out)] for out in (tmp_path / "resumed", not_killed)
    )
    assert found == expected
    counted = ("steps", "updates", "skipped_steps")
    summaries = [
        json.loads((out / "summary.json").read_text()) for out in (tmp_path / "resumed", not_killed)
    ]
    assert [summaries[0][key] for key in counted] == [summaries[1][key] for key in counted]


def test_a_second_time_the_run_gives_up_and_says_where_to_look(
    arena: Arena, tmp_path: Path
) -> None:
    poison = Poison({**TWICE_BAD, 11: NAN_LOSS, 12: NAN_LOSS})
    courses = poisoned(arena, tmp_path / "out", poison, strategy="ddp", **ROLLING_BACK)
    assert courses[0].error == courses[1].error
    assert courses[0].exit_code == TrainingError.exit_code == 70
    for part in (
        "gave up at step 12",
        "loss nan",
        "after going back to a checkpoint once",
        "lower train.lr",
    ):
        assert part in courses[0].error
    for event in courses[0].named("step.skipped")[-2:]:
        assert f"step {event['step']}: {', '.join(map(str, event['blocks']))}" in courses[0].error


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "ddp"},
        {"strategy": "fsdp", "offload": "optimizer+params"},
        {"strategy": "zero2", "precision": "bf16"},
        {"strategy": "zero3", "precision": "bf16"},
        {"strategy": "zero1", "precision": "bf16", "method": "lora"},
        {"strategy": "fsdp", "precision": "bf16", "method": "lora"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
def test_early_trouble_takes_the_run_back_to_the_model_as_it_was(
    arena: Arena, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """No checkpoint of step 0 is written for that."""
    courses = poisoned(
        arena, tmp_path / "out", Poison(TWICE_BAD), epochs=2, guards={"max_skips": 1}, **settings
    )
    for course in courses:
        assert course.digests[10] == course.digests[1] != course.digests[7]
        assert [event["to_step"] for event in course.named("run.rolled_back")] == [0]
    assert [row.get("verdict") for row in rows(tmp_path / "out")][:7] == ["undone"] * 7
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["updates"] == 3


BY_THE_DIGEST: dict[str, Any] = {
    "guards": {"max_skips": 1, "rollback_every_steps": 5},
    "epochs": 2,
    "keep_last": 1,
}


@pytest.fixture(scope="module")
def back_to_five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("five")
    courses = poisoned(make_arena(root), root / "out", Poison(TWICE_BAD), **BY_THE_DIGEST)
    assert [event["to_step"] for event in courses[0].named("run.rolled_back")] == [5]
    return root / "out"


@pytest.mark.parametrize(
    ("save_every_steps", "ends_in"),
    [
        (1, {}),
        (4, {}),
        (7, {}),
        (3, {"killed_at": ("step.begin", 9)}),
        (100, {"stopped_in": 7}),
        (4, {"stopped_in": 8}),
    ],
)
def test_how_far_the_run_goes_back_does_not_depend_on_what_happened_to_be_saved(
    arena: Arena, back_to_five: Path, tmp_path: Path, save_every_steps: int, ends_in: dict[str, Any]
) -> None:
    settings = {**BY_THE_DIGEST, "save_every_steps": save_every_steps}
    if ends_in:
        poisoned(arena, tmp_path / "ended", Poison(TWICE_BAD, **ends_in), **settings)
    poisoned(arena, tmp_path / "out", Poison(TWICE_BAD), **settings)
    assert_same_result(tmp_path / "out", back_to_five)
    found, expected = (
        [row.get("verdict") for row in rows(out)] for out in (tmp_path / "out", back_to_five)
    )
    assert found == expected


def test_the_step_to_go_back_to_outlives_newer_ones_while_a_refused_step_counts(
    arena: Arena, tmp_path: Path
) -> None:
    """Step 8 is refused and saved, and step 4 is needed until the refusal is forgotten."""
    settings = {
        **BY_THE_DIGEST,
        "guards": {"max_skips": 1, "rollback_every_steps": 4},
        "save_every_steps": 1,
    }
    courses = poisoned(arena, tmp_path / "out", Poison({8: NAN_LOSS, 11: NAN_LOSS}), **settings)
    assert [(event["step"], event["to_step"]) for event in courses[0].named("run.rolled_back")] == [
        (11, 4)
    ]


@pytest.mark.parametrize("is_damaged", [False, True], ids=["missing", "damaged"])
@pytest.mark.parametrize(
    ("save_every_steps", "back_to"),
    [(7, []), (4, [4])],
    ids=["from the start", "from a checkpoint before"],
)
def test_without_the_checkpoint_to_go_back_to_the_steps_before_are_computed_again(
    arena: Arena,
    back_to_five: Path,
    tmp_path: Path,
    save_every_steps: int,
    back_to: list[int],
    is_damaged: bool,
) -> None:
    """As in a run of a version that saved multiples of `save_every_steps` alone."""
    settings = {**BY_THE_DIGEST, "save_every_steps": save_every_steps, "keep_last": 9}
    poisoned(arena, tmp_path / "killed", Poison(TWICE_BAD, ("step.begin", 9)), **settings)
    run_dir = arena.job(2, tmp_path / "out", **settings).run_dir
    needed = run_dir / "checkpoints" / "step-00000005"
    if is_damaged:
        (needed / "state.json").write_text("{}")
    else:
        shutil.rmtree(needed)

    for course in poisoned(arena, tmp_path / "back", Poison(TWICE_BAD), **settings):
        assert course.exit_code == Interrupted.exit_code == 75
        assert f"{needed} is missing or damaged" in course.error
        assert ("step-00000004" if back_to else "the start") in course.error
    newest = 8 if save_every_steps == 4 else 7
    assert [path.name for path in (run_dir / "set-aside").iterdir()] == [f"step-0000000{newest}"]

    again = poisoned(arena, tmp_path / "out", Poison(TWICE_BAD), **settings)[0]
    assert [event["step"] for event in again.named("run.resumed")] == back_to
    assert [event["to_step"] for event in again.named("run.rolled_back")] == [5]
    assert_same_result(tmp_path / "out", back_to_five)
    found, expected = (
        [row.get("verdict") for row in rows(out)] for out in (tmp_path / "out", back_to_five)
    )
    assert found == expected
