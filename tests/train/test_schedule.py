"""The learning rate is a pure function of the step."""

import pytest

from pipeline_lib.config.train import Train
from pipeline_lib.train.loop import learning_rate

SCHEDULES = ["linear", "cosine", "constant", "wsd"]


def curve(steps: int, **settings: object) -> list[float]:
    train = Train.model_validate({"lr": 1.0, **settings})
    return [learning_rate(train, step, steps) for step in range(1, steps + 1)]


def test_it_rises_linearly_to_the_peak_and_falls_to_the_floor() -> None:
    rates = curve(100, warmup_fraction=0.1, lr_schedule="linear", min_lr_fraction=0.2)
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[9] == max(rates) == 1.0
    assert rates[-1] == pytest.approx(0.2)
    falls = [before - after for before, after in zip(rates[9:], rates[10:], strict=False)]
    assert falls == pytest.approx([0.8 / 90] * 90)


def test_cosine_is_half_way_down_in_the_middle() -> None:
    rates = curve(101, warmup_fraction=0.0)
    assert rates[-1] == pytest.approx(0.0, abs=1e-12)
    assert learning_rate(Train(lr=1.0, warmup_fraction=0.0), 50, 100) == pytest.approx(0.5)
    assert rates == sorted(rates, reverse=True)


def test_constant_stays() -> None:
    assert curve(10, warmup_fraction=0.2, lr_schedule="constant") == [0.5] + [1.0] * 9


def test_wsd_stays_and_falls_linearly_at_the_end() -> None:
    rates = curve(100, warmup_steps=5, lr_schedule="wsd", decay_fraction=0.2, min_lr_fraction=0.1)
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:80] == [1.0] * 75
    assert rates[80:] == pytest.approx([1.0 - 0.9 * step / 20 for step in range(1, 21)])


def test_wsd_without_an_end_is_constant() -> None:
    wsd = curve(20, lr_schedule="wsd", decay_fraction=0.0)
    assert wsd == curve(20, lr_schedule="constant")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_in_steps_is_that_in_parts(schedule: str) -> None:
    assert curve(50, lr_schedule=schedule, warmup_steps=10) == curve(50, lr_schedule=schedule, warmup_fraction=0.2)
    assert curve(50, lr_schedule=schedule, warmup_steps=0)[0] == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_warm_up_longer_than_the_run_is_cut_off(schedule: str) -> None:
    assert curve(4, lr_schedule=schedule, warmup_steps=8) == [0.125, 0.25, 0.375, 0.5]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs_have_positive_finite_rates(schedule: str, steps: int) -> None:
    rates = curve(steps, lr_schedule=schedule)
    assert all(0.0 <= rate <= 1.0 for rate in rates)
    assert rates[0] > 0
