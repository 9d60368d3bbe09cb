"""Predicted against measured: of the right steps, of this plan, and nothing unmeasured."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.train import Train
from pipeline_lib.core.run_record import RunRecord
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.machine import Machine, Speeds
from pipeline_lib.plan.predict import predict_step
from pipeline_lib.records.plan import Figure, PlanDocument, PlannedWay, Rate, Workload
from pipeline_lib.records.record import to_json
from pipeline_lib.records.training import Step, Training
from pipeline_lib.report.plan_check import (
    FIGURES,
    SETTLING_STEPS,
    Compared,
    attempts_elsewhere,
    beyond,
    comparison,
    settled,
    steps_here,
    tally,
    unjudged,
    verdict,
)
from tests.complete import record, step
from tests.report.fake_plans import GIB, gpu_plan, gpu_run, plan_without_times
from tests.report.fakes import STEPS, realistic_files

Files = dict[str, Any]


def gpu_files() -> Files:
    files = realistic_files()
    gpu_run(files)
    return files["train"]


def cpu_files() -> Files:
    return realistic_files()["train"]


def compared(train: Files) -> dict[str, Compared]:
    found = comparison(
        record(PlanDocument, train["plan.json"]),
        record(Training, train["summary.json"]),
        [record(Step, row) for row in train["metrics.jsonl"]],
        RunRecord(train["events.jsonl"]),
    )
    assert [one.key for one in found] == [
        key for key in FIGURES if key in {one.key for one in found}
    ]
    return {one.key: one for one in found}


def test_every_figure_of_a_run_on_gpus_is_compared() -> None:
    assert compared(gpu_files()).keys() == FIGURES.keys()


def test_every_field_of_a_real_prediction_is_known_here_by_its_name() -> None:
    rates = {name: Rate(1e12, 5e11, 2e12, "made up") for name in Speeds.__dataclass_fields__}
    rates |= {
        name: Rate(1e-5, 5e-6, 2e-5, "made up")
        for name in rates
        if name.endswith(("launch_s", "latency_s"))
    }
    machine = Machine("made up", True, 2, 4, 80 * GIB, 1e15, 512 * GIB, rates)
    geometry = Geometry(151936, 1024, 3072, 28, 16, 8, 128, True, 40960)
    settled: dict[str, Any] = {
        "recompute": "none",
        "reshard": False,
        "compile": True,
        "save_async": True,
    }
    settled["context_ranks"] = 1
    train = Train(strategy="fsdp", micro_batch_blocks=1, global_batch_tokens=16 * 4096, **settled)
    workload = Workload(4096, 0.98, 0.5, 1024.0, 100, 100)
    made = predict_step(Case(geometry, train, machine, workload, 16, 30))
    written = to_json(made.planned())
    assert record(PlannedWay, json.loads(json.dumps(written))) == made.planned()
    figures = {key for key, value in vars(made).items() if isinstance(value, Figure)}
    assert figures == FIGURES.keys() - {"checkpoint_bytes"}
    assert len(made.exchanges) >= 2
    for part in (machine.planned(1, 2), workload):
        assert record(type(part), json.loads(json.dumps(to_json(part)))) == part


def test_times_are_medians_without_the_first_steps_of_every_attempt() -> None:
    train = cpu_files()
    found = compared(train)
    assert found["step_s"].measured == pytest.approx(0.41)
    assert found["forward_s"].measured == pytest.approx(0.31 * 0.41)
    assert found["tokens_per_s_per_rank"].measured == pytest.approx(19_400 / 2, rel=0.02)
    first = train["metrics.jsonl"][:SETTLING_STEPS]
    assert all(row["step_s"] > 0.5 for row in first)
    train["metrics.jsonl"] = first
    assert not {"step_s", "forward_s", "tokens_per_s_per_rank"} & compared(train).keys()


def test_steps_that_are_no_measure_are_left_out() -> None:
    steps = [step(number) for number in range(1, 8)]
    steps[4] = step(5, verdict="skip")
    steps[5] = step(6, profile_compute_s=0.3)
    assert [step.step for step in settled(steps)] == [4, 7]
    again = [step(number, attempt=2) for number in range(8, 13)]
    assert [step.step for step in settled([*steps, *again])] == [4, 7, 11, 12]


def test_memory_is_the_largest_and_not_compared_on_cpus() -> None:
    train = gpu_files()
    train["metrics.jsonl"][1]["peak_memory_bytes"] = 81 * GIB
    assert compared(train)["peak_memory_bytes"].measured == 81 * GIB
    assert compared(train)["needed_memory_bytes"].measured == 82 * GIB
    assert all("memory" not in key for key in compared(cpu_files()))


def test_the_time_of_the_run_is_the_sum_over_its_attempts() -> None:
    train = cpu_files()
    assert compared(train)["run_s"].measured == pytest.approx(
        (2 + 0.41 * 50) + (2 + 0.41 * (STEPS - 50))
    )
    train["summary.json"]["steps"] = STEPS - 1  # stopped early
    assert "run_s" not in compared(train)


def test_gpu_hours_count_all_ranks() -> None:
    found = compared(gpu_files())
    assert found["gpu_hours"].measured == pytest.approx(8 * found["run_s"].measured / 3600)


@pytest.mark.parametrize(
    "other",
    [
        *(
            {"world_size": 4},
            {"strategy": "fsdp"},
            {"micro_batch_blocks": 4},
            {"recompute": "full"},
        ),
        {"offload": "optimizer+params"},
    ],
)
def test_what_ran_otherwise_than_planned_is_not_held_against_the_plan(
    other: dict[str, Any],
) -> None:
    train = cpu_files()
    next(event for event in train["events.jsonl"] if event["event"] == "run.start").update(other)
    for row in train["metrics.jsonl"][:50]:
        row["step_s"] = 7.0
    steps = [record(Step, row) for row in train["metrics.jsonl"]]
    read = record(PlanDocument, train["plan.json"])
    assert {step.attempt for step in steps_here(read, steps, RunRecord(train["events.jsonl"]))} == {
        2
    }
    assert compared(train)["step_s"].measured < 0.5
    assert "run_s" not in compared(train)


def test_what_ran_as_planned_is_held_against_the_plan_whether_it_says_all_of_it_or_not() -> None:
    """Events of an earlier version name the ranks and the strategy only."""
    train = cpu_files()
    read = record(PlanDocument, train["plan.json"])
    assert attempts_elsewhere(read, RunRecord(train["events.jsonl"])) == set()
    placed = {"micro_batch_blocks": 2, "recompute": "none", "offload": "none", "shard_ranks": None}
    for event in train["events.jsonl"]:
        if event["event"] == "run.start":
            event.update(placed)
    assert attempts_elsewhere(read, RunRecord(train["events.jsonl"])) == set()


def test_a_checkpoint_has_room_for_its_records() -> None:
    train = cpu_files()
    saved = [event for event in train["events.jsonl"] if event["event"] == "checkpoint.saved"]
    size = train["plan.json"]["prediction"]["checkpoint_bytes"]
    for factor, within in ((1.005, True), (1.5, False), (0.9, False)):
        for event in saved:
            event["bytes"] = round(factor * size)
        assert compared(train)["checkpoint_bytes"].within is within


def test_counters_that_did_not_see_the_exchange_say_nothing() -> None:
    train = gpu_files()
    for row in train["metrics.jsonl"]:
        row["node_sent_bytes"] = 5_000_000
    assert "network_bytes" not in compared(train)


def test_plans_without_times_and_figures_without_measures_are_not_compared() -> None:
    train = cpu_files()
    assert compared(train | {"plan.json": plan_without_times(STEPS)}) == {}
    assert compared(train | {"metrics.jsonl": [], "events.jsonl": []}) == {}


def test_a_gpu_of_no_known_peak_has_no_mfu() -> None:
    train = gpu_files()
    train["plan.json"] = gpu_plan(STEPS)
    train["plan.json"]["prediction"]["mfu"] = None
    assert compared(train).keys() == FIGURES.keys() - {"mfu"}


@given(
    low=st.floats(0.1, 1),
    middle=st.floats(1, 2),
    high=st.floats(2, 9),
    measured=st.floats(0.01, 90),
)
def test_a_figure_is_within_its_band_or_beyond_its_nearer_end(
    low: float, middle: float, high: float, measured: float
) -> None:
    one = Compared("step_s", "time of a step", "s", middle, low, high, measured)
    assert one.within == (one.beyond_fraction == 0)
    if not one.within:
        end = high if measured > high else low
        assert end * (1 + one.beyond_fraction) == pytest.approx(measured)
    assert middle * (1 + one.error_fraction) == pytest.approx(measured)


def test_the_verdict_counts_and_names_what_left_its_band() -> None:
    kept = Compared("mfu", "MFU", "fraction", 0.4, 0.3, 0.5, 0.41)
    long = Compared("step_s", "time of a step", "s", 1.0, 0.9, 1.1, 1.254)
    less = Compared("peak_memory_bytes", "peak of the allocator", "memory", 10.0, 8.0, 12.0, 6.0)
    assert verdict([kept]) == "1 of 1 figure is within its band."
    assert verdict([kept, long, less]) == (
        "1 of 3 figures are within their bands. Outside: time of a step, 14.0% above the band; "
        "peak of the allocator, 25.0% below the band."
    )
    assert beyond(long) == "14.0% above"


def test_a_band_that_holds_nearly_anything_is_not_judged() -> None:
    kept = Compared("mfu", "MFU", "fraction", 0.4, 0.2, 0.8, 0.41)
    wide = Compared("step_s", "time of a step", "s", 1.0, 0.1, 7.0, 5.0)
    open_ended = Compared("network_bytes", "sent by a node in a step", "bytes", 1.0, 0.0, 1.0, 2.0)
    assert (kept.is_judged, wide.is_judged, open_ended.is_judged) == (True, False, False)
    assert tally([kept, wide]) == "1 of 1 figure is within its band, 1 not judged"
    assert tally([wide, open_ended]) == "2 figures not judged"
    assert "Outside" not in verdict([kept, wide, open_ended])
    assert "not judged; `qwen3 calibrate CONFIG` narrows them" in verdict([wide])
    assert unjudged(wide) == "not judged: a band of a factor of 70"
    assert unjudged(open_ended) == "not judged: a band from zero"
