"""`python -m benchmarks.published`: the plan beside 406 measurements that others have published.

published.jsonl has a row for each entry of a public table: source, model, GPUs, setting, what was
measured, and `differs`, in which ways that run was another than ours would be; `train` has keys of
ours that say the rest of the setting. Rows are never taken out, so that a change of the plan cannot
choose what it is held against. A row is planned from the catalogue alone, as a run of ours in that
setting:

- Runs with tensor, pipeline or context parallelism are not planned.
- An MLP of two matrices counts as one of three with as many weights.
- Where the link between nodes is not stated, it is assumed to be 400 Gbit/s for each GPU of H100
  and H200, and half of that for A100.
- Layers with torch's LayerNorm and GELU, each one kernel, are planned as compiled ones, whose small
  kernels are counted as fused; eager ones are counted as transformers' RMSNorm and SwiGLU. So are
  layers of which it is not stated.
- Where layers are checkpointed as wholes (`selective layers`), step and memory lie between those
  with all and with no layers checkpointed, by the part that HFU over MFU tells, or half of them.
  Where selective checkpointing keeps every second product, they lie halfway between ours, which
  keeps all, and full checkpointing.
- Attention is by the kernel that the source's code takes (`KERNELS`), as far as that is not what
  ours takes on the GPU.
- Sources that are far from all others on A100 and H100 too say nothing of other cards, and are not
  planned (`UNLIKE`).

What is fitted to public measurements is fitted to one half of the rows (`is_for_fitting`); the
other half judges it. `--fit` shows at which rates of products and attention the plan comes nearest
to each source and GPU, relative to those that it assumes.
"""

import argparse
import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.measure import show
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.schema import Cluster
from pipeline_lib.config.train import Train
from pipeline_lib.core.units import GIB, from_gigabytes
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.efficiency import GpuClass, class_of
from pipeline_lib.plan.gpus import find_gpu
from pipeline_lib.plan.predict import Prediction, predict_step
from pipeline_lib.records.plan import Figure, Workload

ROWS = Path(__file__).with_name("published.jsonl")
COLUMNS = (
    "rows",
    "planned",
    "in band",
    "band",
    "within 15 %",
    "within 25 %",
    "median |error|",
    "median error",
)
LAYERS, OPERATORS = "selective layers", "selective operators"
HALF_KEPT = "half of the products are kept in selective checkpointing"
_GBIT_S_OF_A_GPU = {"h100": 400, "h200": 400, "a100 80gb": 200, "a100 40gb": 200}
# FLOPs of a step in which all layers are computed again, over one in which none is
_FULL_OVER_NONE = 4 / 3
_DIGEST_DIGITS = 8

Row = dict[str, Any]


@dataclass(frozen=True)
class Engine:
    """The rates of products with weights and of attention, relative to the plan's rates."""

    products: float = 1.0
    attention: float = 1.0


OURS = Engine()
FLASH, TRITON = "flash", "triton"
# By source and file. llm-foundry's submit_benchmarks.py has `attn_impl` triton until 2024-03-26,
# after the last table; fms-fsdp's README names torch's flash kernel; torchtitan adds cuDNN's on
# 2025-03-20 (5cfe514), and KempnerForge's profile has it.
KERNELS = {
    ("llm-foundry", "scripts/train/benchmarking/README.md"): TRITON,
    ("fms-fsdp", "README.md"): FLASH,
    ("torchtitan", "benchmarks/llama3_h100_202412_torchtitan.md"): FLASH,
    ("torchtitan", "docs/performance.md"): FLASH,
}
# The rate of Triton's FlashAttention of 2023, relative to torch's kernel: fitted to A100's rows,
# and as good on H100.
_TRITON_SHARE = 0.5
# By source, why its rows are not planned.
UNLIKE = {
    "universal-llm-trainer": "A100 and H100 take 1.3 to 3.4 times as long there as in all other "
    "sources, and why is not known"
}
# what is tried
_PRODUCTS = (0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.2)
_ATTENTION = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4)
_LEAST_ROWS = 4


@dataclass(frozen=True)
class Planned:
    """A row with the tokens/s of a GPU and the peak in bytes that the plan says of it."""

    row: Row
    tokens_per_s: Figure
    peak_bytes: float

    @property
    def error(self) -> float:
        """The predicted tokens/s over the measured, less 1."""
        return float(self.tokens_per_s.value / self.row["tokens_per_s_per_gpu"] - 1)

    @property
    def is_in_band(self) -> bool:
        """Whether what was measured is within the prediction's band."""
        return self.tokens_per_s.holds(self.row["tokens_per_s_per_gpu"])

    @property
    def band(self) -> float:
        """Half of the band's width, over the prediction."""
        return (self.tokens_per_s.high - self.tokens_per_s.low) / 2 / self.tokens_per_s.value


@cache
def published_rows() -> tuple[Row, ...]:
    """All rows, in the order of the file."""
    return tuple(json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines())


def is_for_fitting(row: Row) -> bool:
    """Whether constants may be fitted to the row, by its name's digest, so that it stays."""
    return int(hashlib.sha256(row["id"].encode()).hexdigest()[:_DIGEST_DIGITS], 16) % 2 == 0


def geometry_of(row: Row) -> Geometry:
    """The model in numbers."""
    found = row["geometry"]
    three = found["mlp_matrices"] == 3
    return Geometry(
        vocab=found["vocab"],
        hidden=found["hidden"],
        intermediate=found["intermediate"] if three else round(2 * found["intermediate"] / 3),
        layers=found["layers"],
        heads=found["heads"],
        kv_heads=found["kv_heads"],
        head_dim=found["head_dim"],
        tied=found["tied"],
        max_positions=row["sequence_tokens"],
        normed_heads=False,
    )


def case_of(row: Row, train: Train, engine: Engine) -> Case:
    """The model, the catalogue's machine, and whole sequences as documents, all supervised."""
    per_node, link = row["gpus_per_node"], row["internode_gbit_s"]
    nodes = row["gpus"] // per_node
    if nodes > 1 and link is None:
        link = _GBIT_S_OF_A_GPU[row["gpu"]] * per_node
    cluster = Cluster(
        nodes=nodes,
        gpus_per_node=per_node,
        gpu=row["gpu"],
        internode_gbit_s=link if nodes > 1 else None,
    )
    kernel = KERNELS.get((source_of(row), row["source"]["path"]))
    machine = machine_of(cluster, row["precision"], None, "auto" if kernel is None else "flash")
    if machine is None:
        raise ValueError(f"{row['id']}: no GPU")
    attention = engine.attention * (_TRITON_SHARE if kernel == TRITON else 1.0)
    for name, factor in (("matmul_flop_s", engine.products), ("attention_flop_s", attention)):
        machine = machine.with_rate(name, factor * machine.rates[name].value)
    tokens = row["sequence_tokens"]
    workload = Workload(tokens, 1.0, 1.0, float(tokens), None, None)
    blocks = row["micro_batch"] * row["accumulation"] * row["gpus"]
    return Case(geometry_of(row), train, machine, workload, blocks)


def plan(row: Row, engine: Engine = OURS) -> Planned | None:
    """What the plan says of a row, at the rates of `engine`; None if it does not plan such runs."""
    if row["parallel"] or source_of(row) in UNLIKE:
        return None
    checkpointing = row["activation_checkpointing"]
    if checkpointing == OPERATORS and HALF_KEPT in row["differs"]:
        return _between_two(row, ("selective", "full"), 0.5, engine)
    if checkpointing == LAYERS:
        share = 0.5
        if row["hfu_percent"]:
            again = row["hfu_percent"] / row["mfu_percent"] - 1
            share = min(1.0, again / (_FULL_OVER_NONE - 1))
        return _between_two(row, ("none", "full"), share, engine)
    found = _predicted(row, "selective" if checkpointing == OPERATORS else checkpointing, engine)
    return Planned(row, found.tokens_per_s_per_rank, found.peak_memory_bytes.value)


def _between_two(row: Row, ways: tuple[str, str], share: float, engine: Engine) -> Planned:
    """What lies between two ways of checkpointing; `share` is the part of the second."""
    one, other = (_predicted(row, way, engine) for way in ways)
    first, last = one.tokens_per_s_per_rank, other.tokens_per_s_per_rank
    ends = {
        end: 1 / _between(1 / getattr(first, end), 1 / getattr(last, end), share)
        for end in ("value", "low", "high")
    }
    return Planned(
        row,
        Figure(**ends),
        _between(one.peak_memory_bytes.value, other.peak_memory_bytes.value, share),
    )


def _predicted(row: Row, recompute: str, engine: Engine) -> Prediction:
    settings: dict[str, Any] = {
        "strategy": "hsdp" if row["sharding"] == "hsdp" else "fsdp",
        "shard_ranks": row["shard_ranks"],
        "reshard": row["sharding"] != "shard_grad_op",
        "recompute": recompute,
        "precision": row["precision"],
        "compile": row["compiled"] is not False or row["geometry"]["norm"] == "layer",
        "micro_batch_blocks": row["micro_batch"],
        "offload_activations": False,
        "save_async": False,
    }
    settings |= row.get("train", {})
    return predict_step(case_of(row, Train.model_validate_json(json.dumps(settings)), engine))


def _between(first: float, second: float, share: float) -> float:
    return (1 - share) * first + share * second


def class_of_row(row: Row) -> GpuClass:
    """The class of the row's GPU, by which bands are judged."""
    gpu = find_gpu(row["gpu"])
    if gpu is None:
        raise ValueError(f"{row['id']}: no GPU")
    return class_of(gpu)


def group_of(row: Row) -> str:
    """The source and the GPU, the lines of the table."""
    return f"{source_of(row)}, {row['gpu']}, {row['precision']}"


def source_of(row: Row) -> str:
    """The name of the repository that the row is from."""
    return str(row["source"]["repository"].split("/")[1])


def fitted(rows: Sequence[Row]) -> Engine:
    """The rates that come nearest to `rows`, by the mean of the errors without their signs."""

    def error(engine: Engine) -> float:
        return statistics.mean(
            abs(one.error) for row in rows if (one := plan(row, engine)) is not None
        )

    return min((Engine(*rates) for rates in product(_PRODUCTS, _ATTENTION)), key=error)


def fitted_engines() -> dict[tuple[str, str], Engine]:
    """The rates of every source and GPU with enough planned rows, from the half for fitting."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in published_rows():
        if is_for_fitting(row) and not row["parallel"] and source_of(row) not in UNLIKE:
            groups.setdefault((source_of(row), row["gpu"]), []).append(row)
    return {key: fitted(rows) for key, rows in groups.items() if len(rows) >= _LEAST_ROWS}


def median_error(found: Iterable[Planned]) -> float:
    """The median of the errors, without their signs."""
    return statistics.median(abs(one.error) for one in found)


def share_in_band(found: Sequence[Planned]) -> float:
    """The part of the rows whose measurement is within the band."""
    return sum(one.is_in_band for one in found) / len(found)


def cells(name: str, rows: Sequence[Row], found: Sequence[Planned]) -> list[str]:
    """A line of the table."""
    line = [name, str(len(rows)), str(len(found))]
    if not found:
        return [*line, *[""] * (len(COLUMNS) - 2)]
    shares = [share_in_band(found), statistics.median(one.band for one in found)]
    shares += [sum(abs(one.error) <= most for one in found) / len(found) for most in (0.15, 0.25)]
    signed = statistics.median(one.error for one in found)
    return [
        *line,
        *(f"{share:.0%}" for share in shares),
        f"{median_error(found):.1%}",
        f"{signed:+.1%}",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the coverage by source and GPU and by half, the worst rows, and the peaks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--fit", action="store_true", help="fit the rates of each source and GPU, and print them"
    )
    if parser.parse_args(arguments).fit:
        for key, engine in fitted_engines().items():
            print(f"{key}: {engine}")
        return
    rows = published_rows()
    found = {row["id"]: one for row in rows if (one := plan(row)) is not None}
    show_coverage("tokens/s of a GPU by the plan, and as published", found)
    worst = sorted(found.values(), key=lambda one: -abs(one.error))[:10]
    figures = [
        (
            one.row["id"],
            f"{one.tokens_per_s.value:,.0f}",
            f"{one.row['tokens_per_s_per_gpu']:,.0f}",
            f"{one.error:+.0%}",
        )
        for one in worst
    ]
    show("farthest off", ("row", "predicted", "published", "error"), figures)
    peaks = [
        (
            one.row["id"],
            f"{one.peak_bytes / GIB:.1f}",
            f"{bytes_of(one.row) / GIB:.1f}",
            one.row["memory_unit"],
        )
        for one in found.values()
        if one.row["peak_memory"] is not None
    ]
    show(
        "peaks in GiB; reserved memory is more than what is allocated",
        ("row", "plan", "published", "of"),
        peaks,
    )


def show_coverage(title: str, found: Mapping[str, Planned]) -> None:
    """Print a table of `found`, by the names of rows: sources and GPUs, classes, and the halves."""
    rows = published_rows()
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(group_of(row), []).append(row)
    for row in rows:
        half = "for fitting" if is_for_fitting(row) else "that judges"
        groups.setdefault(f"{class_of_row(row)}, the half {half}", []).append(row)
    groups["the half for fitting"] = [row for row in rows if is_for_fitting(row)]
    groups["the half that judges"] = [row for row in rows if not is_for_fitting(row)]
    groups["all"] = list(rows)
    lines = [
        cells(name, mine, [found[row["id"]] for row in mine if row["id"] in found])
        for name, mine in groups.items()
    ]
    show(title, ("source, GPU, precision", *COLUMNS), lines)


def bytes_of(row: Row) -> int:
    """The published peak."""
    peak: float = row["peak_memory"]
    return round(peak * GIB) if row["memory_unit"].startswith("GiB") else from_gigabytes(peak)


if __name__ == "__main__":
    main()
