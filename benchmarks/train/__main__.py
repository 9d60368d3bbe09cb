"""`python -m benchmarks.train CASE ... [--ranks N] [--steps N] [--out FILE]`: all sides of each case in turn.

On the GPUs that are there, or on CPUs. Weights are random; documents, batches and the order are the same for all.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.groups import Group, GroupFailed
from benchmarks.measure import show
from benchmarks.train.cases import CASES, Case, model_config
from pipeline_lib.base.fsio import write_json

SIDE_S = 280.0  # of one side, its start counted in
SILENCE_S = 240.0


def race(case: Case, ranks: int, steps: int, folder: Path) -> list[dict[str, Any]]:
    """The rows of ours and of each peer; one that failed has a `problem`."""
    write_json(folder / "config.json", model_config(case.size))
    sides = [("ours", "benchmarks.train.ours", 0)]
    sides += [(peer.name, "benchmarks.train.peers", number) for number, peer in enumerate(case.peers)]
    found = []
    for name, module, number in sides:
        group = Group(module, ranks, folder, torch.cuda.is_available(), SILENCE_S)
        common = ["--case", case.name, "--folder", str(folder), "--steps", str(steps), "--peer", str(number)]
        try:
            found += list(group.rows(common, time.monotonic() + SIDE_S))
        except GroupFailed as error:
            found.append({"name": f"{case.name}: {name}", "side": name, "problem": str(error)})
    return found


def cells(row: dict[str, Any], ours: float | None) -> list[str]:
    """A line of the table."""
    if "problem" in row:
        return [row["side"], row["problem"][:60], *[""] * 5]
    low, high = row["tokens_per_s_range"]
    mfu = f"{row['mfu']:.1%} / {row['mfu_full']:.1%}" if "mfu" in row else "-"
    ratio = f"{ours / row['tokens_per_s']:.2f}" if ours else "-"
    speed = f"{row['tokens_per_s']:,.0f} ({low:,.0f}-{high:,.0f})"
    return [row["side"], speed, f"{row['documents_per_s']:.1f}", mfu, f"{row['peak_bytes'] / 2**30:.2f}", ratio]


def main() -> None:
    """Measure the cases that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train", description=__doc__)
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument(
        "--ranks", type=int, default=max(1, torch.cuda.device_count()) if torch.cuda.is_available() else 2
    )
    parser.add_argument("--steps", type=int, default=10, help="of which the first three are not counted")
    parser.add_argument("--out", type=Path, help="write all rows here, as JSON")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.cases:
        with tempfile.TemporaryDirectory() as folder:
            of_case = race(CASES[name], arguments.ranks, arguments.steps, Path(folder))
        ours = of_case[0].get("tokens_per_s")
        columns = ["side", "tokens/s a rank", "documents/s", "MFU causal / full", "GiB", "ours is faster by"]
        show(f"{name}, {arguments.ranks} ranks", columns, [cells(row, ours) for row in of_case])
        rows += of_case
    if arguments.out:
        write_json(arguments.out, rows)


if __name__ == "__main__":
    main()
