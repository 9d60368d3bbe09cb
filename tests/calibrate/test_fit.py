"""Costs and rates from points that are known, exact ones and disturbed ones."""

import pytest

from pipeline_lib.calibrate.fits import LEAST_SPREAD, link_of, pass_of, rate_of
from pipeline_lib.doctor.exchange import Collective
from pipeline_lib.plan.machine import Pass


def test_a_pass_is_the_line_through_the_large_runs() -> None:
    fixed_s, per_token_s = 2e-4, 3e-7
    found = pass_of(
        (8192, 16384), 5e-4, fixed_s + 8192 * per_token_s, fixed_s + 16384 * per_token_s
    )
    assert found.fixed_s == pytest.approx(fixed_s)
    assert found.per_token_s == pytest.approx(per_token_s)
    assert found.host_s == 5e-4


def test_a_run_that_waited_for_the_host_says_nothing_of_the_device() -> None:
    assert pass_of((100, 200), 1.0, 1.1, 1.6) == Pass(0.0, 1.6 / 200, 1.0)


@pytest.mark.parametrize(
    ("half_s", "full_s"),
    [(3.0, 2.0), (1.0, 4.0), (0.0, 2.0)],
    ids=["more tokens were faster", "nothing would be negative", "less than nothing"],
)
def test_noise_gives_no_negative_cost(half_s: float, full_s: float) -> None:
    found = pass_of((100, 200), 0.1, half_s, full_s)
    assert found == Pass(0.0, full_s / 200, 0.1)


def test_what_is_lost_in_noise_costs_nothing() -> None:
    assert pass_of((100, 200), -0.1, -0.2, -0.3) == Pass(0.0, 0.0, 0.0)


def test_a_link_is_found_from_exact_points() -> None:
    sizes = [2**20, 2**24, 2**28]
    bandwidth, latency_s = link_of([(size, 4e-5 + size / 3e11) for size in sizes])
    assert bandwidth == pytest.approx(3e11)
    assert latency_s == pytest.approx(4e-5)


def test_small_messages_count_as_much_as_large_ones() -> None:
    """An error of a few percent of the largest time is many latencies."""
    points = [
        (2**20, 1.02 * (1e-3 + 2**20 / 1e9)),
        (2**24, 1e-3 + 2**24 / 1e9),
        (2**28, 1.03 * (1e-3 + 2**28 / 1e9)),
    ]
    bandwidth, latency_s = link_of(points)
    assert bandwidth == pytest.approx(1e9, rel=0.05)
    assert latency_s == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("points", [[(1e6, 1e-3), (1e8, 2e-1)], [(1e6, 5e-3), (1e8, 4e-3)]])
def test_a_link_is_positive_whatever_the_noise(points: list[tuple[float, float]]) -> None:
    bandwidth, latency_s = link_of(points)
    assert bandwidth == pytest.approx(points[-1][0] / points[-1][1])
    assert latency_s > 0


def test_a_band_holds_all_repetitions_and_is_never_too_narrow() -> None:
    assert rate_of([9.0, 10.0, 14.0]) == {"value": 10.0, "low": 9.0, "high": 14.0}
    assert rate_of([10.0]) == {
        "value": 10.0,
        "low": 10.0 / (1 + LEAST_SPREAD),
        "high": 10.0 * (1 + LEAST_SPREAD),
    }


def test_bus_bytes_are_those_of_nccl_tests() -> None:
    assert Collective("all_reduce", 1000, 4, 1.0).bus_bytes == 1500
    assert Collective("all_gather", 1000, 4, 1.0).bus_bytes == 750
