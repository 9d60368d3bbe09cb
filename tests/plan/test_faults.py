"""Configs for which an earlier search of the planner missed the fastest way, or took a risky one.

A test's own plain loop over all legal ways finds nothing better than the choice.
"""

import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from pipeline_lib.plan.case import Case
from pipeline_lib.plan.choose import best_way, choose
from pipeline_lib.plan.predict import Prediction
from tests.plan.every_way import AS_GOOD, case_of, cost_of, is_best, some_case


def named(case: Case, **train: Any) -> Prediction:
    """What that way takes, of which the config names a part."""
    return best_way(case.by(case.train.model_copy(update=train)))


def test_long_blocks_get_the_micro_batch_that_is_the_fastest() -> None:
    """It took 73 s where 36.5 s fitted."""
    cluster = {"gpus_per_node": 4, "gpu": "5090"}
    case = case_of("Qwen3-30B-A3B", cluster, 16_384, 16, method="lora")
    given = named(case, strategy="fsdp", micro_batch_blocks=2)
    found = choose(case).chosen
    assert given.fits and found.fits
    assert found.step_s.value <= given.step_s.value


def test_long_blocks_of_all_weights_too() -> None:
    """It took 196 s on four A10 where 116 s fitted."""
    case = case_of("Qwen3-30B-A3B", {"gpus_per_node": 4, "gpu": "a10"}, 16_384, 16)
    assert choose(case).chosen.step_s.value < 120


def test_fewer_kept_attention_results_come_before_the_host_if_they_are_faster() -> None:
    case = case_of("Qwen3-32B", {"gpus_per_node": 4, "gpu": "b200"}, 32_768, 4)
    found = choose(case).chosen
    on_host = named(case, strategy="fsdp", recompute="full", offload_activations=True)
    assert found.step_s.value <= on_host.step_s.value
    assert isinstance(found.train.kept_attention_layers, int)


def test_what_fits_compiled_alone_hides_nothing_that_is_faster() -> None:
    cluster = {"nodes": 2, "gpus_per_node": 2, "gpu": "a10", "internode_gbit_s": 9}
    case = case_of("Qwen3-0.6B", cluster, 512, 64, steps=20, optimizer="adamw_8bit", max_steps=20)
    found = choose(case).chosen
    eager = named(case, compile=False)
    assert found.train.compile is False
    assert found.step_s.value <= eager.step_s.value * 1.01


def test_one_gpu_more_is_not_slower() -> None:
    """840 blocks on seven GPUs have a divisor that suits them, and on eight they had none."""
    found = {
        gpus: choose(
            case_of(
                "Qwen3-30B-A3B", {"gpus_per_node": gpus, "gpu": "4090"}, 2048, 840, method="lora"
            )
        ).chosen
        for gpus in (7, 8)
    }
    assert found[8].step_s.value < found[7].step_s.value
    way = found[8]
    assert way.accumulation * 8 * way.train.micro_batch_blocks >= 840


def test_a_way_that_may_be_very_slow_has_to_be_faster_by_much() -> None:
    """57.7 s (36.8 to 162) was taken before 71 s (49 to 102)."""
    cluster = {"gpus_per_node": 2, "gpu": "3090"}
    found = choose(case_of("Qwen3-8B", cluster, 2048, 64, method="lora")).chosen
    assert found.step_s.high < 1.6 * found.step_s.value


def test_of_ways_as_fast_the_largest_micro_batch_is_taken() -> None:
    """1 x 64 was taken with 64 % of the GPU free."""
    case = case_of("Qwen3-8B", {"gpus_per_node": 1, "gpu": "h100"}, 4096, 64, method="lora")
    found = choose(case).chosen
    assert found.train.micro_batch_blocks > 1
    one = named(case, micro_batch_blocks=1)
    assert found.step_s.value <= one.step_s.value


def test_the_plan_before_packing_and_the_one_after_choose_alike() -> None:
    """Micro-batch 2 before and 1 after, where nothing but the number of steps became known."""
    before = case_of("Qwen3-4B", {"gpus_per_node": 4, "gpu": "h200"}, 4096, 64)
    packed = replace(before.workload, is_assumed=False, real_fraction=0.99, document_tokens=900.0)
    for steps in (100, 1000):
        after = replace(before, workload=packed, steps=steps)
        assert choose(after).chosen.train == choose(before).chosen.train


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_no_legal_way_is_better(first: int) -> None:
    """Of twenty random configs each, of which some have to fit."""
    assert sum(is_best(some_case(random.Random(seed))) for seed in range(first, first + 20)) > 5


@pytest.mark.parametrize("seed", range(1000, 1020))
def test_more_gpus_memory_or_bandwidth_never_cost_anything(seed: int) -> None:
    """But for what counts as good as the least, of which the simplest is taken."""
    case = some_case(random.Random(seed))
    machine = case.machine
    gpu_bytes = machine.gpu_memory_bytes or 0
    between = machine.rates["between_bytes_s"].value
    roomier = [replace(machine, gpu_memory_bytes=round(gpu_bytes * size)) for size in (1, 1.5, 3)]
    faster = [machine.with_rate("between_bytes_s", between * factor) for factor in (1, 4, 16)]
    for machines in (roomier, faster):
        found = [choose(replace(case, machine=other)).chosen for other in machines]
        assert [way.fits for way in found] == sorted(way.fits for way in found)
        fitting = [
            cost_of(replace(case, machine=other), way.train)
            for other, way in zip(machines, found, strict=True)
            if way.fits
        ]
        for before, after in pairwise(fitting):
            assert after <= AS_GOOD * before


@pytest.mark.parametrize("gpu", ["a10", "4090", "a100 80gb", "h100"])
@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-8B"])
def test_twice_as_many_gpus_of_a_node_are_not_slower(gpu: str, method: str, model: str) -> None:
    """With blocks for all of them."""
    steps_s = []
    for gpus in (1, 2, 4, 8):
        case = case_of(model, {"gpus_per_node": gpus, "gpu": gpu}, 4096, 64, method=method)
        way = choose(case).chosen
        if way.fits:
            steps_s.append(cost_of(case, way.train))
    assert steps_s
    for before, after in pairwise(steps_s):
        assert after <= AS_GOOD * before
