"""The quick answer to whether a run fits is that of the whole search, and the cluster it names is the smallest."""

import re
import time
from collections.abc import Collection
from dataclasses import replace

import pytest

from pipeline_lib.base.errors import DataError
from pipeline_lib.config.schema import Cluster, Train
from pipeline_lib.plan.choice import Setting, candidates, choose
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.feasible import Wanted, leanest, no_way, smallest_cluster, what_would_fit
from pipeline_lib.plan.geometry import Geometry
from pipeline_lib.plan.gpus import find_gpu
from pipeline_lib.plan.machine import Machine
from pipeline_lib.plan.models import published
from pipeline_lib.plan.workload import Workload

BLOCKS = Workload(2048, 0.98, 0.5, 512.0, None, None, is_assumed=True)


def wanted(
    name: str,
    gpu: str,
    per_node: int,
    memory_gb: int | None = 64,
    held: Collection[str] = (),
    deepspeed: bool = True,
    batch_blocks: int = 64,
    **train: object,
) -> Wanted:
    cluster = Cluster(gpus_per_node=per_node, gpu=gpu, memory_gb=memory_gb)
    machine = machine_of(cluster, "bf16", None)
    assert machine
    setting = Setting(Geometry.from_config(published(name) or {}), machine, BLOCKS, batch_blocks, None)
    settings = Train.model_validate({"strategy": "auto", "global_batch_tokens": batch_blocks * 2048, **train})
    return Wanted(setting, settings, held, deepspeed)


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize(("gpu", "per_node"), [("a10", 1), ("a10", 4), ("a100 80gb", 2), ("h200", 8)])
@pytest.mark.parametrize("held", [(), ("offload",), ("recompute", "micro_batch_blocks")])
@pytest.mark.parametrize(("memory_gb", "deepspeed"), [(8, True), (600, True), (600, False)])
def test_it_fits_if_any_of_all_ways_does(
    name: str, gpu: str, per_node: int, held: tuple[str, ...], memory_gb: int, deepspeed: bool
) -> None:
    asked = wanted(name, gpu, per_node, memory_gb, held, deepspeed)
    try:
        choose(asked.setting, asked.train, held, deepspeed)
    except DataError:
        assert not asked.fits
    else:
        assert asked.fits


@pytest.mark.parametrize(("gpu", "per_node"), [("a10", 1), ("h200", 8)])
def test_the_leanest_way_is_the_leanest_of_all(gpu: str, per_node: int) -> None:
    asked = wanted("qwen3-1.7b", gpu, per_node, memory_gb=2000)
    found = [asked.setting.predict(train).memory.total_bytes for train in candidates(asked.setting, asked.train, ())]
    assert leanest(asked)[0][1].total_bytes == min(found)


def can_train(asked: Wanted, machine: Machine) -> bool:
    """By the whole search, on another machine."""
    blocks = max(64, machine.ranks)
    setting = replace(asked.setting, machine=machine, batch_blocks=blocks)
    return any(setting.predict(train).fits for train in candidates(setting, asked.train, asked.held))


def test_the_smallest_cluster_is_enough_and_a_smaller_one_is_not() -> None:
    asked = wanted("qwen3-8b", "a10", 2, memory_gb=8)
    machine = asked.setting.machine
    said = smallest_cluster(asked)
    assert said is not None
    assert said.startswith("cluster.nodes 2 with cluster.gpus_per_node 8 of A10, or as many ")
    assert can_train(asked, replace(machine, nodes=2, ranks_per_node=8))
    assert not can_train(asked, replace(machine, nodes=1, ranks_per_node=8))
    gpu = find_gpu(said.partition("as many ")[2].partition(" of ")[0])
    assert gpu
    assert can_train(asked, replace(machine, gpu_memory_bytes=gpu.memory_bytes))
    smaller = find_gpu("a6000")
    assert smaller
    assert machine.gpu_memory_bytes
    assert machine.gpu_memory_bytes < smaller.memory_bytes < gpu.memory_bytes
    assert not can_train(asked, replace(machine, gpu_memory_bytes=smaller.memory_bytes))


SMALLEST: dict[str, Wanted] = {
    "three within a node": wanted("qwen3-1.7b", "a10", 1, 8, batch_blocks=12),
    "a batch that few can share": wanted("qwen3-1.7b", "a10", 1, 8, batch_blocks=10),
    "six of a strategy": wanted("qwen3-30b-a3b", "h100", 6, 64, strategy="fsdp", batch_blocks=24),
    "offloaded": wanted("qwen3-14b", "a10", 2, 64, batch_blocks=48),
    "held": wanted("qwen3-14b", "a100", 2, 64, ("micro_batch_blocks",), micro_batch_blocks=2, batch_blocks=48),
    "replicas": wanted("qwen3-14b", "a100", 2, 64, ("shard_ranks",), shard_ranks=6, batch_blocks=48),
    "more than the batch has blocks": wanted("qwen3-14b", "a10", 2, 8, batch_blocks=4),
}


@pytest.mark.parametrize("asked", SMALLEST.values(), ids=SMALLEST)
def test_of_all_clusters_that_share_the_batch_the_one_with_the_fewest_gpus_is_named(asked: Wanted) -> None:
    said = smallest_cluster(asked)
    match = re.match(
        r"(?:cluster.nodes (\d+) with )?cluster.gpus_per_node (\d+) of .*?( and train.global_b\w+ \d+)?", said or ""
    )
    assert match, said
    nodes, per_node = int(match[1] or 1), int(match[2])
    machine, at_once, blocks = asked.setting.machine, asked.blocks_at_once, asked.setting.batch_blocks
    assert ("train.global_batch_tokens" in (said or "")) == (nodes * per_node * at_once > blocks)
    assert asked.on(replace(machine, nodes=nodes, ranks_per_node=per_node)).fits
    sharing = [
        total for total in range(1, nodes * per_node) if total * at_once > blocks or blocks % (total * at_once) == 0
    ]
    shapes = [(total // size, size) for total in sharing for size in range(1, 9) if total % size == 0]
    assert not any(asked.on(replace(machine, nodes=n, ranks_per_node=size)).fits for n, size in shapes)


def test_the_smallest_cluster_is_found_while_people_wait() -> None:
    asked = wanted("qwen3-235b-a22b", "a10", 8, memory_gb=8)
    start_s = time.process_time()
    assert "cluster.nodes 4" in (smallest_cluster(asked) or "")
    assert time.process_time() - start_s < 0.5


@pytest.mark.parametrize("deepspeed", [True, False])
def test_a_remedy_needs_nothing_that_is_not_installed(deepspeed: bool) -> None:
    asked = wanted("qwen3-8b", "h100", 8, 600, deepspeed=deepspeed, strategy="ddp", micro_batch_blocks=1)
    text = " ".join(what_would_fit(asked))
    assert ("train.strategy: zero" in text) == deepspeed
    assert "train.strategy: fsdp" in text


def test_who_says_how_many_ranks_shard_gets_replicas_only() -> None:
    asked = wanted("qwen3-1.7b", "h200", 8, 600, ("shard_ranks",), shard_ranks=4)
    ways = [train for train, _ in leanest(asked)]
    assert {(train.strategy, train.shard_ranks) for train in ways} == {("hsdp", 4)}
    given = wanted("qwen3-1.7b", "h200", 8, 600, ("shard_ranks",), shard_ranks=None)
    assert "hsdp" not in {train.strategy for train, _ in leanest(given)}


def test_where_the_host_memory_is_not_known_it_is_said_how_much_a_way_needs() -> None:
    assert wanted("qwen3-32b", "a10", 2, None).fits
    few = wanted(
        *("qwen3-32b", "a10", 2, None),
        strategy="zero3",
        offload="optimizer",
        recompute="full",
        micro_batch_blocks=1,
    )
    sharded = what_would_fit(few)
    assert not any("cluster.memory_gb" in said for said in sharded)
    assert re.search(r"do: cluster.gpus_per_node \d of A10, with [\d.]+ GB of host memory on", sharded[-1])
    given = wanted("qwen3-8b", "a10", 2, None, strategy="ddp", micro_batch_blocks=1)
    remedy = r"train.offload: optimizer\+params.* a GPU\), with [\d.]+ GB of host memory on each node"
    assert any(re.search(remedy, said) for said in what_would_fit(given))
    alone = wanted("qwen3-8b", "h200", 8, None, strategy="ddp", micro_batch_blocks=32)
    assert not any("host memory" in said for said in what_would_fit(alone))


def test_keys_that_allow_no_way_at_all_are_named() -> None:
    held = ("offload", "recompute")
    assert no_way(wanted("qwen3-0.6b", "h200", 8, 600, held, True, offload="optimizer")) is None
    assert no_way(wanted("qwen3-0.6b", "h200", 8, 600, held, False, offload="optimizer")) == (
        "train.strategy: auto finds no way to train beside train.offload: optimizer, without DeepSpeed, which is not "
        "installed here; leave one out"
    )
    held = ("shard_ranks", "offload")
    both = no_way(wanted("qwen3-0.6b", "h200", 8, 600, held, True, shard_ranks=4, offload="optimizer"))
    assert both == (
        "train.strategy: auto finds no way to train beside train.shard_ranks: 4 and train.offload: optimizer; "
        "leave one out"
    )


def test_where_no_cluster_is_enough_it_says_what_is_not_spread() -> None:
    asked = wanted("qwen3-8b", "a10", 8, strategy="ddp", recompute="full", method="lora", micro_batch_blocks=1)
    longest = replace(asked.setting, workload=replace(BLOCKS, block_tokens=2**20))
    [said] = what_would_fit(replace(asked, setting=longest))
    assert said.startswith("no number of GPUs would do: what a block of 1048576 tokens needs is not spread over them")


def test_a_key_that_is_held_is_named_where_leaving_it_out_is_enough() -> None:
    asked = wanted("qwen3-8b", "a100 80gb", 2, 8, ("micro_batch_blocks",), micro_batch_blocks=32)
    assert "this would fit: train.micro_batch_blocks left out, so that the plan chooses it" in what_would_fit(asked)
