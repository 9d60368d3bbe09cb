"""The learning rate is a pure function of the step."""

import pytest

from pipeline_lib.config.schema import Train
from pipeline_lib.train.schedule import learning_rate


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


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_shortest_runs_have_positive_finite_rates(schedule: str, steps: int) -> None:
    rates = curve(steps, lr_schedule=schedule)
    assert all(0.0 <= rate <= 1.0 for rate in rates)
    assert rates[0] > 0
