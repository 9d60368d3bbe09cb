"""The proof of the plan: its predictions for a grid of ways to train, written first, and the truth.

`python -m benchmarks.predictions --size 0.6B 1.7B 8B --ranks 2 --measured cluster*.json --out DIR`
on a machine with GPUs; model and documents are random. DIR gets predictions.json before anything is
measured, then results.json and table.md, which is in benchmarks/RESULTS.md.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.comparison import beside, line_of, summary, table, verdicts
from benchmarks.grid import batches_of
from benchmarks.groups import Group, Row, measured
from benchmarks.sizes import config_json
from benchmarks.train.cases import LORA
from pipeline_lib.arch.families import geometry_in
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.schema import Cluster
from pipeline_lib.config.section import settings_of
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import PipelineError
from pipeline_lib.core.files import read_json, write_json, write_text
from pipeline_lib.model.batch import Batch
from pipeline_lib.plan.case import Case as PlanCase
from pipeline_lib.plan.choose import best_way, choose
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.machine import Machine
from pipeline_lib.plan.measured import read_measured
from pipeline_lib.plan.passes import shape_of
from pipeline_lib.plan.predict import Prediction
from pipeline_lib.records.plan import Workload
from pipeline_lib.records.record import to_json

BLOCK_TOKENS = {"tiny": 64}
USUAL_BLOCK_TOKENS = 4096
BLOCKS_OF_RANK = {"8B": 2}  # in a step
USUAL_BLOCKS_OF_RANK = 4
METHODS: dict[str, dict[str, Any]] = {"full": {}, "lora": {"method": "lora", "lora": LORA}}
HOST_MEMORY_GB = 200
SILENCE_S = 100.0  # the longest that a case may take, the start of its processes counted in
NEEDED_S = 20.0  # below that no process group is started any more


@dataclass(frozen=True)
class Way:
    """A way to train. Those of the first turn are measured before any of the second."""

    strategy: str
    micro: int
    recompute: str = "none"
    method: str = "full"
    turn: int = 1


SMALL = (
    *(Way(strategy, 2) for strategy in ("ddp", "fsdp", "zero1", "zero2", "zero3")),
    *(Way("fsdp", 2, recompute) for recompute in ("selective", "full")),
    *(Way("ddp", 1), Way("ddp", 4), Way("fsdp", 4)),
    *(Way("fsdp", 1, turn=2), Way("ddp", 4, "full", turn=2), Way("ddp", 2, method="lora", turn=2)),
)
WAYS: dict[str, tuple[Way, ...]] = {
    "tiny": SMALL,
    "0.6B": SMALL,
    "1.7B": (Way("ddp", 2), Way("fsdp", 2)),
    "4B": (Way("ddp", 1), Way("fsdp", 1)),
    "8B": (
        *(Way("ddp", 1, method="lora"), Way("fsdp", 1, method="lora"), Way("fsdp", 1, "full")),
        *(
            Way("ddp", 2, method="lora"),
            Way("ddp", 1, "full", "lora"),
            Way("zero3", 1, method="lora"),
        ),
        *(Way("fsdp", 2, "full", turn=2), Way("fsdp", 2, method="lora", turn=2)),
        Way("fsdp", 1, "selective", turn=2),
    ),
}


@dataclass(frozen=True)
class Case:
    """A way to train a model of some size, and what is predicted for it.

    Cases of a group compute the same.
    """

    name: str
    group: str
    turn: int
    spec: Row
    prediction: Prediction

    @property
    def is_zero(self) -> bool:
        """Whether it is DeepSpeed's."""
        return str(self.spec["train"]["strategy"]).startswith("zero")


@dataclass(frozen=True)
class Bench:
    """What all cases share: a node's ranks, its GPUs, what was measured of them, a case's steps."""

    ranks: int
    gpu: str | None
    measured: tuple[Path, ...]
    steps: int

    def setting(self, size: str, method: str) -> PlanCase:
        """The plan's question on models of that size, on this machine as measured with one."""
        geometry = geometry_in(config_json(size))
        machine = machine_for(1, self.ranks, self.gpu, measured_of(self.measured, geometry, method))
        workload = workload_of(
            BLOCK_TOKENS.get(size, USUAL_BLOCK_TOKENS), blocks_of_rank(size), self.ranks
        )
        blocks = blocks_of_rank(size) * self.ranks
        train = train_of("auto", method, 1, "none")
        has_deepspeed = find_spec("deepspeed") is not None
        return PlanCase(geometry, train, machine, workload, blocks, has_deepspeed=has_deepspeed)

    def case(self, size: str, train: Train, prediction: Prediction, turn: int) -> Case:
        """One case."""
        spec: Row = {
            "name": name_of(size, train),
            "size": size,
            "block_tokens": BLOCK_TOKENS.get(size, USUAL_BLOCK_TOKENS),
            "accumulation": prediction.accumulation,
            "steps": self.steps,
            "train": {**settings_of(train), "strategy": train.strategy},
        }
        return Case(spec["name"], f"{size} {train.method}", turn, spec, prediction)

    def cases(self, sizes: Sequence[str]) -> list[Case]:
        """The grid, in the order in which it is measured; ways that do not fit are left out."""
        found = []
        for size in sizes:
            settings = {method: self.setting(size, method) for method in ("full", "lora")}
            for way in WAYS[size]:
                setting = settings[way.method]
                train = train_of(way.strategy, way.method, way.micro, way.recompute)
                if (
                    blocks_of_rank(size) % way.micro == 0
                    and (prediction := best_way(setting.by(train))).fits
                ):
                    found.append(self.case(size, train, prediction, way.turn))
        return found

    def chosen(self, size: str, method: str) -> Case:
        """What `strategy: auto` takes for that group, of all there is."""
        choice = choose(self.setting(size, method))
        return self.case(size, choice.chosen.train, choice.chosen, 1)


def train_of(strategy: str, method: str, micro: int, recompute: str, **more: Any) -> Train:
    """The section `train` of such a run."""
    how = {"recompute": recompute, "reshard": True, "compile": False}
    settings = {"strategy": strategy, "micro_batch_blocks": micro, **how, **METHODS[method], **more}
    return Train.model_validate(settings)


def name_of(size: str, train: Train) -> str:
    """`0.6B fsdp, micro-batch 2, selective`."""
    extra = [
        train.method if train.method != "full" else "",
        f"micro-batch {train.micro_batch_blocks}",
    ]
    extra.append(f"recompute {train.recompute}" if train.recompute != "none" else "")
    extra.append(f"offload {train.offload}" if train.offload != "none" else "")
    return ", ".join([f"{size} {train.strategy}", *filter(None, extra)])


def blocks_of_rank(size: str) -> int:
    """Blocks that a rank takes in a step."""
    return BLOCKS_OF_RANK.get(size, USUAL_BLOCKS_OF_RANK)


@lru_cache
def workload_of(block_tokens: int, blocks: int, ranks: int) -> Workload:
    """What the blocks are like that the ranks will really take."""
    case = {"block_tokens": block_tokens, "accumulation": blocks, "train": {}}
    return workload_in(
        [batch for rank in range(ranks) for batch in batches_of(case, rank)], block_tokens
    )


def workload_in(batches: Sequence[Batch], block_tokens: int) -> Workload:
    """What the blocks of `batches` are like."""
    positions = sum(batch.tokens.numel() for batch in batches)
    tokens = sum(batch.real_tokens for batch in batches)
    return Workload(
        block_tokens=block_tokens,
        real_fraction=tokens / positions,
        supervised_fraction=sum(batch.supervised_tokens for batch in batches) / positions,
        document_tokens=sum(batch.squared_lengths for batch in batches) / tokens,
        blocks=None,
        epoch_blocks=None,
    )


def machine_for(
    nodes: int, ranks_per_node: int, gpu: str | None, path: Path | None, **more: Any
) -> Machine:
    """This machine, as the catalogue or the cluster.json in `path` says; CPUs if `gpu` is None."""
    kind = {"gpus_per_node": ranks_per_node, "gpu": gpu} if gpu else {"cpu_ranks": ranks_per_node}
    cluster = Cluster.model_validate({"nodes": nodes, "memory_gb": HOST_MEMORY_GB, **kind, **more})
    found = machine_of(cluster, "bf16", None if path is None else read_measured(read_json(path)))
    if found is None:
        raise SystemExit("--gpu: say which, or give --measured")
    return found


def measured_of(paths: Sequence[Path], geometry: Geometry, method: str) -> Path | None:
    """The cluster.json made with such a model, trained so; else the first: rates hold for any."""
    for path in paths:
        parts = read_measured(read_json(path)).parts
        if any(
            part.shape == shape_of(geometry) and f"/{method}/" in part.variant for part in parts
        ):
            return path
    return paths[0] if paths else None


def write_configs(folder: Path, sizes: Sequence[str], ranks: int) -> None:
    """Arguments of `qwen3 calibrate` for each size and method of the grid."""
    for size in sizes:
        workload = workload_of(
            BLOCK_TOKENS.get(size, USUAL_BLOCK_TOKENS), blocks_of_rank(size), ranks
        )
        write_json(folder / size / "config.json", config_json(size))
        for method in dict.fromkeys(way.method for way in WAYS[size] if way.turn == 1):
            config = {
                "experiment": f"calibrate-{size}-{method}",
                "model": {"source": "local", "path": str((folder / size).absolute())},
                "data": {"train": [{"source": "pydoc"}]},
                # Without blocks the plan assumes documents of a quarter of the longest.
                "tokenize": {
                    "max_tokens": min(workload.block_tokens, round(4 * workload.document_tokens))
                },
                "shard": {"block_tokens": workload.block_tokens},
                "cluster": {
                    "gpus_per_node": ranks if torch.cuda.is_available() else 0,
                    "cpu_ranks": ranks,
                },
                "train": {
                    "global_batch_tokens": 64 * workload.block_tokens,
                    **({"method": "lora", "lora": LORA} if method == "lora" else {}),
                },
            }
            write_json(folder / f"{size}-{method}.yaml", config)  # JSON is YAML


def in_order(cases: Sequence[Case]) -> list[Case]:
    """By turn; of each turn torch's own strategies first, which share a process group."""
    return sorted(cases, key=lambda case: (case.turn, case.is_zero))


def with_chosen(bench: Bench, cases: list[Case]) -> tuple[list[Case], dict[str, str]]:
    """The grid with what `auto` would take for each group, and the name of that."""
    chosen = {}
    for group in dict.fromkeys(case.group for case in cases):
        try:
            case = bench.chosen(*group.split())
        except PipelineError as error:
            print(f"auto, {group}: {error}")
            continue
        chosen[group] = case.name
        if case.name not in {one.name for one in cases}:
            cases = [*cases, case]
    return cases, chosen


def main() -> None:
    """Predict, write that down, measure, and compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.predictions", description=__doc__)
    parser.add_argument("--size", choices=WAYS, nargs="+", default=["0.6B", "8B"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--steps", type=int, default=5, help="after the warm-up; the last three count"
    )
    parser.add_argument(
        "--measured",
        type=Path,
        nargs="*",
        default=[],
        help="cluster.json of calibrate, one or more",
    )
    parser.add_argument(
        "--configs", action="store_true", help="write those for calibrate to --out, and end"
    )
    parser.add_argument("--gpu", default="h200", help="kind of the GPUs, where there are any")
    parser.add_argument("--cases", nargs="*", default=[], help="parts of names; all by default")
    parser.add_argument(
        "--limit-s", type=float, default=420, help="what is not measured by then is left out"
    )
    parser.add_argument("--predict", action="store_true", help="for that GPU, and measure nothing")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--logs", type=Path, help="folder for what the ranks say; one in --out by default"
    )
    arguments = parser.parse_args()
    until_s = time.monotonic() + arguments.limit_s
    gpu = arguments.gpu if torch.cuda.is_available() or arguments.predict else None
    if arguments.configs:
        write_configs(arguments.out, arguments.size, arguments.ranks)
        return
    bench = Bench(arguments.ranks, gpu, tuple(arguments.measured), arguments.steps)
    cases, chosen = with_chosen(bench, bench.cases(arguments.size))
    cases = [
        case
        for case in cases
        if not arguments.cases or any(part in case.name for part in arguments.cases)
    ]
    cases = in_order(cases)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_predictions(arguments.out / "predictions.json", bench, cases, chosen)
    print(f"{len(cases)} cases predicted in {arguments.out / 'predictions.json'}", flush=True)
    rows: dict[str, Row] = {}
    if not arguments.predict:
        logs = arguments.logs or arguments.out / "logs"
        group = Group("benchmarks.grid", arguments.ranks, logs, gpu is not None, SILENCE_S)
        for row in measured(group, [case.spec for case in cases], until_s, needed_s=NEEDED_S):
            rows[row["name"]] = row
            leave(arguments.out, cases, rows, chosen)
            print(
                f"{arguments.limit_s - until_s + time.monotonic():.0f} s: {line_of(row)}",
                flush=True,
            )
    print(leave(arguments.out, cases, rows, chosen))


def leave(out: Path, cases: Sequence[Case], rows: Mapping[str, Row], chosen: dict[str, str]) -> str:
    """Write down what is known so far; the table with what follows from it."""
    results = [compared(case, rows.get(case.name)) for case in cases]
    text = "\n".join([*table(results), "", *summary(results), *verdicts(results, chosen)])
    write_json(out / "results.json", results)
    write_text(out / "table.md", text + "\n")
    return text


def write_predictions(path: Path, bench: Bench, cases: Sequence[Case], chosen: Row) -> None:
    """All that is claimed, with the time of claiming it."""
    settings = {
        group: bench.setting(*group.split())
        for group in dict.fromkeys(case.group for case in cases)
    }
    predicted = [
        {
            "name": case.name,
            "group": case.group,
            "case": case.spec,
            "prediction": to_json(case.prediction.planned()),
        }
        for case in cases
    ]
    when = datetime.now(UTC).isoformat(timespec="seconds")
    about = {
        group: {
            "machine": to_json(setting.machine.planned(0, 0)),
            "workload": vars(setting.workload),
        }
        for group, setting in settings.items()
    }
    write_json(path, {"written_at": when, "groups": about, "auto": chosen, "cases": predicted})


def compared(case: Case, row: Row | None) -> Row:
    """A prediction beside what came of it; None where nothing was measured."""
    row = row or {"problem": "not measured, no time was left"}
    prediction = case.prediction
    peak = row["peak_bytes"] - row["left_bytes"] if "peak_bytes" in row else None
    return {
        "name": case.name,
        "group": case.group,
        "fits": prediction.fits,
        "problem": row.get("problem"),
        "time": beside(prediction.step_s, row.get("step_s")),
        "memory": beside(prediction.peak_memory_bytes, peak),
        "phases": {
            name: beside(getattr(prediction, name), row.get(name))
            for name in ("forward_s", "backward_s", "update_s")
        },
        "measured": row,
    }


if __name__ == "__main__":
    main()
