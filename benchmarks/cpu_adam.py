"""AdamW in host memory, as for offloading: bytes per second beside a copy's, by threads.

`python -m benchmarks.cpu_adam` measures torch's fused AdamW, which the pipeline uses, and
DeepSpeed's CPUAdam where it compiles. An update reads weight, gradient and both moments in fp32 and
writes all but the gradient: 28 bytes a number.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.measure import show
from pipeline_lib.core.files import write_json

GB = 10**9
UPDATE_BYTES = 28
REPEATS = 3


def rate(call: Callable[[], object], moved_bytes: int) -> float:
    """Bytes per second of `call`, the median of a few; the first is not counted."""
    call()
    seconds = []
    for _ in range(REPEATS):
        start_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start_s)
    return moved_bytes / statistics.median(seconds)


def parameters(count: int, tensors: int) -> list[nn.Parameter]:
    """`tensors` parameters of `count` numbers together, with gradients."""
    made = [nn.Parameter(torch.randn(count // tensors)) for _ in range(tensors)]
    for one in made:
        one.grad = torch.randn_like(one)
    return made


def deepspeeds(count: int) -> tuple[Callable[[], object] | None, str]:
    """DeepSpeed's update, or why there is none."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam  # type: ignore[import-untyped]

        return DeepSpeedCPUAdam(parameters(count, 8), lr=1e-4, adamw_mode=True).step, ""
    except Exception as error:  # it compiles when it is made, which fails in many ways
        return None, f"{type(error).__name__}: {error}".splitlines()[0][:160]


def measure(count: int, threads: int) -> dict[str, Any]:
    """The rates with `threads` threads."""
    torch.set_num_threads(threads)
    found: dict[str, Any] = {
        "threads": threads,
        "copy_bytes_s": rate(partial(torch.empty(count).copy_, torch.ones(count)), 2 * 4 * count),
    }
    for name, fused in (("fused", True), ("foreach", False)):
        optimizer = torch.optim.AdamW(
            parameters(count, 8), lr=1e-4, fused=fused or None, foreach=None if fused else True
        )
        found[f"{name}_bytes_s"] = rate(optimizer.step, UPDATE_BYTES * count)
    step, found["deepspeed"] = deepspeeds(count)
    if step is not None:
        found["deepspeed_bytes_s"] = rate(step, UPDATE_BYTES * count)
    return found


def main() -> None:
    """Measure with one thread, and with twice as many until all cores are used."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/cpu_adam"))
    parser.add_argument("--numbers", type=int, default=64_000_000, help="parameters of the update")
    arguments = parser.parse_args()
    cores, threads = len(os.sched_getaffinity(0)), [1]
    while 2 * threads[-1] <= cores:
        threads.append(2 * threads[-1])
    results = []
    for count in threads:
        results.append(measure(arguments.numbers, count))
        print(results[-1], flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(arguments.out / "results.json", {"numbers": arguments.numbers, "results": results})
    names = ("copy", "fused", "foreach", "deepspeed")
    rows = [
        [
            str(found["threads"]),
            *(f"{found.get(f'{name}_bytes_s', 0.0) / GB:.1f}" for name in names),
        ]
        + [f"{found['fused_bytes_s'] / found['copy_bytes_s']:.2f}"]
        for found in results
    ]
    heads = (
        "threads",
        "copy GB/s",
        "torch fused AdamW",
        "torch foreach",
        "DeepSpeed CPUAdam",
        "fused / copy",
    )
    show(f"AdamW on the host, {arguments.numbers / 1e6:,.0f} million numbers", heads, rows)
    print(json.dumps({"deepspeed": results[0]["deepspeed"]}))


if __name__ == "__main__":
    main()
