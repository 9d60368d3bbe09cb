"""A step's time: `python -m benchmarks.budget --size 8B --layers 8 --method lora --lengths 1000`.

`python -m benchmarks.budget --size 8B --layers 8 --method lora --lengths 1000 --train compile=true`
sets a key of `train` too.

Our own step with random weights, by the clock and then under torch's profiler: what of it are
products, attention, pointwise work, head and loss, the optimizer, communication beside nothing
else, copies, and nothing at all.
"""

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.groups import Group, GroupFailed, Row
from benchmarks.sizes import model_config
from benchmarks.train.cases import FAST, LORA, parsed
from pipeline_lib.config.section import read_settings
from pipeline_lib.config.train import Train
from pipeline_lib.core.files import write_json

SILENCE_S, LIMIT_S = 400.0, 540.0


def settings_of(given: argparse.Namespace) -> dict[str, Any]:
    """The section `train`, checked: what benchmarks/train races with, and then what is given.

    Raises ConfigError.
    """
    found: dict[str, Any] = {"method": given.method, "strategy": given.strategy}
    found |= {key: value for key, value in FAST.items() if key in Train.model_fields}
    found["compile"] = torch.cuda.is_available()
    if given.method == "lora":
        found["lora"] = LORA
    found |= parsed(given.train)
    read_settings(Train, found)
    return found


def show(row: Row) -> None:
    """Print the tables."""
    mfu = f", MFU {row['mfu']:.1%} causal / {row['mfu_full']:.1%} full" if "mfu" in row else ""
    step = f"step {1000 * row['step_s']:.1f} ms, {row['tokens_per_s']:,.0f} tokens/s a rank{mfu}"
    phases = ", ".join(
        f"{name.removesuffix('_s')} {1000 * value:.1f}" for name, value in row["phases_s"].items()
    )
    print(f"{step}, {row['peak_bytes'] / 2**30:.1f} GiB; {phases} ms")
    if "shares" not in row:
        print("no kernels to tell apart: this needs a CUDA GPU")
        return
    profiled_s = row["profiled_step_s"]
    print(f"\nunder the profiler a step took {1000 * profiled_s:.1f} ms:")
    print(f"{'kind':<22}{'ms a step':>11}{'share':>9}{'with overlap':>14}{'kernels':>9}")
    for share in row["shares"]:
        exposed_s, total_s = share["exposed_s"], share["total_s"]
        numbers = f"{1000 * exposed_s:>11.2f}{exposed_s / profiled_s:>9.1%}{1000 * total_s:>14.2f}"
        print(f"{share['kind']:<22}{numbers}{share['kernels']:>9.0f}")
    busy_s = sum(share["exposed_s"] for share in row["shares"] if share["kind"] != "idle")
    print(
        "idle without the profiler, if its kernels take as long: "
        f"{1000 * (row['step_s'] - busy_s):.2f} ms"
    )
    for title in ("kernels", "operators"):
        print(f"\nmost expensive {title}: ms a step, times, kind and name")
        for share in row[title]:
            print(f"{1000 * share['exposed_s']:>10.2f}{share['kernels']:>8.0f}  {share['kind']}")


def main() -> None:
    """Start the ranks, and show what the first of them reports."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.budget", description=__doc__)
    parser.add_argument("--size", default="8B", help="of Qwen3, or `demo`")
    parser.add_argument("--layers", type=int, help="so many instead of all")
    parser.add_argument("--method", choices=("lora", "full"), default="full")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument(
        "--lengths", default="1000", help="a name of benchmarks/train's, or one length for all"
    )
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--supervised", type=float, default=0.5, help="share of each document")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches in a step")
    parser.add_argument("--steps", type=int, default=6, help="by the clock, after three to warm up")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--train", nargs="*", default=[], metavar="KEY=VALUE", help="further keys of `train`"
    )
    parser.add_argument("--out", type=Path, help="write everything here, as JSON")
    given = parser.parse_args()
    settings = settings_of(given)
    print(
        f"{given.size}, {given.layers or 'all'} layers, {given.ranks} ranks, {given.tokens} tokens "
        "of documents",
        end=" ",
    )
    print(f"{given.lengths}, {settings}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_json(folder / "config.json", model_config(given.size, given.layers))
        write_json(folder / "settings.json", settings)
        group = Group(
            "benchmarks.budget.rank", given.ranks, folder, torch.cuda.is_available(), SILENCE_S
        )
        arguments = ["--folder", name, "--lengths", given.lengths, "--tokens", str(given.tokens)]
        arguments += [
            "--supervised",
            str(given.supervised),
            "--accumulation",
            str(given.accumulation),
        ]
        try:
            rows = list(
                group.rows([*arguments, "--steps", str(given.steps)], time.monotonic() + LIMIT_S)
            )
        except GroupFailed as error:
            raise SystemExit(f"budget: {error}") from error
    for row in rows:
        show(row)
        if given.out:
            write_json(
                given.out, {**vars(given), "out": str(given.out), "settings": settings, **row}
            )


if __name__ == "__main__":
    main()
