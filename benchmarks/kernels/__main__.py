"""`python -m benchmarks.kernels [--size 8B] [--tokens 16384] [--only GROUP ...] [--out FILE]`.

It also runs under torchrun. `python -m benchmarks.kernels [--size 8B] [--tokens 16384] [--only
GROUP ...] [--out FILE]`, also under torchrun.

The ceiling of each operation of a training step on this GPU, at the shapes of a Qwen3, and the best
step that follows. A part is left out of the steps' sum where it was not measured, and then no step
is shown.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from benchmarks.kernels.attention import measure_attention
from benchmarks.kernels.clock import Clock
from benchmarks.kernels.exchange import measure_copies, measure_exchange
from benchmarks.kernels.head import measure_head
from benchmarks.kernels.pointwise import measure_pointwise
from benchmarks.kernels.products import measure_products
from benchmarks.kernels.report import Report
from benchmarks.kernels.summary import rows_of, summarise
from benchmarks.kernels.update import measure_update
from pipeline_lib.arch.families import geometry_in, published
from pipeline_lib.core.files import write_json
from pipeline_lib.plan.gpus import Gpu, find_gpu
from pipeline_lib.train.dist import World, process_group

ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
SIZES = ("0.6B", "1.7B", "4B", "8B", "14B", "32B")
TIMEOUT_S = 120


def main(given: Sequence[str] | None = None) -> None:
    """Measure what the command line names, print it as it comes, and the best step at the end."""
    arguments = _arguments(given)
    is_gpu = torch.cuda.is_available()
    world = World.from_env({**ALONE, **os.environ}, "cuda" if is_gpu else "cpu")
    begun_s = time.monotonic()
    clock = Clock(world.device, arguments.patience_s, begun_s + arguments.limit_s)
    config = published(f"qwen3-{arguments.size}")
    if config is None:
        raise SystemExit(f"--size {arguments.size}: no published Qwen3")
    report = Report(clock, _gpu(is_gpu), geometry_in(config), arguments.tokens, world.is_first)
    torch.manual_seed(world.rank)
    groups: dict[str, Callable[[], None]] = {
        "products": lambda: measure_products(report),
        "attention": lambda: measure_attention(report),
        "head": lambda: measure_head(report),
        "pointwise": lambda: measure_pointwise(report),
        "update": lambda: measure_update(report, world.size),
        "copies": lambda: measure_copies(report, world.size),
        "exchange": lambda: measure_exchange(report, world),
    }
    peaks = (
        f"{report.gpu.half_flop_s / 1e12:.0f} TFLOP/s, "
        f"{report.gpu.memory_bytes_per_s / 1e12:.2f} TB/s"
    )
    report.say(
        f"Qwen3-{arguments.size}, {report.tokens} tokens, bf16, {world.size} ranks; "
        f"{report.gpu.name}: {peaks}"
    )
    with process_group(world, TIMEOUT_S) if world.size > 1 else nullcontext():
        for name in arguments.only or groups:
            if name != "exchange" or world.size > 1:
                groups[name]()
            if is_gpu:
                torch.cuda.empty_cache()
        steps = summarise(report)
    report.say(f"\n{time.monotonic() - begun_s:.0f} s in all")
    if arguments.out and world.is_first:
        write_json(
            arguments.out, {"size": arguments.size, **report.json(), "steps": rows_of(steps)}
        )


def _arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="8B")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    groups = ("products", "attention", "head", "pointwise", "update", "copies", "exchange")
    parser.add_argument(
        "--only", nargs="+", choices=groups, help="groups to measure; all by default"
    )
    parser.add_argument("--patience-s", type=float, default=0.3, help="for each operation")
    parser.add_argument(
        "--limit-s", type=float, default=110.0, help="after which nothing new is measured"
    )
    parser.add_argument("--out", type=Path, help="write everything here, as JSON")
    return parser.parse_args(given)


def _gpu(is_gpu: bool) -> Gpu:
    """The one that is there, or an H200, so that shares mean something on a machine without."""
    found = find_gpu(torch.cuda.get_device_name()) if is_gpu else None
    found = found or find_gpu("h200")
    if found is None:
        raise SystemExit("the catalogue of GPUs has no H200")
    return found


if __name__ == "__main__":
    main()
