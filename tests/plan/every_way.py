"""A plain loop over all legal ways, which shares nothing with the planner's table but its formulas."""

import random
from itertools import product
from typing import Any

import numpy as np

from pipeline_lib.arch.families import geometry_in, published
from pipeline_lib.arch.layers import can_compile, can_keep_attention, can_keep_on_host
from pipeline_lib.config.checks import allows_count, train_problems
from pipeline_lib.config.schema import Cluster
from pipeline_lib.config.strategies import STRATEGIES
from pipeline_lib.config.train import Train
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.choose import Choice, choose
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.machine import End
from pipeline_lib.plan.passes import COMPILE_S
from pipeline_lib.plan.predict import predict_step
from pipeline_lib.plan.step_time import step_time
from pipeline_lib.plan.ways import Column, Mask, Ways
from pipeline_lib.records.plan import Workload

AS_GOOD = 1.01  # what a plan may cost, relative to the least


def case_of(
    model: str,
    cluster: dict[str, Any],
    block_tokens: int,
    blocks: int,
    steps: int | None = None,
    documents: float | None = None,
    **train: Any,
) -> Case:
    settings = {"strategy": "auto", "global_batch_tokens": block_tokens * blocks, **train}
    config = Cluster.model_validate(cluster)
    machine = machine_of(config, settings.get("precision", "bf16"), None)
    assert machine is not None
    geometry = geometry_in(published(f"Qwen/{model}") or {})
    tokens = documents or block_tokens / 4
    data = Workload(block_tokens, 0.98, 0.5, tokens, None, None, is_assumed=True)
    return Case(geometry, Train.model_validate(settings), machine, data, blocks, steps)


def kinds_of(case: Case) -> list[Train]:
    """All legal settings, but for the micro-batch and the layers that keep their attention."""
    train = case.train
    ranks = case.ranks
    machine = case.machine
    cluster = Cluster.model_construct(nodes=machine.nodes, gpus_per_node=machine.ranks_per_node)
    shards = [None, *(size for size in range(2, ranks.total) if ranks.total % size == 0)]
    counts = [
        count
        for count in case.geometry.sharing_ranks
        if ranks.per_node % count == 0 and allows_count(train, case.workload.block_tokens, count)
    ]
    found = []
    for strategy, shard, count, offload, recompute, away, reshard, compiled in product(
        STRATEGIES,
        shards,
        counts,
        ("none", "optimizer", "optimizer+params"),
        ("none", "selective", "full"),
        (False, True),
        (False, True),
        (False, True),
    ):
        if (shard is not None) != (strategy == "hsdp"):
            continue
        if reshard is False and strategy not in ("fsdp", "hsdp"):
            continue
        if offload not in STRATEGIES[strategy].offloads:
            continue
        way = train.model_copy(
            update={
                "strategy": strategy,
                "shard_ranks": shard,
                "context_ranks": count,
                "offload": offload,
                "recompute": recompute,
                "offload_activations": away,
                "reshard": reshard,
                "compile": compiled,
                "save_async": False,
            }
        )
        if away and not can_keep_on_host(way):
            continue
        if compiled and not can_compile(way, machine.has_triton):
            continue
        if not train_problems(way, cluster):
            found.append(way)
    return found


def every_way(case: Case) -> Ways:
    """All legal ways with every micro-batch, and every sixth number of layers that keep."""
    most = case.geometry.attention_layers
    of_a_rank = -(-case.batch_blocks // case.ranks.total)
    kinds = kinds_of(case)
    rows = []
    for number, kind in enumerate(kinds):
        layers = [most]
        if can_keep_attention(kind, case.workload.block_tokens):
            layers = [*range(0, most, 6), most]
        sizes = range(1, of_a_rank * kind.ranks_per_block + 1)
        rows += [(number, size, kept) for size in sizes for kept in layers]
    kind_of, micro, kept_layers = np.array(rows, np.int64).reshape(-1, 3).T
    return Ways(kinds, kind_of, micro, kept_layers, most)


def fits(case: Case, ways: Ways) -> Mask:
    """Which of them GPUs and hosts have room for."""
    memory = case.memory_of(ways)
    machine = case.machine
    fitting = memory.fits_on_gpu(machine.gpu_memory_bytes)
    limit = machine.host_limit_bytes
    if limit is not None:
        has_room = memory.host_of_node(machine.is_gpu) <= limit
        fitting = fitting & (has_room | (machine.is_host_assumed & (memory.host == 0)))
    return fitting


def costs(case: Case, ways: Ways) -> Column:
    """Three quarters of the expected seconds and a quarter of the bad end's, with compilation."""
    expected_s = step_time(case, ways, End.EXPECTED).total_s
    bad_s = step_time(case, ways, End.BAD).total_s
    compiled = ways.which(lambda train: train.compile is True, "compile")
    compiling_s = COMPILE_S / case.steps if case.steps else 0.0
    return 0.75 * expected_s + 0.25 * bad_s + compiling_s * compiled


def cost_of(case: Case, train: Train) -> float:
    return float(costs(case, Ways.one(train, case.geometry))[0])


def is_best(case: Case) -> bool:
    """Whether no way that fits costs 1 % less than the choice; False if nothing fits in a node."""
    found: Choice = choose(case)
    ways = every_way(case)
    fitting: Mask = np.zeros(0, np.bool_)
    if len(ways):
        fitting = fits(case, ways)
    is_within = found.chosen.train.ranks_per_block <= case.machine.ranks_per_node
    assert bool(fitting.any()) == (found.chosen.fits and is_within)
    if not fitting.any():
        return False
    least = costs(case, ways.at(fitting)).min()
    assert cost_of(case, found.chosen.train) <= AS_GOOD * least
    assert predict_step(case.by(found.chosen.train)).step_s == found.chosen.step_s
    return True


def some_case(dice: random.Random) -> Case:
    gpus = dice.choice([1, 2, 4])
    nodes = dice.choice([1, 1, 2])
    cluster = {
        "nodes": nodes,
        "gpus_per_node": gpus,
        "gpu": dice.choice(["a10", "3090", "4090", "a100 80gb", "h100", "5090"]),
        "internode_gbit_s": dice.choice([10, 200]),
        "memory_gb": dice.choice([None, 64, 512]),
    }
    block_tokens = dice.choice([1024, 4096, 32_768])
    return case_of(
        dice.choice(["Qwen3-0.6B", "Qwen3-8B", "Qwen3-30B-A3B", "Qwen3-32B"]),
        cluster,
        block_tokens,
        gpus * nodes * dice.choice([1, 2, 3]),
        steps=dice.choice([None, 30, 3000]),
        documents=dice.choice([500.0, block_tokens]),
        method=dice.choice(["full", "lora"]),
        optimizer=dice.choice(["adamw", "adamw_8bit"]),
    )
