"""Units: each conversion both ways, and that nothing else in the plan converts."""

import ast
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_lib.core import units


def test_conversions() -> None:
    assert units.from_gbit_per_s(9) == 1.125e9
    assert units.to_gbit_per_s(1.125e9) == 9
    assert units.from_gbyte_per_s(4.3) == 4.3e9
    assert units.from_teraflops(989.4) == pytest.approx(989.4e12, rel=1e-15)
    assert units.from_gigabytes(80) == 80_000_000_000
    assert units.from_gibibytes(80) == 85_899_345_920
    assert (units.GIGA, units.TERA, units.MIB, units.GIB) == (1e9, 1e12, 1024**2, 1024**3)
    assert (units.BITS, units.HOUR_S) == (8, 60 * 60)


@given(st.integers(2**20, 2**44))
def test_shown_sizes_are_those_that_were_given(size_bytes: int) -> None:
    """To the digits that are shown."""
    for text, names, half in (
        (units.gib(size_bytes), {"GiB": 2**30, "MiB": 2**20}, 0.051),
        (units.gigabytes(size_bytes), {"GB": 10**9, "MB": 10**6}, 0.051),
    ):
        number, _, unit = text.partition(" ")
        assert abs(float(number) * names[unit] - size_bytes) <= half * names[unit]


@given(st.floats(1e-3, 1e9))
def test_shown_rates_are_those_that_were_given(rate: float) -> None:
    number, unit = units.gbit_per_s(units.from_gbit_per_s(rate)).split()
    assert unit == "Gbit/s"
    assert float(number.replace(",", "")) == pytest.approx(rate, rel=0.006)


@given(st.floats(1e-6, 1e8))
def test_shown_times_are_those_that_were_given(value_s: float) -> None:
    names = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
    parts = re.findall(r"([\d.,e+-]+) (ms|s|min|h)", units.brief(value_s))
    shown_s = sum(float(number.replace(",", "")) * names[unit] for number, unit in parts)
    finest_s = names[parts[-1][1]]
    assert math.isclose(shown_s, value_s, rel_tol=0.006, abs_tol=0.51 * finest_s)


@pytest.mark.parametrize(
    ("value_s", "text"),
    [
        (0.0, "0 ms"),
        (5.47e-12, "0 ms"),
        (2e-6, "0.002 ms"),
        (0.012, "12 ms"),
        (0.9994, "999 ms"),
        (0.9997, "1.00 s"),
        (1.236, "1.24 s"),
        (9.997, "10.0 s"),
        (59.96, "1 min 00 s"),
        (185.2, "3 min 05 s"),
        (3599.7, "1 h 00 min"),
        (7800, "2 h 10 min"),
        (3_600_000, "1,000 h 00 min"),
    ],
)
def test_times_are_shown_as_people_say_them(value_s: float, text: str) -> None:
    assert units.brief(value_s) == text


def test_shown_sizes() -> None:
    assert units.gib(139.8 * 2**30) == "139.8 GiB"
    assert units.gib(2**29) == "512.0 MiB"
    assert units.gib(-(2**31)) == "-2.0 GiB"
    assert units.gigabytes(98.3e9) == "98.30 GB"
    assert units.gigabytes(2.5e6) == "2.5 MB"
    assert units.gbit_per_s(1.125e9) == "9 Gbit/s"
    assert units.gbit_per_s(400e9) == "3,200 Gbit/s"
    assert units.gbit_per_s(999.6e9 / 8) == "1,000 Gbit/s"
    assert units.gib(2**30 - 1) == "1.0 GiB"
    assert units.gib(2**30 - 2**17) == "1023.9 MiB"
    assert units.gigabytes(10**9 - 1) == "1.00 GB"
    assert units.gigabytes(999.9e6) == "999.9 MB"
    assert units.gib(2**20 - 1) == "1.0 MiB"
    assert units.gib(3 * 2**10) == "3.0 KiB"
    assert units.gigabytes(12_345) == "12.3 kB"


@pytest.mark.parametrize(
    ("value_h", "text"),
    [(2.5e-5, "0"), (0.0123, "0.0123"), (48.51, "48.5"), (999.7, "1,000"), (1234.4, "1,234")],
)
def test_no_number_has_an_exponent(value_h: float, text: str) -> None:
    assert units.gpu_hours(value_h) == f"{text} GPU-hours"
    assert units.gbit_per_s(units.from_gbit_per_s(value_h)) == f"{text} Gbit/s"


PLAN = Path(units.__file__).parents[1] / "plan"
# Counts of parameters that a library has as its limits: 10^9 of them are no gigabyte.
COUNTS = {("moments.py", "ZERO3_LIVE")}
MAGNITUDES = {10.0**power for power in (6, 9, 12, 15)} | {2.0**power for power in (20, 30, 40)}
# bits of a byte, bytes of a KiB: but of sizes and rates only, for models have them as widths
FACTORS = {8.0, 1024.0}
OF_SIZE = re.compile(r"byte|bits?(_|$)|gib|mib|size|rate|memory", re.IGNORECASE)


def constant(node: ast.AST) -> float | None:
    """The value of a number, or of a product or power of numbers."""
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    ):
        return float(node.value)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Pow):
        left, right = constant(node.left), constant(node.right)
        if (
            left is not None
            and right is not None
            and (isinstance(node.op, ast.Mult) or abs(right) < 64)
        ):
            return left * right if isinstance(node.op, ast.Mult) else left**right
    return None


def names_in(node: ast.AST) -> set[str]:
    """Names and attributes that occur in it."""
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return names | {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}


def conversions(source: str, file: str = "any.py") -> list[str]:
    """Expressions that convert units: magnitudes as they stand, and an 8 or 1024 with a size."""
    tree = ast.parse(source)
    allowed = {
        id(node)
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        and any(
            isinstance(target, ast.Name) and (file, target.id) in COUNTS
            for target in statement.targets
        )
        for node in ast.walk(statement)
    }
    return [
        f"{file}:{node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(tree)
        if isinstance(node, ast.expr)
        and id(node) not in allowed
        and (is_magnitude(node) or is_by_factor(node))
    ]


def is_magnitude(node: ast.expr) -> bool:
    """10^9 and the like in any spelling, and numbers written as so many of them, as 989e12 is."""
    value = constant(node)
    is_scaled = (
        isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value >= 1e9
    )
    return value in MAGNITUDES or is_scaled


def is_by_factor(node: ast.expr) -> bool:
    """A size or a rate times 8, or divided by it."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult | ast.Div | ast.FloorDiv)
        and bool({constant(node.left), constant(node.right)} & FACTORS)
        and any(OF_SIZE.search(name) for name in names_in(node))
    )


@pytest.mark.parametrize(
    "source",
    [
        "x = size / 1e9",
        "x = size_bytes / 2**30",
        "x = 1024**3",
        "x = size_kib * 1024",
        "x = rate_bytes_s * 8",
        "x = bits / 8",
        "x = peak(989.4e12)",
        "f'{size / 10**9:.1f} GB'",
    ],
)
def test_a_conversion_is_seen(source: str) -> None:
    assert conversions(source)


@pytest.mark.parametrize(
    "source",
    [
        "x = 8 * hidden",
        "x = layers / 8",
        "x = size_bytes * 4",
        "x = 20e-6",
        "x = 1e-9",
        "x = (1024, 3072)",
    ],
)
def test_other_arithmetic_is_none(source: str) -> None:
    assert conversions(source) == []


@pytest.mark.parametrize("file", sorted(path.name for path in PLAN.glob("*.py")))
def test_only_units_converts(file: str) -> None:
    assert conversions((PLAN / file).read_text(encoding="utf-8"), file) == []


def test_what_is_allowed_exists() -> None:
    """An exception that nothing needs any more is removed."""
    for file, name in COUNTS:
        assert re.search(
            rf"^{name} = 10\*\*9", (PLAN / file).read_text(encoding="utf-8"), re.MULTILINE
        )
