"""What micro-benchmarks measure: documents that fill a block, and the step of the fastest parts."""

import math
import time

import torch
from pytest import approx, mark

from benchmarks.kernels.clock import Clock, sets_for
from benchmarks.kernels.documents import Documents
from benchmarks.kernels.products import Linear, Products, measure_products
from benchmarks.kernels.report import Report
from benchmarks.kernels.summary import ONLY_FULL, POINTWISE, step_of
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.core.units import MIB
from pipeline_lib.plan.gpus import find_gpu

GEOMETRY = Geometry(64, 16, 48, 2, 2, 1, 16, tied=False, max_positions=1024)


def a_report(tokens: int = 32) -> Report:
    gpu = find_gpu("h200")
    assert gpu is not None
    clock = Clock(torch.device("cpu"), 0.0, time.monotonic() + 60)
    return Report(clock, gpu, GEOMETRY, tokens, speaks=False)


@mark.parametrize("name", ["alpaca", "huanhuan", "8192", "100"])
def test_documents_fill_a_block(name: str) -> None:
    documents = Documents.drawn(name, 1000, seed=3)
    batch = documents.batch(supervised=0.5)
    assert sum(documents.lengths) == batch.real_tokens == 1000
    assert batch.squared_lengths == documents.squared
    assert 0.4 < batch.supervised_tokens / 1000 < 0.6


def test_small_inputs_are_taken_in_turn_and_large_ones_are_not() -> None:
    assert [sets_for(moved) for moved in (0, 60 * MIB, 200 * MIB)] == [4, 3, 1]


def test_every_product_of_a_layer_is_measured_in_its_ways() -> None:
    report = a_report()
    measure_products(report)
    assert set(report.ways["products full"]) == {"apart", "fused"}
    adapted = {f"{how}, {way}" for how in ("apart", "fused") for way in ("added", "wider")}
    assert set(report.ways["products lora"]) == adapted | {"peft", "ours"}
    names = [line.name for line in report.lines]
    assert len(set(names)) >= 40
    assert {"forward 32 x 16 -> 32", "wgrad 32 x 48 -> 16", "dgrad 32 x 16 -> 64"} <= set(names)


def test_a_linear_with_adapters_counts_all_its_products() -> None:
    products = Products(a_report())
    found = products.adapted(Linear("qkv", 16, 64, members=3))
    narrow = sum(
        line.seconds
        for line in products.report.lines
        if "48" in line.name and "added" not in line.name
    )
    assert found["added"] > narrow > 0


def test_the_best_step_is_the_sum_of_the_fastest_ways() -> None:
    report = a_report(tokens=1024)
    assert math.isinf(step_of(report, "lora", "1024", 0.5).total_s)
    for number, part in enumerate(("products lora", "attention 1024", "head lora 50%", *POINTWISE)):
        report.way(part, "slow", 9.0)
        report.way(part, "fast", 1.0 + number)
    report.heat = 2.0
    step = step_of(report, "lora", "1024", 0.5)
    assert (step.products_s, step.attention_s, step.head_s) == (2.0, 2.0, 3.0)
    assert step.pointwise_s == sum(range(4, 8))
    assert step.total_s == approx(29.0)
    assert step.tokens_s == approx(1024 / 29)
    assert math.isinf(step_of(report, "full", "1024", 0.5).total_s), ONLY_FULL


def test_what_fails_is_said_and_leaves_no_way() -> None:
    report = a_report()

    def fails() -> object:
        raise RuntimeError("no such kernel")

    seconds = report.measure("group", "name", lambda: fails)
    report.way("part", "name", seconds)
    assert math.isinf(seconds)
    assert report.ways == {} and report.lines == []
