"""One rank: steps of our training, first by the clock and then under torch's profiler."""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.budget.kinds import HEAD, UPDATE, most_expensive, shares_of
from benchmarks.budget.trace import MARK, Kernel, read_kernels
from benchmarks.kernels.documents import Documents
from pipeline_lib.arch.families import read_geometry
from pipeline_lib.arch.geometry import step_flops
from pipeline_lib.calibrate.random_model import random_stepper, take_step
from pipeline_lib.config.section import read_settings
from pipeline_lib.config.train import Train
from pipeline_lib.core.files import read_json
from pipeline_lib.core.processes import die_with_parent
from pipeline_lib.model.batch import Batch
from pipeline_lib.model.loss import LossHead
from pipeline_lib.plan.gpus import peak_flops
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.step import Stepper

TIMEOUT_S = 240
WARM_UP_STEPS, PROFILED_STEPS = 3, 2


def mark(stepper: Stepper) -> None:
    """Let the profiler see where the head and the update of `stepper` begin and end."""
    for module in stepper.wrapped.modules():
        if isinstance(module, LossHead):
            _mark_module(module)
    for name in ("grad_norm", "update"):
        setattr(stepper.strategy, name, _marked(getattr(stepper.strategy, name)))


def _marked(method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        with record_function(MARK + UPDATE):
            return method(*given)

    return run


def _mark_module(module: nn.Module) -> None:
    ranges: list[Any] = []

    def begin(*_: Any) -> None:
        ranges.append(record_function(MARK + HEAD))
        ranges[-1].__enter__()

    def end(*_: Any) -> None:
        ranges.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end)


def profiled(stepper: Stepper, steps: list[list[Batch]]) -> dict[str, Any]:
    """What the GPU's time goes into in those steps."""
    # the first one is slow to begin
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
        torch.zeros(1, device=stepper.world.device).add_(1)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        start_s = time.perf_counter()
        for batches in steps:
            take_step(stepper, batches)
        torch.cuda.synchronize()
        duration_s = time.perf_counter() - start_s
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        kernels = read_kernels(path)
    if not kernels:
        raise SystemExit("the profiler saw no kernels; may this user profile GPUs?")
    # the steps were waited for; the host's clock is another
    end_s = max(kernel.time[1] for kernel in kernels)
    shares = shares_of(kernels, (end_s - duration_s, end_s), len(steps))
    return {
        "profiled_step_s": duration_s / len(steps),
        "shares": [asdict(share) for share in shares],
        "kernels": [
            asdict(share)
            for share in most_expensive(kernels, len(steps), lambda kernel: kernel.name)
        ],
        "operators": [asdict(share) for share in most_expensive(kernels, len(steps), _operator)],
    }


def _operator(kernel: Kernel) -> str:
    return kernel.operators[-1] if kernel.operators else kernel.name


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--folder", type=Path, required=True, help="with config.json and settings.json"
    )
    parser.add_argument("--lengths", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--supervised", type=float, required=True)
    parser.add_argument("--accumulation", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    return parser.parse_args()


def main() -> None:
    """Take the steps; the first rank reports."""
    given = _arguments()
    die_with_parent()
    is_gpu = torch.cuda.is_available()
    world = World.from_env(os.environ, "cuda" if is_gpu else "cpu")
    train = read_settings(Train, read_json(given.folder / "settings.json"))

    def documents(step: int) -> list[Documents]:
        first = (step * world.size + world.rank) * given.accumulation
        return [
            Documents.drawn(given.lengths, given.tokens, first + micro)
            for micro in range(given.accumulation)
        ]

    def batches(step: int) -> list[Batch]:
        return [each.batch(given.supervised, step) for each in documents(step)]

    with process_group(world, TIMEOUT_S):
        stepper = random_stepper(given.folder, train, given.accumulation, world)
        mark(stepper)
        stepper.warm_up(batches(0)[0])
        taken, results = list[float](), []
        for step in range(WARM_UP_STEPS + given.steps):
            ready = batches(step)
            start_s = time.perf_counter()
            results.append(take_step(stepper, ready))
            taken.append(time.perf_counter() - start_s)
        later = [batches(WARM_UP_STEPS + given.steps + step) for step in range(PROFILED_STEPS)]
        found: dict[str, Any] = {}
        if is_gpu and world.is_first:
            found = profiled(stepper, later)
        else:
            for step_batches in later:
                take_step(stepper, step_batches)
        if world.is_first:
            late = results[WARM_UP_STEPS:]
            step_s = statistics.median(taken[WARM_UP_STEPS:])
            row = {
                "name": "budget",
                "step_s": step_s,
                "steps_s": taken,
                "tokens_per_s": statistics.median(result.tokens for result in late)
                / step_s
                / world.size,
                "phases_s": {
                    name: statistics.median(result.phases[name] for result in late)
                    for name in late[0].phases
                },
                "peak_bytes": torch.cuda.max_memory_allocated() if is_gpu else 0,
                "losses": [result.loss for result in results],
            }
            print(
                json.dumps(row | _mfu(given.folder, train, late, step_s, world) | found), flush=True
            )


def _mfu(
    folder: Path, train: Train, results: list[Any], step_s: float, world: World
) -> dict[str, float]:
    """By both conventions; nothing where the device has no known peak."""
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else ""
    possible = peak_flops(name, train.precision)
    if not possible:
        return {}
    tokens, squares = (
        int(statistics.median(getattr(result, field) for result in results))
        for field in ("tokens", "squared_lengths")
    )
    flops = step_flops(read_geometry(folder), train, tokens, squares)
    most = possible * world.size * step_s
    return {"mfu": flops.causal / most, "mfu_full": flops.full_attention / most}


if __name__ == "__main__":
    main()
