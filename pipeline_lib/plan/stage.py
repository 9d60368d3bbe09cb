"""The plan stage: what the run will take, as a table for people and plan.json for the launcher."""

from dataclasses import asdict
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from pipeline_lib.base.errors import DataError
from pipeline_lib.base.fsio import require_space, write_json, write_text
from pipeline_lib.base.stage import Job
from pipeline_lib.config.schema import PLACEMENT_KEYS, Cluster, Tracking, Train, read_settings, settings_of
from pipeline_lib.data.shard.blocks import BlockIndex
from pipeline_lib.plan.arithmetic import (
    BatchPlan,
    checkpoint_bytes,
    plan_batches,
)
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.memory import PARTS, Ranks, gib, predict_all

SCHEMA = 2


def run(job: Job) -> dict[str, Any]:
    """Compute the plan, show it and write plan.json. Raises what would fail later: model, length, steps, disk."""
    train = read_settings(Train, job.spec.settings["train"])
    cluster = read_settings(Cluster, job.spec.settings["cluster"])
    geometry = Geometry.from_folder(job.inputs["model"].path)
    shard = job.inputs["shard"].path
    training, held_out = BlockIndex.read(shard / "train"), BlockIndex.read(shard / "validation")
    _refuse_misfit(geometry, training.block_tokens, max(training.largest_token, held_out.largest_token))
    batch = plan_batches(train, cluster.ranks, training, held_out.blocks)
    one_checkpoint = checkpoint_bytes(geometry, train)
    needed_bytes = one_checkpoint * (train.keep_last + train.keep_best + 1)
    kept = f"{train.keep_last} checkpoints{' and the best' if train.keep_best else ''}"
    require_space(job.store.root, needed_bytes, f"keeping {kept} and writing one")
    plan = {
        "schema": SCHEMA,
        "experiment": job.spec.settings["experiment"],
        "model": _describe_model(geometry, train),
        "cluster": _describe_cluster(cluster),
        "train": settings_of(train),
        "tracking": read_settings(Tracking, job.spec.settings["tracking"]).model_dump(mode="json"),
        "batch": asdict(batch),
        "memory": _describe_memory(geometry, train, cluster, batch),
        "chosen": {key: getattr(train, key) for key in sorted(PLACEMENT_KEYS)},
        "disk": {"checkpoint_bytes": one_checkpoint, "needed_bytes": needed_bytes},
    }
    write_json(job.out / "plan.json", plan)
    table = render(plan)
    write_text(job.out / "plan.txt", table + "\n")
    job.say(table)
    return {"steps": batch.steps, "tokens_per_step": batch.tokens_per_step}


def _refuse_misfit(geometry: Geometry, block_tokens: int, largest_token: int) -> None:
    if block_tokens > geometry.max_positions:
        raise DataError(
            f"shard.block_tokens: {block_tokens} tokens are more than the model's "
            f"{geometry.max_positions} positions; lower it"
        )
    if largest_token >= geometry.vocab:
        raise DataError(
            f"the blocks hold token {largest_token}, but the model's vocabulary ends at {geometry.vocab - 1}: the "
            "tokenizer in its folder belongs to another model; put the right one there"
        )


def _describe_model(geometry: Geometry, train: Train) -> dict[str, int]:
    return {
        "parameters": geometry.parameters,
        "trainable_parameters": geometry.trained_parameters(train),
        "matmul_parameters": geometry.matmul_parameters,
        "layers": geometry.layers,
        "hidden_size": geometry.hidden,
        "vocab_tokens": geometry.vocab,
    }


def _describe_cluster(cluster: Cluster) -> dict[str, Any]:
    return {
        "nodes": cluster.nodes,
        "ranks": cluster.ranks,
        "device": cluster.device,
        "launcher": cluster.launcher,
        "cpus_per_rank": cluster.cpus_per_rank,
    }


def _describe_memory(geometry: Geometry, train: Train, cluster: Cluster, batch: BatchPlan) -> dict[str, Any]:
    ranks = Ranks(cluster.ranks, cluster.ranks // cluster.nodes)
    predicted = predict_all(geometry, train, ranks, batch.block_tokens, batch.accumulation)
    return {strategy: memory.as_json() for strategy, memory in predicted.items()}


def render(plan: dict[str, Any]) -> str:
    """The plan as a table of text."""
    table = Table("what", "value", title=f"plan of {plan['experiment']}", title_justify="left")
    for name, value in [*_model_rows(plan), *_batch_rows(BatchPlan(**plan["batch"])), *_memory_rows(plan)]:
        table.add_row(name, value)
    console = Console(file=StringIO(), width=100)
    console.print(table)
    return str(console.file.getvalue()).rstrip()  # type: ignore[attr-defined]


def _model_rows(plan: dict[str, Any]) -> list[tuple[str, str]]:
    model, cluster = plan["model"], plan["cluster"]
    return [
        ("model", f"{model['parameters']:,} parameters, {model['trainable_parameters']:,} trained"),
        ("ranks", f"{cluster['ranks']} on {cluster['device']}, {cluster['cpus_per_rank']} threads each"),
    ]


def _batch_rows(batch: BatchPlan) -> list[tuple[str, str]]:
    used = "" if batch.epoch_blocks == batch.blocks else f"; the first epoch uses {batch.epoch_blocks:,}, as weighted"
    return [
        ("blocks", f"{batch.blocks:,} of {batch.block_tokens} tokens, {batch.padding_fraction:.2%} padding{used}"),
        (
            "step",
            f"{batch.global_batch_blocks} blocks = {batch.tokens_per_step:,} tokens: "
            f"micro-batch {batch.micro_batch_blocks} x accumulation {batch.accumulation} per rank",
        ),
        (
            "steps",
            f"{batch.steps:,} in {batch.epochs} epochs ({batch.steps_per_epoch:,} in the first, "
            f"the last of them of {batch.last_step_blocks} blocks)",
        ),
    ]


def _memory_rows(plan: dict[str, Any]) -> list[tuple[str, str]]:
    """The chosen strategy's memory part by part, and what the others would take."""
    chosen, is_gpu = plan["memory"][plan["chosen"]["strategy"]], plan["cluster"]["device"] == "cuda"
    total = "total_bytes" if is_gpu else "allocated_bytes"  # the reserve is that of a GPU
    parts = [part for part in PARTS if chosen[f"{part}_bytes"] and (is_gpu or part != "reserve")]
    on_host = f"; and {gib(chosen['host_bytes'])} in host memory" if chosen["host_bytes"] else ""
    others = {name: memory[total] for name, memory in plan["memory"].items() if memory is not chosen}
    rows = [
        (f"memory, {plan['chosen']['strategy']}", f"{gib(chosen[total])} a rank, {chosen['moment']}"),
        ("of that", ", ".join(f"{part} {gib(chosen[f'{part}_bytes'])}" for part in parts) + on_host),
        ("other strategies", ", ".join(f"{name} {gib(size)}" for name, size in others.items())),
    ]
    disk = plan["disk"]
    one, needed = _size(disk["checkpoint_bytes"]), _size(disk["needed_bytes"])
    best = ", the best" if plan["train"].get("keep_best") else ""
    keeping = f"{plan['chosen']['keep_last']} kept{best} and one being written"
    rows.append(("checkpoint", f"{one} each, every {plan['chosen']['save_every_steps']} steps; {needed} for {keeping}"))
    return rows


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.2f} GB" if size_bytes >= 1e9 else f"{size_bytes / 1e6:.1f} MB"
