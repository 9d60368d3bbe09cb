"""Predicted beside measured: errors, tables, and what follows from them."""

import statistics
from collections.abc import Sequence

from benchmarks.groups import Row
from pipeline_lib.core.units import GIB
from pipeline_lib.records.plan import Figure

TIME_GOAL, MEMORY_GOAL, AUTO_GOAL = 0.10, 0.05, 0.03
LEFT_BYTES = 2**26  # of earlier cases; more makes a peak doubtful
COLUMNS = (
    *("case", "step s predicted", "measured", "error", "forward/backward/update"),
    *("peak GiB predicted", "measured", "error", "in band"),
)


def line_of(row: Row) -> str:
    """What was measured, in a line."""
    if "problem" in row:
        return f"{row['name']}: {row['problem']}"
    peak = f", {row['peak_bytes'] / GIB:.2f} GiB" if "peak_bytes" in row else ""
    left = (
        f", {row['left_bytes'] / GIB:.2f} GiB left before"
        if row.get("left_bytes", 0) > LEFT_BYTES
        else ""
    )
    return f"{row['name']}: {row['step_s']:.4f} s{peak}{left}, case {row['case_s']:.1f} s"


def beside(predicted: Figure, value: float | None) -> Row:
    """A figure, what was measured, and the error as a share of that."""
    error = None if value is None else predicted.value / value - 1
    is_within = None if value is None else predicted.holds(value)
    return {**vars(predicted), "measured": value, "error": error, "within_band": is_within}


def table(results: Sequence[Row]) -> list[str]:
    """For people."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for row in results:
        seconds, memory = row["time"], row["memory"]
        phases = "/".join(percent(phase["error"]) for phase in row["phases"].values())
        cells = [
            *(
                row["name"],
                figures(seconds, 1, 3),
                number(seconds["measured"], 1, 3),
                percent(seconds["error"]),
                phases,
            ),
            *(
                figures(memory, GIB, 2),
                number(memory["measured"], GIB, 2),
                percent(memory["error"]),
            ),
            row["problem"][:60]
            if row["problem"]
            else "/".join(yes(each["within_band"]) for each in (seconds, memory)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def figures(figure: Row, unit: float, digits: int) -> str:
    """`0.377 (0.340-0.410)`."""
    value, low, high = (figure[key] / unit for key in ("value", "low", "high"))
    return f"{value:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def number(value: float | None, unit: float, digits: int) -> str:
    """`0.377`."""
    return "-" if value is None else f"{value / unit:.{digits}f}"


def percent(share: float | None) -> str:
    """`+3.1%`."""
    return "-" if share is None else f"{share:+.1%}"


def yes(value: bool | None) -> str:
    """`yes`."""
    return "-" if value is None else "yes" if value else "no"


def summary(results: Sequence[Row]) -> list[str]:
    """How far the predictions were off."""
    lines = []
    for what, goal in (("time", TIME_GOAL), ("memory", MEMORY_GOAL)):
        known = [row for row in results if row[what]["error"] is not None]
        if not known:
            continue
        errors = [abs(row[what]["error"]) for row in known]
        worst = max(known, key=lambda row: abs(row[what]["error"]))
        good = sum(error <= goal for error in errors)
        held = sum(row[what]["within_band"] for row in known)
        lines.append(
            f"{what}: {good} of {len(known)} within {goal:.0%}, {held} within their bands; median "
            f"error {statistics.median(errors):.1%}, worst {percent(worst[what]['error'])} "
            f"({worst['name']})"
        )
    failed = [
        row["name"] for row in results if "memory" in str(row["problem"]).lower() and row["fits"]
    ]
    return [*lines, f"said to fit, and then out of memory: {', '.join(failed) or 'none'}"]


def verdicts(results: Sequence[Row], chosen: dict[str, str]) -> list[str]:
    """For each group that computes the same: is what the plan would take nearly the fastest?"""
    lines = []
    for group in dict.fromkeys(row["group"] for row in results):
        known = {
            row["name"]: row
            for row in results
            if row["group"] == group and row["time"]["measured"] is not None
        }
        if len(known) < 2:
            continue
        fastest = min(known, key=lambda name: known[name]["time"]["measured"])
        of_grid = min(
            (name for name in known if known[name]["fits"]),
            key=lambda name: known[name]["time"]["value"],
        )
        for what, name in (
            ("auto takes", chosen.get(group, "")),
            ("of the grid the plan prefers", of_grid),
        ):
            if name not in known:
                lines.append(f"{group}: {what} {name or 'nothing'}, which was not measured")
                continue
            slower = known[name]["time"]["measured"] / known[fastest]["time"]["measured"] - 1
            verdict = "good" if slower <= AUTO_GOAL else "NOT within 3%"
            lines.append(
                f"{group}: {what} {name}, {slower:.1%} slower than the fastest, {fastest}: "
                f"{verdict}"
            )
    return lines
