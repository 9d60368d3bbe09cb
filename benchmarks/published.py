"""`python -m benchmarks.published`: the plan beside 289 measurements that others have published.

published.jsonl has a row for each entry of a public table: source, model, GPUs, setting, what was measured, and
`differs`, in which ways that run was another than ours would be. Rows are never taken out, so that a change of the plan
cannot choose what it is held against. A row is planned from the catalogue alone, as a run of ours in that setting:

- Runs with tensor, pipeline or context parallelism are not planned.
- An MLP of two matrices counts as one of three with as many weights.
- Where the link between nodes is not stated, it is assumed to be 400 Gbit/s for each GPU of H100 and H200, and half of
  that for A100.
- Layers with torch's LayerNorm and GELU, each one kernel, are planned as compiled ones, whose small kernels are counted
  as fused; eager ones are counted as transformers' RMSNorm and SwiGLU. So are layers of which it is not stated.
- Where layers are checkpointed as wholes (`selective layers`), step and memory lie between those with all and with no
  layers checkpointed, by the part that HFU over MFU tells, or half of them.

What the plan fits to public measurements it fits to one half of the rows (`is_for_fitting`); the other half judges it.
"""

import hashlib
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.measure import show
from pipeline_lib.config.schema import Cluster
from pipeline_lib.config.train import Train
from pipeline_lib.core.units import GIB, from_gigabytes
from pipeline_lib.model.geometry import Geometry
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.machine import Figure
from pipeline_lib.plan.predict import Prediction
from pipeline_lib.plan.search import Setting
from pipeline_lib.plan.workload import Workload

ROWS = Path(__file__).with_name("published.jsonl")
COLUMNS = ("rows", "planned", "in band", "band", "within 15 %", "within 25 %", "median |error|", "median error")
LAYERS, OPERATORS = "selective layers", "selective operators"
_GBIT_S_OF_A_GPU = {"h100": 400, "h200": 400, "a100 80gb": 200, "a100 40gb": 200}
_FULL_OVER_NONE = 4 / 3  # FLOPs of a step in which all layers are computed again, over one in which none is
_DIGEST_DIGITS = 8

Row = dict[str, Any]


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
    """Whether the row is in the half to which constants may be fitted; by the digest of its name, so that it stays."""
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


def setting_of(row: Row) -> Setting:
    """The model, the machine by the catalogue, and whole sequences as documents, all of them supervised."""
    per_node, link = row["gpus_per_node"], row["internode_gbit_s"]
    nodes = row["gpus"] // per_node
    if nodes > 1 and link is None:
        link = _GBIT_S_OF_A_GPU[row["gpu"]] * per_node
    cluster = Cluster(nodes=nodes, gpus_per_node=per_node, gpu=row["gpu"], internode_gbit_s=link if nodes > 1 else None)
    machine = machine_of(cluster, row["precision"], None)
    if machine is None:
        raise ValueError(f"{row['id']}: no GPU")
    tokens = row["sequence_tokens"]
    workload = Workload(tokens, 1.0, 1.0, float(tokens), None, None)
    return Setting(geometry_of(row), machine, workload, row["micro_batch"] * row["accumulation"] * row["gpus"], None)


def plan(row: Row) -> Planned | None:
    """What the plan says of a row; None if it does not plan such runs."""
    if row["parallel"]:
        return None
    checkpointing = row["activation_checkpointing"]
    if checkpointing != LAYERS:
        found = _predicted(row, "selective" if checkpointing == OPERATORS else checkpointing)
        return Planned(row, found.tokens_per_s_per_rank, found.peak_memory_bytes.value)
    share = 0.5
    if row["hfu_percent"]:
        again = row["hfu_percent"] / row["mfu_percent"] - 1
        share = min(1.0, again / (_FULL_OVER_NONE - 1))
    none, full = _predicted(row, "none"), _predicted(row, "full")
    first, last = none.tokens_per_s_per_rank, full.tokens_per_s_per_rank
    ends = {
        end: 1 / _between(1 / getattr(first, end), 1 / getattr(last, end), share) for end in ("value", "low", "high")
    }
    return Planned(row, Figure(**ends), _between(none.peak_memory_bytes.value, full.peak_memory_bytes.value, share))


def _predicted(row: Row, recompute: str) -> Prediction:
    settings = {
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
    return setting_of(row).predict(Train.model_validate(settings))


def _between(first: float, second: float, share: float) -> float:
    return (1 - share) * first + share * second


def group_of(row: Row) -> str:
    """The source and the GPU, the lines of the table."""
    return f"{row['source']['repository'].split('/')[1]}, {row['gpu']}, {row['precision']}"


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
    return [*line, *(f"{share:.0%}" for share in shares), f"{median_error(found):.1%}", f"{signed:+.1%}"]


def main() -> None:
    """Print the coverage by source and GPU and by half, the worst rows, and the peaks."""
    rows = published_rows()
    found = {row["id"]: one for row in rows if (one := plan(row)) is not None}
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(group_of(row), []).append(row)
    groups["the half for fitting"] = [row for row in rows if is_for_fitting(row)]
    groups["the half that judges"] = [row for row in rows if not is_for_fitting(row)]
    groups["all"] = list(rows)
    lines = [
        cells(name, mine, [found[row["id"]] for row in mine if row["id"] in found]) for name, mine in groups.items()
    ]
    show("tokens/s of a GPU by the plan, and as published", ("source, GPU, precision", *COLUMNS), lines)
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
        (one.row["id"], f"{one.peak_bytes / GIB:.1f}", f"{bytes_of(one.row) / GIB:.1f}", one.row["memory_unit"])
        for one in found.values()
        if one.row["peak_memory"] is not None
    ]
    show("peaks in GiB; reserved memory is more than what is allocated", ("row", "plan", "published", "of"), peaks)


def bytes_of(row: Row) -> int:
    """The published peak."""
    peak: float = row["peak_memory"]
    return round(peak * GIB) if row["memory_unit"].startswith("GiB") else from_gigabytes(peak)


if __name__ == "__main__":
    main()
