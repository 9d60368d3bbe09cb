"""The printed report: measured rates and costs with units, beside the GPUs' data sheets."""

from collections.abc import Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline_lib.calibrate.task import Task, with_layers
from pipeline_lib.config.schema import Cluster
from pipeline_lib.core.units import GIGA, TERA, brief, gbit_per_s
from pipeline_lib.plan.gpus import Gpu, find_gpu

# Labels by the field names of Speeds in plan/machine.py, in the order of the table.
NAMES = {
    "matmul_flop_s": "products of a layer",
    "attention_flop_s": "attention",
    "memory_bytes_s": "memory of a rank",
    "launch_s": "host, for an operation",
    "in_node_bytes_s": "bus within a node",
    "in_node_latency_s": "latency of it",
    "between_bytes_s": "sent between nodes",
    "between_latency_s": "latency of it",
    "copy_bytes_s": "copies, host and GPU",
    "host_bytes_s": "memory of the host",
    "disk_bytes_s": "disk, writing",
}
WIDTH = 110


def report(
    task: Task, measured: Mapping[str, Any], left_out: list[str], path: Path, cluster: Cluster
) -> str:
    """Return a terminal's report: rates, parts, what was left out, and how to use `path`.

    It gives the reasons for what was left out.
    """
    gpu = find_gpu(measured["gpu"] or "")
    lines = [_text(_rates(task, measured, gpu)), _text(_parts(task, measured, gpu))]
    if left_out:
        lines.append("left out:")
        lines += [f"  - {text}" for text in left_out]
    keys = f"measured: {path}"
    on_gpus = measured["gpu"] is not None
    if on_gpus != (cluster.device == "cuda"):
        per_node = measured["ranks"] // measured["nodes"] if on_gpus else 0
        keys = f"gpus_per_node: {per_node}, {keys}"
    lines.append(f"wrote {path}; the plan uses it with  cluster: {{{keys}}}")
    return "\n".join(lines)


def _rates(task: Task, measured: Mapping[str, Any], gpu: Gpu | None) -> Table:
    table = Table(
        "rate", "measured", "from", "to", "data sheet", "share of it", title_justify="left"
    )
    table.title = f"{measured['host']}, {measured['precision']}, shapes of {measured['model']}"
    sheet = _of_sheet(task, gpu)
    for name, text in NAMES.items():
        if name not in measured["rates"]:
            continue
        rate = measured["rates"][name]
        row = [text, _quantity(name, rate["value"])]
        row += [_quantity(name, rate["low"]), _quantity(name, rate["high"])]
        best = sheet.get(name)
        if best:
            row += [_quantity(name, best), f"{rate['value'] / best:.0%}"]
        else:
            row += ["-", "-"]
        table.add_row(*row)
    return table


def _of_sheet(task: Task, gpu: Gpu | None) -> dict[str, float | None]:
    """Return the rates that the GPU's data sheet has."""
    if gpu is None:
        return {}
    peak_flop_s = gpu.peak_flop_s(task.train.precision)
    return {
        "matmul_flop_s": peak_flop_s,
        "attention_flop_s": peak_flop_s,
        "memory_bytes_s": gpu.memory_bytes_per_s,
        "in_node_bytes_s": gpu.link.bytes_per_s,
    }


def _quantity(name: str, value: float) -> str:
    if name == "between_bytes_s":
        return gbit_per_s(value)
    if name.endswith("_bytes_s"):
        return f"{value / GIGA:.3g} GB/s"
    if not name.endswith("_flop_s"):
        return brief(value)
    if value >= TERA:
        return f"{value / TERA:.3g} TFLOP/s"
    return f"{value / GIGA:.3g} GFLOP/s"


def _parts(task: Task, measured: Mapping[str, Any], gpu: Gpu | None) -> Table:
    """Return the table of costs a pass; share of peak covers a layer's forward and backward."""
    columns = (
        "variant",
        "part",
        "pass",
        "for 1,000 tokens",
        "and fixed",
        "the host",
        "share of peak",
    )
    table = Table(*columns, title="passes of one micro-batch", title_justify="left")
    for part in measured["parts"]:
        names = [part["variant"], part["part"], "forward"]
        table.add_row(*names, *_costs(part["forward"]), _share(task, part, gpu))
        table.add_row("", "", "backward", *_costs(part["backward"]), "")
    return table


def _costs(one: Mapping[str, float]) -> list[str]:
    return [brief(1000 * one["per_token_s"]), brief(one["fixed_s"]), brief(one["host_s"])]


def _share(task: Task, part: Mapping[str, Any], gpu: Gpu | None) -> str:
    """Return a layer's MFU in percent; recomputed FLOPs do not count."""
    if part["part"] != "layer":
        return ""
    peak = gpu.peak_flop_s(task.train.precision) if gpu else None
    per_token_s = part["forward"]["per_token_s"] + part["backward"]["per_token_s"]
    if not peak or not per_token_s:
        return "-"
    one = with_layers(task.geometry, 1)
    products = one.matmul_parameters - one.vocab * one.hidden
    flops = (6.0 if task.train.method == "full" else 4.0) * products
    flops += 6.0 * one.heads * one.head_dim * part["document_tokens"]
    return f"{flops / per_token_s / peak:.0%}"


def _text(table: Table) -> str:
    console = Console(file=StringIO(), width=WIDTH)
    console.print(table)
    return str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]
