"""All legal ways to train: every combination of what a config leaves open, as one table."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from pipeline_lib.arch.layers import (
    can_compile,
    can_keep_attention,
    can_keep_on_host,
    is_sharded,
)
from pipeline_lib.config.checks import train_problems
from pipeline_lib.config.schema import Cluster
from pipeline_lib.config.strategies import STRATEGIES
from pipeline_lib.config.train import AUTO, Train
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.context import sharing_counts
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.ways import Ways
from pipeline_lib.plan.workload import free_keys

RECOMPUTE = ("none", "selective", "full")
OFFLOAD = ("none", "optimizer", "optimizer+params")
Options = Mapping[str, Sequence[Any]]  # values to try of each key


def ways_of(case: Case, counts: Sequence[int], is_lean: bool = False) -> Ways:
    """Return all legal ways of `case` with these numbers of ranks to a block; there may be none.

    `save_async: auto` stays, since it costs no way anything. With `is_lean` these are the ways that
    need least memory: one fits if any of all does.
    """
    kinds = [
        kind
        for options in _options(case, counts, is_lean)
        for kind in _kinds(case, options)
        if is_legal(kind, case.ranks)
    ]
    kinds = [each for kind in kinds for each in _run_as(case, kind, is_lean)]
    return _table(case, kinds, counts, is_lean)


def is_legal(train: Train, ranks: Ranks) -> bool:
    """Return whether the config's checks allow these ranks to train this way."""
    cluster = Cluster.model_construct(
        nodes=ranks.total // ranks.per_node, gpus_per_node=ranks.per_node
    )
    return not train_problems(train, cluster)


def strategies_of(case: Case) -> list[str]:
    """Return the strategies to try: the named one, or all that the model and libraries allow."""
    train = case.train
    if train.strategy != AUTO:
        return [train.strategy]
    is_for_hsdp = train.shard_ranks is not None and "shard_ranks" not in free_keys(
        train, case.fixed
    )
    found = ["hsdp"] if is_for_hsdp else [name for name in STRATEGIES]
    if not case.has_deepspeed:
        found = [name for name in found if not STRATEGIES[name].uses_deepspeed]
    return [name for name in found if name not in case.geometry.left_out]


def _options(case: Case, counts: Sequence[int], is_lean: bool) -> Iterator[Options]:
    """Yield, strategy by strategy, the values of the keys that need no other key to be known."""
    train = case.train
    free = free_keys(train, case.fixed)
    ranks = case.ranks.total
    for strategy in strategies_of(case):
        row = STRATEGIES[strategy]
        shards: Sequence[int | None] = [train.shard_ranks]
        if train.strategy == AUTO and strategy != "hsdp":
            shards = [None]
        elif "shard_ranks" in free:
            shards = [size for size in range(2, ranks) if ranks % size == 0]
        offloads: Sequence[str] = [train.offload]
        if "offload" in free:
            # Without GPUs the state lies in host memory anyway.
            offloads = row.offloads if case.machine.is_gpu else ["none"]
        recomputes: Sequence[str] = [train.recompute]
        if "recompute" in free:
            recomputes = ["full"] if is_lean else RECOMPUTE
        yield {
            "strategy": [strategy],
            "shard_ranks": shards,
            "context_ranks": counts,
            "offload": offloads,
            "recompute": recomputes,
        }


def _kinds(case: Case, options: Options) -> Iterator[Train]:
    """Yield each combination, with activations on the device, and if possible on the host."""
    given = case.train.offload_activations
    for values in product(*options.values()):
        changes = dict(zip(options, values, strict=True))
        kind = case.train.model_copy(update=changes)
        # a number that is given has no effect
        if not can_keep_attention(kind, case.workload.block_tokens):
            changes["kept_attention_layers"] = AUTO
        places = [given]
        if given == AUTO:
            can_move = case.machine.is_gpu and can_keep_on_host(kind)
            places = [False, True] if can_move else [False]
        for place in places:
            yield kind.model_copy(update={**changes, "offload_activations": place})


def _run_as(case: Case, kind: Train, is_lean: bool) -> Iterator[Train]:
    """Yield `kind` with every value of keys that depend on the others and are always legal."""
    free = free_keys(case.train, case.fixed)
    machine = case.machine
    is_memory_known = machine.gpu_memory_bytes is not None or machine.host_memory_bytes is not None
    reshards: list[Any] = [kind.reshard]
    if "reshard" in free:
        may_stay = is_sharded(kind) and is_memory_known and not is_lean
        reshards = [False, True] if may_stay else [True]
    compiles: list[Any] = [kind.compile]
    if "compile" in free:
        compiles = [False, True] if can_compile(kind, machine.has_triton) else [False]
    for reshard, compiled in product(reshards, compiles):
        yield kind.model_copy(update={"reshard": reshard, "compile": compiled})


def _table(case: Case, kinds: Sequence[Train], counts: Sequence[int], is_lean: bool) -> Ways:
    """Return the table of each kind with each micro-batch and each number of kept layers."""
    most = case.geometry.attention_layers
    kind_of: list[int] = []
    micro: list[int] = []
    kept: list[int] = []
    sizes_of = {count: _micro_batches(case, count, is_lean) for count in counts}
    for number, kind in enumerate(kinds):
        layers: Sequence[int] = [most]
        if kind.kept_attention_layers != AUTO:
            layers = [int(kind.kept_attention_layers)]
        elif can_keep_attention(kind, case.workload.block_tokens):
            layers = [0] if is_lean else range(most + 1)
        for size in sizes_of[kind.ranks_per_block]:
            kind_of += [number] * len(layers)
            micro += [size] * len(layers)
            kept += layers
    return Ways(
        kinds=kinds,
        kind=np.array(kind_of, np.int64),
        micro_batch_blocks=np.array(micro, np.int64),
        kept_layers=np.array(kept, np.int64),
        attention_layers=most,
    )


def _micro_batches(case: Case, ranks_per_block: int, is_lean: bool) -> list[int]:
    """Return the micro-batches to try: for each number of passes the smallest that does, or given.

    The last pass may lack some blocks.
    """
    if "micro_batch_blocks" not in free_keys(case.train, case.fixed):
        return [case.train.micro_batch_blocks]
    of_a_rank = math.ceil(case.batch_blocks * ranks_per_block / case.ranks.total)
    if is_lean:
        return sorted({1, of_a_rank})
    return sorted({math.ceil(of_a_rank / passes) for passes in range(1, of_a_rank + 1)})


def rank_counts(case: Case) -> list[int]:
    """Return the numbers of ranks that may share each block; 1 alone if each leaves ranks idle."""
    sizes = (case.workload.block_tokens, case.batch_blocks)
    return sharing_counts(case.geometry, case.train, case.fixed, case.ranks, *sizes) or [1]
