"""What a run takes from its command to its report, beside the roads that were measured."""

from dataclasses import replace

import pytest

from pipeline_lib.config.schema import Cluster, Evaluate
from pipeline_lib.config.train import Train
from pipeline_lib.plan.benchmarks import Asking
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.road import road_of, total
from pipeline_lib.plan.stages import Run
from pipeline_lib.records.plan import Figure
from tests.plan.fleet import QWEN3_8B, workload

STEPS_S = Figure(97.0, 97.0, 97.0)  # as measured: the road is what is judged


def lora_8b() -> Run:
    """The run that benchmarks.road measured on one H200."""
    cluster = Cluster(gpus_per_node=1, gpu="h200", cpus_per_rank=16)
    train = Train.model_validate({"method": "lora", "precision": "bf16", "compile": True})
    data = replace(workload(4096), validation_blocks=22)
    machine = machine_of(cluster, "bf16", None)
    return Run(cluster, train, Evaluate(generations=6, max_new_tokens=96), QWEN3_8B, data, machine)


@pytest.mark.parametrize(
    ("stage", "cold_s", "warm_s"),
    [
        ("train", 28.2 + 97.0 - 3.7 + 2.3, 15.0 + 97.0 - 3.7 + 2.3),  # to the first step's end
        ("merge", 24.9, 21.6),
        ("evaluate", 35.4, 35.4),  # warm, the base's was there already
    ],
)
def test_a_measured_road_lies_in_the_band(stage: str, cold_s: float, warm_s: float) -> None:
    """benchmarks/RESULTS.md, 2026-11-30, second: 8B with LoRA, seconds of one run each."""
    [found] = [part.seconds for part in road_of(lora_8b(), STEPS_S) if part.stage == stage]
    assert found.low <= warm_s <= cold_s <= found.high
    assert found.value == pytest.approx(cold_s, rel=0.15)


def test_the_whole_is_the_sum_of_its_parts() -> None:
    parts = road_of(lora_8b(), STEPS_S)
    assert [part.stage for part in parts] == ["start", "train", "merge", "evaluate"]
    assert total(parts).value == pytest.approx(sum(part.seconds.value for part in parts))
    longer = road_of(lora_8b(), STEPS_S.scaled(2.0))
    assert total(longer).value - total(parts).value == pytest.approx(STEPS_S.value)


def test_benchmarks_and_exports_are_parts_of_the_road() -> None:
    asking = Asking(questions=100, read_tokens=10_000, new_tokens=64)
    run = replace(lora_8b(), askings=(asking,), exports=("gguf-f16", "fp8"))
    found = {part.stage: part.seconds.value for part in road_of(run, STEPS_S)}
    assert list(found) == ["start", "train", "merge", "evaluate", "benchmark", "export"]
    assert found["export"] == pytest.approx(2 * found["merge"])
    longer = replace(run, askings=(replace(asking, new_tokens=640),))
    assert {part.stage: part.seconds.value for part in road_of(longer, STEPS_S)}[
        "benchmark"
    ] > found["benchmark"]


def test_what_is_not_known_has_no_road() -> None:
    assert road_of(replace(lora_8b(), geometry=None), STEPS_S) == ()
    assert road_of(replace(lora_8b(), machine=None), STEPS_S) == ()
    assert road_of(lora_8b(), None) == ()


def test_a_proof_on_cpus_takes_the_pass_of_its_probe() -> None:
    run = lora_8b()
    cpu = replace(run, cluster=Cluster(cpu_ranks=1, cpus_per_rank=2))
    of_cpu = {part.stage: part.seconds for part in road_of(cpu, STEPS_S)}
    of_gpu = {part.stage: part.seconds for part in road_of(run, STEPS_S)}
    assert of_cpu["merge"].value > 2 * of_gpu["merge"].value
