"""`auto` takes a way as fast as the table's fastest fitting one, on any machine and model."""

import math
import re
from dataclasses import replace
from itertools import product

import pytest

from pipeline_lib.arch.families import geometry_in, published
from pipeline_lib.config.schema import Cluster, Tracking
from pipeline_lib.config.train import Train
from pipeline_lib.plan.answer import Question, answer
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.choose import AS_GOOD, Choice, best_way, choose
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.predict import (
    _TIME_ERROR,
    Prediction,
    host_bytes_of_node,
    predict_step,
)
from pipeline_lib.plan.words import why_chosen
from pipeline_lib.records.plan import Workload
from tests.plan.fleet import asking, case_of

MODELS = (
    "Qwen3-0.6B",
    "Qwen3-1.7B",
    "Qwen3-8B",
    "Qwen3-14B",
    "Qwen3-32B",
    "Qwen3-30B-A3B",
    "Qwen3-235B-A22B",
)
CLUSTERS = (
    *((gpu, 1, ranks) for gpu in ("rtx 4090", "rtx 3090", "a10") for ranks in (1, 4, 8)),
    *(
        (gpu, 1, ranks)
        for gpu in ("a100 40gb", "a100 80gb", "h100", "h200", "b200")
        for ranks in (1, 4, 8)
    ),
    *((gpu, 2, 8) for gpu in ("rtx 4090", "a100 80gb", "h100")),
)
METHODS = ("full", "lora")
BLOCKS = Workload(4096, 0.98, 0.5, 1024.0, None, None, is_assumed=True)
CASES = list(product(MODELS, CLUSTERS, METHODS))
# Where what offloads is the fastest by far, and was dropped without cluster.memory_gb; and every
# 31st of all, a number prime to the lengths of all three lists.
OFFLOADED = [
    ("Qwen3-8B", ("rtx 3090", 1, 1), "lora"),
    ("Qwen3-32B", ("a10", 1, 8), "lora"),
    ("Qwen3-30B-A3B", ("a10", 1, 8), "lora"),
]
SAMPLED = [*OFFLOADED, ("Qwen3-30B-A3B", ("rtx 4090", 1, 4), "lora"), *CASES[::31]]


def setting_of(model: str, cluster: tuple[str, int, int]) -> Case:
    gpu, nodes, per_node = cluster
    config = Cluster(
        nodes=nodes, gpus_per_node=per_node, gpu=gpu, internode_gbit_s=100 if nodes > 1 else None
    )
    machine = machine_of(config, "bf16", None)
    assert machine is not None
    return case_of(geometry_in(published(f"Qwen/{model}") or {}), machine, BLOCKS, 64, None)


def chosen(
    model: str, cluster: tuple[str, int, int], method: str, **keys: object
) -> tuple[Choice, Case] | None:
    """None if nothing fits."""
    setting = setting_of(model, cluster)
    train = Train.model_validate(
        {"strategy": "auto", "method": method, "global_batch_tokens": 64 * 4096, **keys}
    )
    found = choose(asking(setting, train))
    return (found, setting) if found.chosen.fits else None


def weighed_s(way: Prediction) -> float:
    """What ways are compared by: the bad end of the rates' bands counts for a quarter."""
    return 0.75 * way.step_s.value + 0.25 * way.step_s.high / (1 + _TIME_ERROR)


def check(model: str, cluster: tuple[str, int, int], method: str) -> bool:
    """Compare the choice with every row of its own table; return whether anything fits."""
    found = chosen(model, cluster, method)
    if found is None:
        return False
    choice, setting = found
    fitting_s = [weighed_s(way) for way in choice.best.values() if way.fits]
    assert choice.chosen.fits
    assert weighed_s(choice.chosen) <= (1 + AS_GOOD) * min(fitting_s)
    said = why_chosen(choice, setting, is_auto=True)
    assert re.search(
        rf"{choice.fitting} of {choice.considered} ways to train fit.* simplest one within 1%", said
    )
    return True


@pytest.mark.parametrize(("model", "cluster", "method"), OFFLOADED)
def test_what_offloads_is_chosen_within_the_memory_that_is_assumed(
    model: str, cluster: tuple[str, int, int], method: str
) -> None:
    found = chosen(model, cluster, method)
    assert found is not None
    assert found[0].chosen.train.offload == "optimizer+params"


@pytest.mark.parametrize(("model", "cluster", "method"), SAMPLED)
def test_no_fitting_way_is_faster_than_the_choice(
    model: str, cluster: tuple[str, int, int], method: str
) -> None:
    check(model, cluster, method)


def test_the_fastest_way_that_lacks_little_is_told_with_what_it_lacks() -> None:
    """On the cards the host's memory is assumed, which may be wrong; on H100 only the margin."""
    found = chosen("Qwen3-30B-A3B", ("rtx 4090", 1, 8), "lora")
    assert found is not None and found[0].near is not None
    (choice, setting), near = found, found[0].near
    assert near.way.step_s.value * 1.02 < choice.chosen.step_s.value
    assert (near.gpu_bytes, near.is_margin) == (0, False)
    assert near.host_bytes == host_bytes_of_node(near.way.memory, setting.machine) - 256 * 10**9
    enough = replace(setting.machine, host_memory_bytes=near.host_bytes + 256 * 10**9)
    assert best_way(replace(setting, machine=enough).by(near.way.train)).fits

    kept = {"strategy": "fsdp", "offload": "none", "offload_activations": False}
    found = chosen("Qwen3-32B", ("h100", 1, 8), "lora", **kept)
    assert found is not None and found[0].near is not None
    (choice, setting), near = found, found[0].near
    assert choice.chosen.fits and not near.way.fits
    limit = setting.machine.gpu_memory_bytes or 0
    assert near.is_margin and near.way.memory.total_bytes <= limit
    assert near.gpu_bytes == near.way.memory.total_bytes - math.floor(limit * 0.94)
    said = near.in_words(setting.machine, choice.chosen, "")
    assert re.search(
        r"only the margin lacks: a GPU needs [\d.]+ GiB of 79.1 GiB, and 6% are kept free", said
    )
    assert predict_step(setting.by(near.way.train)).step_s.value * 1.02 < choice.chosen.step_s.value

    found = chosen("Qwen3-0.6B", ("h100", 1, 8), "full")
    assert found is not None and found[0].near is None


@pytest.mark.parametrize(
    ("model", "nodes", "block_tokens", "blocks"),
    [("Qwen3-0.6B", 15, 512, 28_800), ("Qwen3-235B-A22B", 64, 4096, 4096)],
)
def test_a_plan_of_many_nodes_asks_for_few_tables(
    model: str, nodes: int, block_tokens: int, blocks: int, tables: list[int]
) -> None:
    """Hundreds of thousands of ways, and the questions of the advice, which ask for them again."""
    cluster = Cluster(nodes=nodes, gpus_per_node=8, gpu="h200", internode_gbit_s=400)
    question = Question(
        experiment="large",
        geometry=geometry_in(published(f"Qwen/{model}") or {}),
        train=Train(strategy="auto", global_batch_tokens=blocks * block_tokens),
        cluster=cluster,
        tracking=Tracking(),
        workload=replace(BLOCKS, block_tokens=block_tokens, document_tokens=block_tokens / 4),
        blocks=None,
        fixed=(),
        measured=None,
        has_deepspeed=True,
    )
    found = answer(question)
    assert found.refusal is None
    assert sum(tables) < 1_200_000


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_no_fitting_way_is_faster_than_the_choice_of_any(model: str) -> None:
    """A fifth of the cases of each model, others than of the model before it."""
    cases = [case for case in CASES if case[0] == model][MODELS.index(model) % 5 :: 5]
    assert any([check(*case) for case in cases])
