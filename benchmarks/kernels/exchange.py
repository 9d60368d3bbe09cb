"""FSDP's work on a layer's weights: copies on each rank, all-gather and reduce-scatter."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from benchmarks.kernels.clock import Call
from benchmarks.kernels.report import Line, Report
from pipeline_lib.doctor.exchange import duration_s
from pipeline_lib.train.dist import World

PATIENCE_S = 0.5


def measure_copies(report: Report, ranks: int) -> None:
    """Lines for copies around collectives; ways for `copies of FSDP`, with one gather a step."""
    linears = list(report.geometry.linears.values())
    weights, layers = sum(i * o for i, o in linears), report.geometry.layers
    makes: dict[str, tuple[Callable[[], Call], float]] = {
        "own share to bf16": (partial(_cast, report, weights // ranks), 6.0 * weights / ranks),
        "out of what was gathered": (partial(_copy_out, report, linears, ranks), 4.0 * weights),
        "gradients into fp32 to be reduced": (
            partial(_copy_in, report, linears, ranks),
            6.0 * weights,
        ),
    }
    seconds = [
        report.measure("copies", f"a layer's {name}", make, moved_bytes=moved, calls=layers)
        for name, (make, moved) in makes.items()
    ]
    report.way("copies of FSDP", "as torch does", layers * sum(seconds))


def _cast(report: Report, elements: int) -> Call:
    share = torch.randn(elements, device=report.device)
    rounded = share.bfloat16()
    return lambda: rounded.copy_(share)


def _copy_out(report: Report, linears: list[tuple[int, int]], ranks: int) -> Call:
    sizes = [i * o // ranks for i, o in linears]
    gathered = torch.randn(ranks, sum(sizes), device=report.device).bfloat16()
    out = [gathered.new_empty(ranks, size) for size in sizes]
    return lambda: torch.split_with_sizes_copy(gathered, sizes, dim=1, out=out)


def _copy_in(report: Report, linears: list[tuple[int, int]], ranks: int) -> Call:
    found = [torch.randn(o, i, device=report.device).bfloat16() for i, o in linears]
    total = torch.empty(ranks, sum(i * o for i, o in linears) // ranks, device=report.device)
    return lambda: torch._chunk_cat(found, dim=0, num_chunks=ranks, out=total)


def measure_exchange(report: Report, world: World) -> None:
    """Lines of collectives over all ranks, called by all; ways for all exchanges of a step."""
    weights = sum(i * o for i, o in report.geometry.linears.values())
    layers = report.geometry.layers
    weights -= weights % world.size
    kinds = (
        ("all-gather", torch.bfloat16),
        ("reduce-scatter", torch.float32),
        ("reduce-scatter", torch.bfloat16),
    )
    taken: dict[str, float] = {}
    for kind, dtype in kinds:
        name = f"{kind} of a layer in {str(dtype).removeprefix('torch.')}"
        try:
            whole = torch.randn(weights, device=world.device).to(dtype)
            part = torch.empty_like(whole[: weights // world.size])
            gather = partial(dist.all_gather_into_tensor, whole, part)
            call = (
                gather if kind == "all-gather" else partial(dist.reduce_scatter_tensor, part, whole)
            )
            taken[name] = duration_s(call, world.device, None, PATIENCE_S)
        except RuntimeError as error:
            report.say(f"exchange     {name} failed: {error}")
            continue
        report.add(Line("exchange", name, taken[name], 0.0, float(whole.nbytes), layers))
        bus_bytes_s = whole.nbytes * (world.size - 1) / world.size / taken[name]
        report.say(f"{'exchange':<12} {name}: bus bandwidth {bus_bytes_s / 1e9:.0f} GB/s")
    if len(taken) == len(kinds):
        seconds = layers * sum(list(taken.values())[:2])
        report.way("exchange, beside computation", "gathered once, reduced in fp32", seconds)
