"""The table of a case, and that of one side on more and more GPUs."""

from collections.abc import Sequence
from typing import Any

from benchmarks.measure import show

COLUMNS = (
    *(
        "side",
        "tokens/s a GPU",
        "samples/s",
        "MFU causal / full",
        "GiB",
        "exposed",
        "GPU busy",
        "W",
        "to 1st step",
    ),
    *("first loss", "ours / it"),
)
JOB_TOKENS = 100_000_000  # of the fixed job whose duration is compared
_SHARED = (3, 4, 5, 6, 7)  # of COLUMNS
SCALING = (
    "ranks",
    "100 M tokens",
    "tokens/s a GPU",
    "of the first",
    "samples/s",
    *(COLUMNS[place] for place in _SHARED),
)


def show_scaling(rows: Sequence[dict[str, Any]]) -> None:
    """Print how each side measured on several numbers of ranks scales, at equal work on each."""
    by_side: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "tokens_per_s" in row:
            by_side.setdefault(row["name"], []).append(row)
    for name, of_side in by_side.items():
        show(name, SCALING, [_scaled(row, of_side[0]) for row in of_side])


def _scaled(row: dict[str, Any], first: dict[str, Any]) -> list[str]:
    shown = cells(row, None)
    return [
        str(row["ranks"]),
        f"{JOB_TOKENS / row['tokens_per_s'] / row['ranks'] / 60:.1f} min",
        shown[1],
        f"{row['tokens_per_s'] / first['tokens_per_s']:.1%}",
        shown[2],
        *(shown[place] for place in _SHARED),
    ]


def show_case(title: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print it; what failed says so."""
    ours = next(
        (row["tokens_per_s"] for row in rows if row["side"] == "ours" and "tokens_per_s" in row),
        None,
    )
    show(title, COLUMNS, [cells(row, ours) for row in rows])


def cells(row: dict[str, Any], ours: float | None) -> list[str]:
    """A line of the table; `ours` is what our side came to, without variants."""
    if "tokens_per_s" not in row:
        return [row["side"], "failed", *[""] * (len(COLUMNS) - 2)]
    low, high = row["tokens_per_s_range"]
    return [
        row["side"] + (" (cut off)" if "problem" in row else ""),
        f"{row['tokens_per_s']:,.0f} ({low:,.0f}-{high:,.0f})",
        f"{row['documents_per_s']:.1f}",
        f"{row['mfu']:.1%} / {row['mfu_full']:.1%}" if "mfu" in row else "-",
        f"{row['peak_bytes'] / 2**30:.1f}" if "peak_bytes" in row else "-",
        f"{row['exposed_communication']:.1%}" if "exposed_communication" in row else "-",
        f"{row['gpu_utilization']:.0%}" if "gpu_utilization" in row else "-",
        f"{row['gpu_power_w']:.0f}" if "gpu_power_w" in row else "-",
        f"{row['start_s']:.0f} s" if row["start_s"] else "-",
        f"{row['losses'][0]:.4f}",
        f"{ours / row['tokens_per_s']:.2f}" if ours else "-",
    ]
