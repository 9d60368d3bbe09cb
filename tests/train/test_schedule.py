"""The learning rate is a pure function of the step."""

import pytest
import torch
from transformers import get_scheduler

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
    falls = [before - after for before, after in zip(rates[9:], [*rates[10:], 0.2], strict=True)]
    assert falls == pytest.approx([0.8 / 91] * 91), "the next update would have the floor"


def test_cosine_is_half_way_down_in_the_middle() -> None:
    rates = curve(100, warmup_fraction=0.0)
    assert rates[50] == pytest.approx(0.5)
    assert rates == sorted(rates, reverse=True)


def test_constant_stays() -> None:
    assert curve(10, warmup_fraction=0.2, lr_schedule="constant") == [0.5] + [1.0] * 9


def test_wsd_stays_and_falls_linearly_at_the_end() -> None:
    rates = curve(100, warmup_steps=5, lr_schedule="wsd", decay_fraction=0.2, min_lr_fraction=0.1)
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5:80] == [1.0] * 75
    assert rates[80:] == pytest.approx([1.0 - 0.9 * step / 21 for step in range(1, 21)])


def test_a_part_of_a_step_in_the_fall_of_wsd_is_a_whole_one() -> None:
    rates = curve(10, warmup_steps=0, lr_schedule="wsd", decay_fraction=0.25, min_lr_fraction=0.0)
    assert rates[:7] == [1.0] * 7
    assert rates[7:] == pytest.approx([0.75, 0.5, 0.25])


def test_wsd_without_an_end_is_constant() -> None:
    wsd = curve(20, lr_schedule="wsd", decay_fraction=0.0)
    assert wsd == curve(20, lr_schedule="constant")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_in_steps_is_that_in_parts(schedule: str) -> None:
    assert curve(50, lr_schedule=schedule, warmup_steps=10) == curve(
        50, lr_schedule=schedule, warmup_fraction=0.2
    )
    assert curve(50, lr_schedule=schedule, warmup_steps=0)[0] == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_warm_up_longer_than_the_run_is_cut_off(schedule: str) -> None:
    assert curve(4, lr_schedule=schedule, warmup_steps=8) == [0.125, 0.25, 0.375, 0.5]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs_have_positive_finite_rates(schedule: str, steps: int) -> None:
    rates = curve(steps, lr_schedule=schedule)
    assert all(0.0 < rate <= 1.0 for rate in rates)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup_steps", [0, 1, 7])
@pytest.mark.parametrize("steps", [1, 2, 8, 16, 100])
def test_every_update_learns(schedule: str, warmup_steps: int, steps: int) -> None:
    rates = curve(steps, lr_schedule=schedule, warmup_steps=warmup_steps)
    assert min(rates) > 1e-4
    assert rates[0] == (1.0 if warmup_steps <= 1 else pytest.approx(1 / warmup_steps))


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
@pytest.mark.parametrize("steps", [3, 20])
def test_rates_are_those_of_transformers_but_for_the_update_that_it_wastes(
    schedule: str, warmup_steps: int, steps: int
) -> None:
    wasted = 1 if warmup_steps else 0  # a first update of rate 0
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = get_scheduler(schedule, optimizer, warmup_steps, steps + wasted)
    rates = []
    for _ in range(steps + wasted):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    assert curve(steps, lr_schedule=schedule, warmup_steps=warmup_steps) == pytest.approx(
        rates[wasted:]
    )
