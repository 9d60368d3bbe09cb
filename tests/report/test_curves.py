"""Curves are exact while they are short, and honest averages when they are long."""

import csv
import io
import math
from dataclasses import replace

import numpy as np
import pytest

from pipeline_lib.records.training import Step
from pipeline_lib.report.curves import curves_csv, curves_of, smoothed
from tests.complete import step


def steps_with(losses: list[float | None]) -> list[Step]:
    return [
        step(
            number,
            loss=loss,
            lr=1e-3 / number,
            grad_norm=None,
            peak_memory_bytes=number * 10**9,
        )
        for number, loss in enumerate(losses, start=1)
    ]


def test_a_short_run_is_exact() -> None:
    curves = curves_of(steps_with([3.0, 2.0, 1.5]))
    assert curves.steps_per_point == 1
    assert curves.step.tolist() == [1, 2, 3]
    assert (
        curves.loss.tolist()
        == curves.low["loss"].tolist()
        == curves.high["loss"].tolist()
        == [3.0, 2.0, 1.5]
    )


@pytest.mark.parametrize(
    ("steps", "limit"), [(2001, 2000), (4000, 2000), (4001, 2000), (50_000, 2000), (10, 3)]
)
def test_a_long_run_keeps_its_mean_its_extremes_and_its_last_step(steps: int, limit: int) -> None:
    losses = np.random.default_rng(steps).uniform(1, 5, size=steps)
    curves = curves_of(steps_with(losses.tolist()), max_points=limit)
    width = curves.steps_per_point
    assert len(curves.step) == math.ceil(steps / width) <= limit
    assert curves.step[-1] == steps
    assert curves.high["loss"].max() == losses.max()
    assert curves.low["loss"].min() == losses.min()
    sizes = np.diff(np.concatenate(([0], curves.step)))
    assert np.dot(curves.loss, sizes) == pytest.approx(losses.sum())
    half_life = curves.half_life_steps / width
    assert curves.loss_smooth[-1] == smoothed(curves.loss, half_life)[-1]


def test_missing_values_stay_missing() -> None:
    curves = curves_of(steps_with([None, 2.0, None, 4.0]), max_points=2)
    assert curves.loss.tolist() == [2.0, 4.0]
    assert curves.low["loss"].tolist() == [2.0, 4.0]
    assert np.isnan(curves.grad_norm).all()


def test_no_steps_make_empty_curves() -> None:
    curves = curves_of([])
    assert len(curves.step) == len(curves.loss) == len(curves.loss_smooth) == 0
    assert (
        curves_csv(curves) == "step,loss,lr,tokens_per_s,grad_norm,peak_memory_mb,held_out_loss\n"
    )


def test_a_smoothed_line_follows_a_straight_fall_from_its_first_value() -> None:
    constant = smoothed(np.array([4.0, math.nan, 4.0, 4.0]), half_life=3)
    assert constant.tolist() == pytest.approx([4.0] * 4)
    falling = np.linspace(9.0, 1.0, 50)
    assert smoothed(falling, half_life=3).tolist() == pytest.approx(falling.tolist())
    assert smoothed(np.array([math.nan, 2.0]), half_life=1).tolist() == pytest.approx([2.0, 2.0])


def test_a_smoothed_line_lies_between_the_points_of_a_noisy_fall() -> None:
    noise = np.random.default_rng(0).normal(0.0, 0.3, 200)
    points = 8 * np.exp(-np.arange(200) / 40) + noise
    above = smoothed(points, half_life=2) > points
    assert 0.3 < above[:50].mean() < 0.7
    assert 0.3 < above[-50:].mean() < 0.7


def test_the_held_out_loss_of_a_point_is_the_newest_of_its_steps() -> None:
    steps = steps_with([3.0, 2.0, 1.5, 1.0])
    validated = [replace(one, validation_loss=4.0 - one.step) for one in steps[:3]]
    curves = curves_of([*validated, steps[3]], max_points=2)
    assert curves.held_out_loss.tolist() == [2.0, 1.0]
    assert np.isnan(curves_of(steps).held_out_loss).all()


def test_csv_round_trips_and_leaves_unknown_values_empty() -> None:
    rows = list(csv.DictReader(io.StringIO(curves_csv(curves_of(steps_with([2.25, None]))))))
    unknown = {"tokens_per_s": "100", "grad_norm": ""}
    assert rows[0] == {
        "step": "1",
        "loss": "2.25",
        "lr": "0.001",
        "peak_memory_mb": "1000",
        "held_out_loss": "",
        **unknown,
    }
    assert rows[1]["loss"] == ""
    assert float(rows[1]["lr"]) == 5e-4
