"""Numbers carry units, and a missing one is a word."""

import pytest

from pipeline_lib.core import units


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1234, "1.23 kB"),
        (999_600, "1.00 MB"),
        (14_523_000, "14.5 MB"),
        (3.2e12, "3.20 TB"),
    ],
)
def test_sizes(value: float, text: str) -> None:
    assert units.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (125.4, "2 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7265, "2 h 01 min"),
    ],
)
def test_durations(value: float, text: str) -> None:
    assert units.seconds(value) == text


def test_counts_and_reals() -> None:
    assert units.count(1234567, "tokens") == "1,234,567 tokens"
    assert units.count(0, "tokens") == "0 tokens"
    assert units.count(1, "nodes") == "1 node"
    assert units.count(1, "accumulated micro-batches") == "1 accumulated micro-batch"
    assert units.count(1, "parts of the model") == "1 part of the model"
    assert units.count(1, "tokens/s") == "1 tokens/s"
    assert units.compact(604_000, "tokens") == "604 k tokens"
    assert units.compact(7) == "7"
    assert units.real(2.10449, "nats/token") == "2.104 nats/token"
    assert units.rounded(2061.11) == "2,061"
    assert units.rounded(11.067) == "11.1"
    assert units.small(3.14159e-7) == "3.14e-07"
    assert units.percent(0.97345) == "97.3%"


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0.0123, "s", "12.3 ms"),
        (185, "s", "3 min 05 s"),
        (1.5 * 2**30, "memory", "1.5 GiB"),
        (1.5e9, "bytes", "1.50 GB"),
        (0.4321, "fraction", "43.2%"),
        (8931.2, "tokens/s", "8.93 k tokens/s"),
        (1.2345, "GPU hours", "1.23"),
    ],
)
def test_a_figure_of_the_plan_is_shown_by_its_kind(value: float, kind: str, text: str) -> None:
    assert units.amount(value, kind) == text
    assert units.amount(None, kind) == "n/a"


@pytest.mark.parametrize(
    ("value", "name", "text"),
    [
        (6.6e14, "matmul_flop_s", "660 TFLOP/s"),
        (25e9, "between_bytes_s", "25 GB/s"),
        (2e-5, "launch_s", "0.02 ms"),
        (None, "launch_s", "n/a"),
    ],
)
def test_rates_have_the_unit_that_their_name_ends_in(
    value: float | None, name: str, text: str
) -> None:
    assert units.rate(value, name) == text


def test_deviations_have_a_sign() -> None:
    assert units.signed(0.14) == "+14.0%"
    assert units.signed(-0.005) == "-0.5%"


@pytest.mark.parametrize(
    "name",
    [
        "brief",
        "gib",
        "signed",
        "size",
        "seconds",
        "count",
        "compact",
        "real",
        "rounded",
        "small",
        "percent",
    ],
)
def test_a_missing_number_is_a_word(name: str) -> None:
    assert getattr(units, name)(None) == "n/a"
