"""How often `auto` saves a training, and what is said of a disk that cannot take the saves."""

import pytest

from pipeline_lib.config.train import Train
from pipeline_lib.core.events import EventName
from pipeline_lib.plan.saving import auto_apart_s, slow_saves
from pipeline_lib.train.saving_pace import warn_of_slow_saves

GB = 10**9
EPOCH_STEPS = 1000


def train_of(every_steps: int | str, is_async: bool = True) -> Train:
    return Train.model_validate(
        {
            "strategy": "zero2",
            "global_batch_tokens": 1024,
            "save_every_steps": every_steps,
            "save_async": is_async,
        }
    )


@pytest.mark.parametrize(
    ("save_s", "is_async", "apart_s"),
    [(0.2, True, 60), (0.2, False, 60), (67, True, 670), (67, False, 1340)],
)
def test_auto_saves_once_a_minute_or_as_seldom_as_the_disk_asks_for(
    save_s: float, is_async: bool, apart_s: float
) -> None:
    train = train_of("auto", is_async)
    assert auto_apart_s(train, save_s) == apart_s
    assert slow_saves(train, EPOCH_STEPS, 57 * GB, save_s, step_s=15.0) == ""


def test_the_guards_saves_are_still_warned_of_with_auto() -> None:
    said = slow_saves(train_of("auto"), EPOCH_STEPS, 57 * GB, save_s=67.0, step_s=0.1)
    assert "with train.guards.rollback_every_steps: 670," in said


def test_57_gb_every_15_seconds_on_a_disk_of_850_mb_a_second() -> None:
    """As it was seen on four H200: 30 steps of 1.5 s took 185 s."""
    said = slow_saves(train_of(10), EPOCH_STEPS, 57 * GB, save_s=67.0, step_s=1.5)
    assert "57.00 GB" in said
    assert "every 10 steps (15.0 s)" in said
    assert "waits 52.0 s for each" in said
    assert "train.save_every_steps: 45, " in said
    assert slow_saves(train_of(45), EPOCH_STEPS, 57 * GB, save_s=67.0, step_s=1.5) == ""


def test_what_the_guards_ask_for_is_named_where_it_is_too_often() -> None:
    said = slow_saves(train_of(500), EPOCH_STEPS, 57 * GB, save_s=67.0, step_s=0.1)
    assert "train.save_every_steps: 670 and train.guards.rollback_every_steps: 670," in said


def test_a_training_that_waits_while_it_saves_needs_ten_times_as_long_between() -> None:
    said = slow_saves(train_of(50, is_async=False), EPOCH_STEPS, 57 * GB, save_s=67.0, step_s=10.0)
    assert "train.save_every_steps: 67, " in said
    assert (
        slow_saves(train_of(67, is_async=False), EPOCH_STEPS, 57 * GB, save_s=67.0, step_s=10.0)
        == ""
    )


@pytest.mark.parametrize(("save_s", "times"), [(67.0, 1), (1.0, 0)])
def test_it_is_said_once_and_only_of_a_slow_disk(save_s: float, times: int) -> None:
    lines: list[str] = []
    observe = warn_of_slow_saves(lines.append, train_of(3), EPOCH_STEPS)
    for step in range(1, 10):
        observe(EventName.STEP_END, {"step": step, "step_s": 0.2})
        if step % 3 == 0:
            observe(
                EventName.CHECKPOINT_SAVED,
                {"step": step, "bytes": GB, "duration_s": save_s, "wait_s": 0.0},
            )
    assert len(lines) == times
