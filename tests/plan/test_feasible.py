"""The quick answer on whether a run fits is the full search's; the cluster it names is smallest."""

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from pipeline_lib.arch.families import geometry_in, published
from pipeline_lib.config.schema import Cluster
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.units import gib
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.choose import WayNeeds, best_way, choose, fits_somehow, leanest, no_way
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.fitting import (
    blocks_at_once,
    on,
    remedies_of,
    smallest_cluster,
    what_would_fit,
)
from pipeline_lib.plan.gpus import find_gpu
from pipeline_lib.plan.legal import rank_counts, ways_of
from pipeline_lib.plan.machine import Machine
from pipeline_lib.plan.predict import memory_of
from pipeline_lib.records.plan import Workload
from tests.plan.fleet import asking, case_of, lean

BLOCKS = Workload(2048, 0.98, 0.5, 512.0, None, None, is_assumed=True)


def wanted(
    name: str,
    gpu: str,
    per_node: int,
    memory_gb: int | None = 64,
    fixed: Collection[str] = (),
    deepspeed: bool = True,
    batch_blocks: int = 64,
    **train: object,
) -> Case:
    cluster = Cluster(gpus_per_node=per_node, gpu=gpu, memory_gb=memory_gb)
    machine = machine_of(cluster, "bf16", None)
    assert machine
    setting = case_of(geometry_in(published(name) or {}), machine, BLOCKS, batch_blocks, None)
    settings = Train.model_validate(
        {"strategy": "auto", "global_batch_tokens": batch_blocks * 2048, **train}
    )
    return asking(setting, settings, fixed, deepspeed)


def ways(asked: Case) -> list[Train]:
    """All of them, one by one."""
    table = ways_of(asked, rank_counts(asked))
    return [table.train(row) for row in range(len(table))]


@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b"])
@pytest.mark.parametrize(
    ("gpu", "per_node"), [("a10", 1), ("a10", 4), ("a100 80gb", 2), ("h200", 8)]
)
@pytest.mark.parametrize("fixed", [(), ("offload",), ("recompute", "micro_batch_blocks")])
@pytest.mark.parametrize(("memory_gb", "deepspeed"), [(8, True), (600, True), (600, False)])
def test_it_fits_if_any_of_all_ways_does(
    name: str, gpu: str, per_node: int, fixed: tuple[str, ...], memory_gb: int, deepspeed: bool
) -> None:
    asked = wanted(name, gpu, per_node, memory_gb, fixed, deepspeed)
    try:
        choice = choose(asked)
    except DataError:
        assert not fits_somehow(asked)
    else:
        assert fits_somehow(asked) == choice.chosen.fits


@pytest.mark.parametrize(("gpu", "per_node"), [("a10", 1), ("h200", 8)])
def test_the_leanest_way_is_the_leanest_of_all(gpu: str, per_node: int) -> None:
    asked = wanted("qwen3-1.7b", gpu, per_node, memory_gb=2000)
    found = [
        memory_of(asked.by(train)).total_bytes
        for train in ways(asked)
        if train.context_ranks == lean(asked)[0].context_ranks
    ]
    assert lean(asked)[1].total_bytes == min(found)


def can_train(asked: Case, machine: Machine) -> bool:
    """By the whole search, on another machine."""
    blocks = max(64, machine.ranks)
    return bool(WayNeeds.of(replace(asked, machine=machine, batch_blocks=blocks)).fits.any())


def test_the_smallest_cluster_is_enough_and_a_smaller_one_is_not() -> None:
    asked = wanted("qwen3-8b", "a10", 2, memory_gb=600, fixed=("offload",))
    machine = asked.machine
    said = smallest_cluster(asked)
    assert said is not None
    assert said.startswith("cluster.nodes 8 with cluster.gpus_per_node 2 of A10 (which needs ")
    assert ", or the configured 1 node of 2 GPUs, with " in said
    assert can_train(asked, replace(machine, nodes=8, ranks_per_node=2))
    assert not can_train(asked, replace(machine, nodes=4, ranks_per_node=2))
    assert not can_train(asked, replace(machine, nodes=1, ranks_per_node=8))
    gpu = find_gpu(said.partition(" of 2 GPUs, with ")[2].partition(" of ")[0])
    assert gpu
    assert can_train(asked, replace(machine, gpu_memory_bytes=gpu.memory_bytes))
    smaller = find_gpu("a6000")
    assert smaller
    assert machine.gpu_memory_bytes
    assert machine.gpu_memory_bytes < smaller.memory_bytes < gpu.memory_bytes
    assert not can_train(asked, replace(machine, gpu_memory_bytes=smaller.memory_bytes))


SMALLEST: dict[str, Case] = {
    "three within a node": wanted("qwen3-1.7b", "a10", 1, 600, ("offload",), batch_blocks=12),
    "a batch that few can share": wanted(
        "qwen3-1.7b", "a10", 1, 600, ("offload",), batch_blocks=10
    ),
    "six of a strategy": wanted("qwen3-30b-a3b", "h100", 6, 600, strategy="fsdp", batch_blocks=24),
    "offloaded": wanted("qwen3-14b", "a10", 2, 300, batch_blocks=48),
    "held": wanted(
        "qwen3-14b", "a100", 2, 64, ("micro_batch_blocks",), micro_batch_blocks=2, batch_blocks=48
    ),
    "replicas": wanted(
        "qwen3-14b", "a100", 2, 300, ("shard_ranks",), shard_ranks=6, batch_blocks=48
    ),
    "replicas of several nodes": wanted(
        "qwen3-32b", "a10", 4, 300, ("shard_ranks",), shard_ranks=24, batch_blocks=48
    ),
    "more than the batch has blocks": wanted(
        "qwen3-14b", "a10", 2, 600, ("offload",), batch_blocks=4
    ),
    "nodes of eight": wanted("qwen3-32b", "h100", 8, 400, batch_blocks=32),
    "two of the eight of a node": wanted(
        "qwen3-4b", "h100", 8, 48, strategy="zero1", offload="optimizer"
    ),
}


@pytest.mark.parametrize("asked", SMALLEST.values(), ids=SMALLEST)
def test_of_all_clusters_from_now_on_that_share_the_batch_the_one_with_the_fewest_gpus_is_named(
    asked: Case,
) -> None:
    """Nodes that use fewer of their GPUs than now count only where no others would do."""
    said = smallest_cluster(asked)
    match = re.match(
        r"(?:cluster.nodes (\d+) with )?cluster.gpus_per_node (\d+) of .*?( and train.global_b\w+ \d+)?",
        said or "",
    )
    assert match, said
    nodes, per_node = int(match[1] or 1), int(match[2])
    machine, blocks = asked.machine, asked.batch_blocks
    at_once = blocks_at_once(asked, replace(machine, nodes=1, ranks_per_node=1))
    assert ("train.global_batch_tokens" in (said or "")) == (nodes * per_node * at_once > blocks)
    assert fits_somehow(on(asked, replace(machine, nodes=nodes, ranks_per_node=per_node)))
    now, total = machine.ranks_per_node, nodes * per_node
    assert total >= machine.ranks
    sharing = [
        fewer
        for fewer in range(machine.ranks, total)
        if fewer * at_once > blocks or blocks % (fewer * at_once) == 0
    ]
    sizes = range(now, 9) if per_node >= now else range(1, now)
    shapes = [(fewer // size, size) for fewer in sharing for size in sizes if fewer % size == 0]
    if per_node < now:
        shapes += [(n, now) for n in range(1, 513)]
    elif nodes > 1:
        shapes += [(1, total)] if total <= 8 else []
        shapes += [(total // now, now)] if total % now == 0 and per_node != now else []
    assert not any(
        fits_somehow(on(asked, replace(machine, nodes=n, ranks_per_node=size)))
        for n, size in shapes
    )


def test_that_no_number_of_replicas_would_do_is_found_while_people_wait(tables: list[int]) -> None:
    asked = wanted("qwen3-32b", "rtx 3090", 1, 64, ("shard_ranks",), shard_ranks=8)
    assert smallest_cluster(asked) is None
    assert sum(tables) < 500


@pytest.mark.parametrize("freeze", [(), ("model.embed_tokens.*",)])
def test_the_smallest_cluster_is_found_while_people_wait(
    freeze: tuple[str, ...], tables: list[int]
) -> None:
    asked = wanted("qwen3-235b-a22b", "a100 40gb", 8, memory_gb=3000, freeze=freeze)
    assert (smallest_cluster(asked) or "").startswith("cluster.nodes 2 ")
    assert sum(tables) < 10_000


def test_who_says_how_many_ranks_shard_gets_replicas_only() -> None:
    asked = wanted("qwen3-1.7b", "h200", 8, 600, ("shard_ranks",), shard_ranks=4)
    assert {(train.strategy, train.shard_ranks) for train in ways(asked)} == {("hsdp", 4)}
    given = wanted("qwen3-1.7b", "h200", 8, 600, ("shard_ranks",), shard_ranks=None)
    assert "hsdp" not in {train.strategy for train in ways(given)}


def test_the_least_host_memory_is_that_of_as_many_ranks_to_a_block_as_need_least() -> None:
    def given(memory_gb: int) -> Case:
        return in_blocks_of(32_768, wanted("qwen3-4b", "a10", 8, memory_gb))

    def ranks_to_a_block(asked: Case) -> int:
        return lean(asked)[0].ranks_per_block

    (offered,) = (
        said
        for said in what_would_fit(given(8))
        if said.startswith("this would fit: cluster.memory_gb")
    )
    least_gb = int(re.findall(r"\d+", offered)[0])
    assert fits_somehow(given(least_gb))
    assert ranks_to_a_block(given(least_gb)) > ranks_to_a_block(given(2000))
    assert not fits_somehow(given(least_gb - 1))


def test_where_the_host_memory_is_not_known_it_is_said_how_much_a_way_needs() -> None:
    lacking_host = wanted("qwen3-32b", "a10", 2, None)
    assert not fits_somehow(lacking_host)
    assert any(
        re.search(r"fit: cluster.memory_gb: \d+, if the nodes", said)
        for said in what_would_fit(lacking_host)
    )
    few = wanted(
        *("qwen3-32b", "a10", 2, None),
        strategy="zero3",
        offload="optimizer",
        recompute="full",
        micro_batch_blocks=1,
    )
    sharded = what_would_fit(few)
    assert re.search(
        r"do: cluster.gpus_per_node \d of A10, with [\d.]+ GB of host memory on", sharded[-1]
    )
    given = wanted("qwen3-8b", "a10", 2, None, strategy="ddp", micro_batch_blocks=1)
    remedy = (
        r"train.offload: optimizer\+params.* a GPU\), with [\d.]+ GB of host memory on each node"
    )
    assert any(re.search(remedy, said) for said in what_would_fit(given))
    alone = wanted(
        "qwen3-8b", "h200", 8, None, strategy="ddp", micro_batch_blocks=64, context_ranks=1
    )
    assert not any("host memory" in said for said in what_would_fit(alone))


@pytest.mark.parametrize(
    ("name", "gpu", "strategy"), [("qwen3-1.7b", "a10", "zero2"), ("qwen3-4b", "a10", "ddp")]
)
def test_what_would_fit_keeps_the_margin_of_its_own_error(
    name: str, gpu: str, strategy: str
) -> None:
    """It is wider for what is offloaded, hardly measured; the least margin gave `tight`."""
    asked = wanted(name, gpu, 1, 2000, strategy=strategy)
    assert not fits_somehow(asked)
    found = remedies_of(asked)
    assert found
    for remedy in found:
        assert best_way(remedy.case).fits, remedy.what


@pytest.mark.parametrize(
    ("name", "gpu", "per_node", "train"),
    [
        ("qwen3-8b", "a10", 4, {"strategy": "ddp"}),
        ("qwen3-8b", "h100", 8, {"strategy": "zero1", "micro_batch_blocks": 8}),
        ("qwen3-14b", "a100 40gb", 2, {"strategy": "hsdp", "shard_ranks": 2}),
        ("qwen3-30b-a3b", "4090", 4, {"strategy": "fsdp", "recompute": "none"}),
        ("qwen3-32b", "3090", 2, {"strategy": "auto"}),
    ],
)
def test_each_change_alone_makes_it_fit(
    name: str, gpu: str, per_node: int, train: dict[str, Any]
) -> None:
    """As a reader makes it: by the keys that are written, and nothing else."""
    asked = wanted(name, gpu, per_node, None, **train)
    assert not fits_somehow(asked)
    found = remedies_of(asked)
    assert found
    for remedy in found:
        given = asked.train.model_dump()
        for key, value in remedy.keys.items():
            if key == "lora.base":
                given["lora"]["base"] = value
            elif value is None:
                del given[key]
            else:
                given[key] = value
        machine = asked.machine
        if remedy.memory_gb is not None:
            machine = replace(machine, host_memory_bytes=remedy.memory_gb * 10**9)
        changed = replace(asked, train=Train.model_validate(given), machine=machine)
        assert best_way(changed).fits, remedy.what


def test_a_model_that_is_too_large_is_answered_by_adapters_first_and_then_by_more_gpus() -> None:
    """Their base is in 4 bits where it has to be; what takes more host memory comes after both."""
    said = what_would_fit(wanted("qwen3-14b", "a10", 1, 20))
    assert said[0].startswith("this would fit: train.method: lora, train.lora.base: nf4  (")
    assert said[-1].startswith("the smallest cluster that would do: ")
    few = remedies_of(wanted("qwen3-4b", "a10", 1, 20))
    assert few[0].keys == {"method": "lora"}
    assert [remedy.memory_gb is not None for remedy in few] == sorted(
        remedy.memory_gb is not None for remedy in few
    )


def test_keys_that_allow_no_way_at_all_are_named() -> None:
    fixed = ("offload", "recompute")
    assert (
        leanest(wanted("qwen3-0.6b", "h200", 8, 600, fixed, True, offload="optimizer")) is not None
    )
    assert no_way(wanted("qwen3-0.6b", "h200", 8, 600, fixed, False, offload="optimizer")) == (
        "train.strategy: auto finds no way to train beside train.offload: optimizer, without "
        "DeepSpeed, which is not installed here; leave one out"
    )
    fixed = ("shard_ranks", "offload")
    both = no_way(
        wanted("qwen3-0.6b", "h200", 8, 600, fixed, True, shard_ranks=4, offload="optimizer")
    )
    assert both == (
        "train.strategy: auto finds no way to train beside train.shard_ranks: 4 and "
        "train.offload: optimizer; leave one out"
    )


def test_where_no_cluster_is_enough_it_says_what_is_not_spread() -> None:
    given: dict[str, Any] = {
        "strategy": "ddp",
        "recompute": "full",
        "method": "lora",
        "micro_batch_blocks": 1,
    }
    alone = in_blocks_of(2**20, wanted("qwen3-8b", "a10", 8, **given, context_ranks=1))
    [said] = what_would_fit(alone)
    assert said.startswith(
        "no number of GPUs would do: one block of 1048576 tokens needs more memory than a GPU has"
    )
    assert said.endswith("or raise train.context_ranks, so that more GPUs share a block")
    [said] = what_would_fit(in_blocks_of(2**28, wanted("qwen3-8b", "a10", 8, **given)))
    assert said == (
        "no number of GPUs would do: one block of 268435456 tokens needs more memory than all "
        "GPUs that can share it have; lower shard.block_tokens"
    )


def test_where_a_block_is_too_long_for_a_gpu_ranks_that_share_it_are_offered() -> None:
    given: dict[str, Any] = {"method": "lora", "batch_blocks": 8, "offload_activations": False}
    longest = in_blocks_of(
        40960, wanted("qwen3-8b", "a10", 8, 200, ("context_ranks",), context_ranks=1, **given)
    )
    assert not fits_somehow(longest)
    assert {"context_ranks": None} in [remedy.keys for remedy in remedies_of(longest)]
    shared = replace(longest, train=longest.train.model_copy(update={"context_ranks": 2}))
    assert fits_somehow(shared)
    odd = replace(longest, workload=replace(BLOCKS, block_tokens=40959))
    assert not any("context_ranks" in said for said in what_would_fit(odd))
    assert (
        lean(in_blocks_of(40960, wanted("qwen3-8b", "a10", 8, 200, **given)))[0].context_ranks == 2
    )


def test_one_gpu_is_told_how_many_would_share_a_block_that_it_has_no_room_for() -> None:
    """The batch stays as it is: a single block, which both have a half of."""
    alone = in_blocks_of(262_144, wanted("qwen3-8b", "h100", 1, 64, method="lora", batch_blocks=1))
    assert not fits_somehow(alone)
    said = smallest_cluster(alone) or ""
    assert said.startswith("cluster.gpus_per_node 2 of H100 SXM, 2 ranks to a block")
    assert "global_batch_tokens" not in said
    given = wanted(
        "qwen3-8b",
        "h100",
        1,
        64,
        ("context_ranks",),
        method="lora",
        batch_blocks=1,
        context_ranks=1,
    )
    assert "ranks to a block" not in (smallest_cluster(in_blocks_of(262_144, given)) or "")


NODES_TO_A_BLOCK: dict[str, tuple[str, str, int, int]] = {
    "two of small GPUs": ("qwen3-8b", "a10", 524_288, 2),
    "four of small GPUs": ("qwen3-8b", "a10", 2**20, 4),
    "four of large GPUs": ("qwen3-32b", "h100", 2**21, 4),
}


@pytest.mark.parametrize(
    ("name", "gpu", "tokens", "nodes"), NODES_TO_A_BLOCK.values(), ids=NODES_TO_A_BLOCK
)
def test_the_fewest_nodes_that_share_a_block_are_named(
    name: str, gpu: str, tokens: int, nodes: int, tables: list[int]
) -> None:
    """With more nodes, only some numbers of them share blocks equally; the batch stays."""
    given: dict[str, Any] = {"method": "lora", "batch_blocks": 8, "offload_activations": False}
    asked = in_blocks_of(tokens, wanted(name, gpu, 8, 600, **given))
    fitting = [
        count
        for count in range(1, 9)
        if fits_somehow(on(asked, replace(asked.machine, nodes=count)))
    ]
    assert fitting[0] == nodes
    assert nodes + 1 not in fitting
    tables.clear()
    said = smallest_cluster(asked) or ""
    assert sum(tables) < 5_000
    assert said.startswith(f"cluster.nodes {nodes} with cluster.gpus_per_node 8 of ")
    assert f", {8 * nodes} ranks to a block" in said
    fixed = replace(
        asked,
        train=asked.train.model_copy(update={"context_ranks": 8 * nodes}),
        fixed=("context_ranks",),
    )
    assert (smallest_cluster(fixed) or "").startswith(
        f"cluster.nodes {nodes} with cluster.gpus_per_node 8 of "
    )
    assert "global_batch_tokens" not in f"{said} {smallest_cluster(fixed)}"


def test_a_key_that_is_held_is_named_where_leaving_it_out_is_enough() -> None:
    asked = wanted("qwen3-8b", "a100 40gb", 2, 200, ("micro_batch_blocks",), micro_batch_blocks=32)
    assert not fits_somehow(asked)
    assert what_would_fit(asked)[0].startswith(
        "this would fit: train.micro_batch_blocks left out, so that the plan chooses it  ("
    )


def test_a_way_that_needs_no_more_than_the_copy_of_a_checkpoint_says_so_before_one_that_offloads() -> (
    None
):
    """A copy of 98.3 GB exceeds what a 100 GB host has beside 8 ranks; offloading adds to it."""
    asked = wanted("qwen3-8b", "h200", 8, 100, fixed=("save_async",), save_async=True)
    assert not fits_somehow(asked)
    assert lean(asked)[0].offload == "none"
    assert ({}, 169) in [(remedy.keys, remedy.memory_gb) for remedy in remedies_of(asked)]
    assert fits_somehow(wanted("qwen3-8b", "h200", 8, 169, fixed=("save_async",), save_async=True))
    assert fits_somehow(wanted("qwen3-8b", "h200", 8, 100))  # copied part by part


def test_a_base_in_4_bits_is_offered_where_only_that_fits_on_the_gpu() -> None:
    first, *_ = remedies_of(wanted("qwen3-14b", "a10", 1, 20, method="lora"))
    assert first.keys == {"lora.base": "nf4"}
    first, *_ = remedies_of(wanted("qwen3-14b", "a10", 1, 20))
    assert first.keys == {"method": "lora", "lora.base": "nf4"}
    assert "nf4" not in "\n".join(what_would_fit(wanted("qwen3-4b", "a10", 1, 20)))  # bf16 fits too
    assert "nf4" not in "\n".join(
        what_would_fit(wanted("qwen3-30b-a3b", "a100 80gb", 1, 20, method="lora"))
    )


def test_without_gpus_nothing_is_offloaded() -> None:
    asked = wanted("qwen3-8b", "h200", 8, 600)
    cpus = replace(asked.machine, is_gpu=False, gpu_memory_bytes=None)
    assert {lean(on(asked, cpus))[0].offload} == {"none"}
    assert {train.offload for train in ways(on(asked, cpus))} == {"none"}
    assert {train.offload for train in ways(asked)} > {"none"}


def test_without_deepspeed_the_ways_that_need_none_are_said() -> None:
    """With it, one of its strategies is the fastest."""
    given: dict[str, Any] = {"strategy": "ddp", "precision": "fp16", "micro_batch_blocks": 1}
    found = []
    for has_deepspeed in (True, False):
        one = wanted("qwen3-4b", "a6000", 1, None, deepspeed=has_deepspeed, **given)
        two = replace(one.machine, ranks_per_node=2, gpu_memory_bytes=36 * 2**30)
        changed = [remedy.keys for remedy in remedies_of(on(one, two))]
        found.append([keys for keys in changed if not {"method", "optimizer"} & keys.keys()])
    assert found[0][0]["strategy"].startswith("zero")
    assert found[1][0] == {"strategy": "fsdp", "offload": "optimizer+params"}
    assert not any(keys.get("strategy", "").startswith("zero") for keys in found[1])


def in_blocks_of(tokens: int, asked: Case) -> Case:
    """The same question about blocks of that length."""
    return replace(asked, workload=replace(BLOCKS, block_tokens=tokens))


def test_nobody_is_sent_to_fewer_gpus_or_to_fewer_of_a_node_where_all_of_them_do() -> None:
    """Two nodes with a GPU each would have the host memory to offload all of it."""
    asked = in_blocks_of(8192, wanted("qwen3-32b", "h100", 8, 400, batch_blocks=32))
    assert fits_somehow(on(asked, replace(asked.machine, nodes=2, ranks_per_node=1)))
    said = smallest_cluster(asked) or ""
    assert said.startswith(
        "cluster.nodes 2 with cluster.gpus_per_node 8 of H100 SXM (which needs cluster.internode_"
    )


def test_the_network_is_asked_for_where_nothing_says_it_yet() -> None:
    asked = in_blocks_of(8192, wanted("qwen3-32b", "h100", 8, 400, batch_blocks=32))
    rates = asked.machine.rates
    for source in ("cluster.internode_gbit_s", "measured"):
        known = {**rates, "between_bytes_s": replace(rates["between_bytes_s"], source=source)}
        said = smallest_cluster(on(asked, replace(asked.machine, rates=known))) or ""
        assert said.startswith("cluster.nodes 2 with cluster.gpus_per_node 8 of H100 SXM, or ")
    assert "internode" not in (
        smallest_cluster(wanted("qwen3-1.7b", "a10", 1, 48, batch_blocks=12)) or ""
    )


def test_ranks_on_cpus_are_no_gpus() -> None:
    asked = wanted("qwen3-8b", "h100", 2, 100)
    cpus = replace(asked.machine, name="CPU", is_gpu=False, gpu_memory_bytes=None)
    assert re.match(
        r"cluster.nodes \d+ with cluster.cpu_ranks \d+ \(", smallest_cluster(on(asked, cpus)) or ""
    )


@pytest.mark.parametrize(("memory_gb", "needs_more"), [(None, True), (600, False), (200, True)])
def test_moments_in_8_bits_do_not_hide_that_others_can_be_offloaded(
    memory_gb: int | None, needs_more: bool
) -> None:
    asked = wanted("qwen3-14b", "h200", 1, memory_gb, optimizer="adamw_8bit")
    assert not fits_somehow(asked)
    found = [remedy for remedy in remedies_of(asked) if remedy.keys == {"optimizer": "adamw"}]
    assert [remedy.memory_gb is not None for remedy in found] == [needs_more]
    given = wanted(
        "qwen3-14b",
        "h200",
        1,
        memory_gb,
        strategy="fsdp",
        optimizer="adamw_8bit",
        micro_batch_blocks=1,
    )
    changes = {"optimizer": "adamw", "offload": "optimizer+params"}
    assert changes in [remedy.keys for remedy in remedies_of(given)]


def test_one_gpu_of_which_no_number_is_enough_has_no_smallest_cluster() -> None:
    """No nodes use fewer of their GPUs; a host of 8 GB has no room for a rank's processes."""
    assert smallest_cluster(wanted("qwen3-8b", "a10", 1, 8)) is None


# With 64 GB the host has no room for what is offloaded; two H200 have it without that.
OFFLOADED: dict[str, Any] = {"strategy": "fsdp", "offload": "optimizer+params"}


@pytest.mark.parametrize("away", ["auto", True])
def test_where_the_host_lacks_memory_less_offloading_comes_first(away: Any) -> None:
    asked = wanted(
        "qwen3-8b", "h200", 2, 64, **OFFLOADED, recompute="full", offload_activations=away
    )
    assert not fits_somehow(asked)
    first, *others = remedies_of(asked)
    assert first.keys == {"offload": "none"}
    assert fits_somehow(asked.by(asked.train.model_copy(update={"offload": "none"})))
    assert {} in [remedy.keys for remedy in others if remedy.memory_gb is not None]


def test_where_the_host_lacks_memory_for_activations_they_may_stay() -> None:
    given: dict[str, Any] = {"strategy": "fsdp", "recompute": "full", "micro_batch_blocks": 8}
    asked = wanted("qwen3-8b", "h200", 2, 24, **given, offload_activations=True)
    assert what_would_fit(asked)[0].startswith(
        "this would fit: train.offload_activations: false  ("
    )
    assert fits_somehow(wanted("qwen3-8b", "h200", 2, 24, **given, offload_activations=False))


@pytest.mark.parametrize("strategy", ["fsdp", "auto"])
def test_no_change_is_joined_with_host_memory_that_suffices_by_itself(strategy: str) -> None:
    """Activations on the host were offered with 219 GB, where 217 GB are enough without them."""
    fixed = ("offload",) if strategy == "auto" else ()
    asked = wanted("qwen3-8b", "h200", 2, 64, fixed, **{**OFFLOADED, "strategy": strategy})
    said = what_would_fit(asked)
    [alone] = [
        int(found[1])
        for one in said
        if (found := re.match(r"this would fit: cluster.memory_gb: (\d+),", one))
    ]
    more = replace(asked.machine, host_memory_bytes=alone * 10**9)
    assert fits_somehow(on(asked, more))
    joined = [
        int(gigabytes)
        for gigabytes in re.findall(r" and cluster.memory_gb: (\d+)", "\n".join(said))
    ]
    assert all(gigabytes < alone for gigabytes in joined)
    assert not any("offload_activations: true" in one for one in said)


def test_the_memory_that_is_said_is_that_of_what_the_plan_then_chooses() -> None:
    asked = wanted("qwen3-8b", "h200", 2, 64, **OFFLOADED)
    then = best_way(asked.by(asked.train.model_copy(update={"offload": "none"})))
    said = f"this would fit: train.offload: none  ({gib(then.memory.total_bytes)} a GPU)"
    assert what_would_fit(asked)[0] == said


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_adapters_in_place_of_muon_come_with_an_optimizer_that_trains_them(strategy: str) -> None:
    found = what_would_fit(wanted("qwen3-8b", "h100", 1, 64, strategy=strategy, optimizer="muon"))
    with_adapters = [text for text in found if "train.method: lora" in text]
    assert with_adapters
    assert all("train.optimizer: adamw" in text for text in with_adapters)


def test_muon_takes_less_memory_than_adamw_and_is_not_offered_in_its_place() -> None:
    by_optimizer = {
        name: lean(wanted("qwen3-8b", "h200", 1, 64, optimizer=name, strategy="fsdp"))[1]
        for name in ("adamw", "muon")
    }
    saved_bytes = by_optimizer["adamw"].optimizer_bytes - by_optimizer["muon"].optimizer_bytes
    assert saved_bytes == 4 * 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    offered = what_would_fit(wanted("qwen3-8b", "h100", 1, 64))
    assert not any("muon" in text for text in offered)
