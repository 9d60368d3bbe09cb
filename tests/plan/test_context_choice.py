"""`train.context_ranks: auto` is the fewest ranks to a block that fit and are as fast as any."""

import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.arch.families import geometry_in, published
from pipeline_lib.config.schema import Cluster, Tracking
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import DataError
from pipeline_lib.core.units import from_gigabytes, gib
from pipeline_lib.plan.answer import Answer, Question, answer
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.choose import AS_GOOD, choose
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.context import sharing_counts
from pipeline_lib.plan.legal import rank_counts
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.predict import Prediction, host_bytes_of_node
from pipeline_lib.plan.show import render
from pipeline_lib.records.plan import Workload
from tests.plan.fleet import asking, case_of

LONG = 131_072
PAGES = [
    Path(__file__).parents[2] / "docs" / f"long-context{language}.md" for language in ("", ".zh-CN")
]
H100S: dict[str, Any] = {"gpus_per_node": 8, "gpu": "h100"}
# of its activations on the host, 8B has 792 GB
LITTLE_HOST: dict[str, Any] = {**H100S, "memory_gb": 256}
TWO_NODES: dict[str, Any] = {**H100S, "nodes": 2, "internode_gbit_s": 400}


def asked(
    model: str,
    cluster: dict[str, Any],
    block_tokens: int,
    blocks: int,
    fixed: Collection[str] = (),
    **train: object,
) -> Question:
    keys = {"strategy": "auto", "global_batch_tokens": blocks * block_tokens, **train}
    return Question(
        experiment="shared",
        geometry=geometry_in(published(f"Qwen/{model}") or {}),
        train=Train.model_validate(keys),
        cluster=Cluster.model_validate(cluster),
        tracking=Tracking(),
        workload=Workload(block_tokens, 0.98, 0.5, block_tokens / 4, None, None, is_assumed=True),
        blocks=None,
        fixed=fixed,
        measured=None,
        has_deepspeed=True,
    )


def chosen(found: Answer) -> int:
    """The number in plan.json, of which the launch reads it."""
    return found.content.chosen.context_ranks


def test_where_no_block_fits_on_a_gpu_ranks_share_it_and_the_plan_says_so() -> None:
    found = answer(asked("Qwen3-8B", LITTLE_HOST, LONG, 8))
    assert found.refusal is None
    assert found.choice is not None and found.choice.chosen.fits
    count = chosen(found)
    assert count > 1
    assert found.content.chosen.context_ranks == count
    assert found.content.train["context_ranks"] == count
    assert found.content.prediction is not None
    assert found.content.prediction.changes.context_ranks == count
    [way] = [line for line in render(found.content, False).splitlines() if line.startswith("WAY")]
    assert f"{count} ranks to a block" in way


@pytest.mark.parametrize("method", ["full", "lora"])
def test_where_blocks_fit_each_rank_has_its_own(method: str) -> None:
    found = answer(asked("Qwen3-8B", H100S, 4096, 64, method=method))
    assert chosen(found) == 1
    assert found.content.chosen.context_ranks == 1
    assert "ranks to a block" not in found.content.summary.way


CASES: dict[str, tuple[Any, ...]] = {
    "a long block, much host memory": ("Qwen3-8B", H100S, LONG, 8, "full"),
    "a long block, little host memory": ("Qwen3-8B", LITTLE_HOST, LONG, 8, "full"),
    "two nodes": ("Qwen3-8B", TWO_NODES, LONG, 16, "full"),
    "a slow network": ("Qwen3-8B", {**TWO_NODES, "internode_gbit_s": 25}, 65_536, 64, "lora"),
    "adapters": ("Qwen3-32B", H100S, 65_536, 8, "lora"),
    "experts": ("Qwen3-30B-A3B", H100S, 32_768, 16, "full"),
    "short blocks": ("Qwen3-8B", H100S, 4096, 64, "full"),
    "small GPUs": (
        "Qwen3-8B",
        {"gpus_per_node": 8, "gpu": "a10", "memory_gb": 256},
        32_768,
        16,
        "lora",
    ),
    "fewer blocks than GPUs": ("Qwen3-8B", H100S, 32_768, 2, "lora"),
    "a delta rule": ("Qwen3.5-9B", H100S, LONG, 8, "lora"),
}


def way_with(count: int, question: Question) -> Prediction | None:
    """What the plan chooses if the config says `count`; None if nothing fits."""
    setting = setting_of(question)
    train = question.train.model_copy(update={"context_ranks": count})
    try:
        return choose(asking(setting, train, ("context_ranks",), True)).chosen
    except DataError:
        return None


def setting_of(question: Question) -> Case:
    machine = machine_of(question.cluster, "bf16", None)
    assert machine is not None
    blocks = question.train.global_batch_tokens // question.workload.block_tokens
    return case_of(question.geometry, machine, question.workload, blocks, None)


@pytest.mark.parametrize(
    ("model", "cluster", "block_tokens", "blocks", "method"), CASES.values(), ids=CASES
)
def test_no_number_that_may_be_given_is_faster(
    model: str, cluster: dict[str, Any], block_tokens: int, blocks: int, method: str
) -> None:
    question = asked(model, cluster, block_tokens, blocks, method=method)
    found = choose(asking(setting_of(question), question.train, (), True)).chosen
    counts = rank_counts(asking(setting_of(question), question.train))
    within_a_node = [count for count in counts if count <= 8]
    given = {
        count: way for count in within_a_node if (way := way_with(count, question)) is not None
    }
    limit_s = min(way.step_s.value for way in given.values()) * (1 + AS_GOOD)
    assert found.step_s.value <= limit_s
    assert found.train.context_ranks == min(
        count for count, way in given.items() if way.step_s.value <= limit_s
    )


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_what_the_config_says_is_kept(strategy: str, count: int) -> None:
    question = asked(
        "Qwen3-8B", H100S, 4096, 64, ("context_ranks",), strategy=strategy, context_ranks=count
    )
    assert chosen(answer(question)) == count


def test_a_named_strategy_gets_the_ranks_that_it_needs() -> None:
    given: dict[str, Any] = {"strategy": "fsdp", "recompute": "full", "offload_activations": False}
    found = answer(asked("Qwen3-8B", H100S, LONG, 8, **given))
    assert found.choice is not None and found.choice.chosen.fits
    assert chosen(found) > 1
    alone = answer(asked("Qwen3-8B", H100S, LONG, 8, context_ranks=1, **given))
    assert alone.choice is not None and not alone.choice.chosen.fits


@pytest.mark.parametrize(
    ("memory_gb", "count", "is_copied", "kept"),
    [
        (792, 1, True, "auto"),
        (688, 1, False, "auto"),
        (687, 1, False, 35),
        (565, 1, False, 22),
        (564, 2, True, "auto"),
    ],
)
def test_the_long_context_pages_say_with_how_much_host_memory_ranks_share_blocks(
    memory_gb: int, count: int, is_copied: bool, kept: int | str
) -> None:
    train = answer(asked("Qwen3-8B", {**H100S, "memory_gb": memory_gb}, LONG, 8)).content.chosen
    assert (train.context_ranks, train.save_async) == (count, is_copied)
    assert train.kept_attention_layers == kept
    for page in PAGES:
        assert {"792", "688", "565"} <= set(re.findall(r"\d+", page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("count", [1, 2, 8])
def test_the_table_of_the_long_context_pages_is_what_the_plan_says(count: int) -> None:
    question = asked("Qwen3-8B", H100S, LONG, 8)
    way = way_with(count, question)
    assert way is not None
    host_bytes = host_bytes_of_node(way.memory, setting_of(question).machine)
    row = (
        f"| {gib(way.memory.total_bytes)} | {host_bytes / from_gigabytes(1):.0f} GB | "
        f"{way.step_s.value:.1f} s |"
    )
    assert all(row in page.read_text(encoding="utf-8") for page in PAGES)


@pytest.mark.parametrize(("blocks", "count"), [(8, 1), (6, 4), (4, 2), (3, 8), (1, 8)])
def test_fewer_blocks_than_ranks_are_shared_by_as_few_as_leave_none_idle(
    blocks: int, count: int
) -> None:
    assert chosen(answer(asked("Qwen3-0.6B", H100S, 4096, blocks, method="lora"))) == count
    unnamed = asked("Qwen3-0.6B", {"gpus_per_node": 8}, 4096, blocks, method="lora", strategy="ddp")
    found = answer(unnamed)
    assert chosen(found) == count
    assert found.content.batch.accumulation == blocks * count // 8


@pytest.mark.parametrize(("blocks", "count"), [(16, 1), (12, 4), (8, 2), (4, 4), (2, 8)])
@pytest.mark.parametrize("cluster", [H100S, {"gpus_per_node": 8}])
@pytest.mark.parametrize("is_in_samples", [False, True])
def test_fewer_blocks_than_ranks_take_at_a_time_are_shared_too(
    blocks: int, count: int, cluster: dict[str, Any], is_in_samples: bool
) -> None:
    given: dict[str, Any] = {"strategy": "ddp", "method": "lora", "micro_batch_blocks": 2}
    question = asked("Qwen3-0.6B", cluster, 4096, blocks, **given)
    if is_in_samples:
        samples = question.train.model_copy(update={"global_batch_samples": 4 * blocks})
        question = replace(
            question, train=samples, workload=replace(question.workload, samples_per_block=4.0)
        )
    assert chosen(answer(question)) == count


def test_samples_of_fewer_blocks_than_ranks_are_shared_too() -> None:
    question = asked(
        "Qwen3-0.6B",
        H100S,
        4096,
        8,
        method="lora",
        global_batch_samples=12,
        global_batch_tokens=65_536,
    )
    assert (
        chosen(
            answer(replace(question, workload=replace(question.workload, samples_per_block=4.0)))
        )
        == 8
    )


def test_a_batch_that_the_heads_keep_ranks_from_sharing_is_refused() -> None:
    """28 heads and 4 KV heads: 8 ranks cannot share a block, and 4 leave one of two groups idle."""
    with pytest.raises(
        DataError, match="it has 1 block of 4096 tokens, fewer than the 8 ranks, .*; try 32768"
    ):
        answer(asked("Qwen2.5-7B", H100S, 4096, 1, method="lora"))
    with pytest.raises(
        DataError,
        match="it has 2 blocks of 4096 tokens, fewer than 8 ranks x 2 blocks, .*; try 65536",
    ):
        answer(
            asked("Qwen2.5-7B", H100S, 4096, 2, strategy="ddp", method="lora", micro_batch_blocks=2)
        )
    assert chosen(answer(asked("Qwen2.5-7B", H100S, 4096, 2, method="lora"))) == 4


@pytest.mark.parametrize(
    ("train", "ranks", "block_tokens", "counts"),
    [
        ({}, Ranks(8, 8), 4096, [1, 2, 4, 8]),
        ({}, Ranks(16, 8), 4096, [1, 2, 4, 8, 16]),
        ({}, Ranks(24, 6), 4096, [1, 2]),  # 4 would lie across nodes of 6
        ({}, Ranks(8, 8), 4094, [1, 2]),
        ({"precision": "fp8"}, Ranks(8, 8), 32, [1, 2]),  # parts of whole tiles of 16
        ({"context_ranks": 4}, Ranks(8, 8), 4096, [4]),
        ({"strategy": "zero2"}, Ranks(8, 8), 4096, [1]),
        ({"local_sgd_steps": 2}, Ranks(8, 8), 4096, [1]),
        ({}, Ranks(1, 1), 4096, [1]),
    ],
)
def test_only_numbers_that_would_be_allowed_are_considered(
    train: dict[str, Any], ranks: Ranks, block_tokens: int, counts: list[int]
) -> None:
    geometry = geometry_in(published("Qwen/Qwen3-8B") or {})
    settings = Train.model_validate({"strategy": "ddp", **train})
    assert sharing_counts(geometry, settings, (), ranks, block_tokens, ranks.total) == counts


def test_blocks_are_shared_across_nodes_only_where_nothing_fits_within() -> None:
    cards = {"nodes": 8, "gpus_per_node": 2, "gpu": "a10", "memory_gb": 64, "internode_gbit_s": 100}
    for block_tokens, crosses in ((16_384, False), (131_072, True)):
        found = answer(
            asked("Qwen3-8B", cards, block_tokens, 16, method="lora", offload_activations=False)
        )
        assert found.refusal is None
        assert (chosen(found) > 2) == crosses
