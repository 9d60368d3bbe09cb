"""Predicted steps: what has to hold whatever the numbers are, and volumes and times by hand."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline_lib.arch.families import geometry_in, published
from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.calibrate.task import with_layers
from pipeline_lib.config.schema import Cluster
from pipeline_lib.config.strategies import STRATEGIES
from pipeline_lib.config.train import Train
from pipeline_lib.plan.case import Case
from pipeline_lib.plan.choose import best_way, choose
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.machine import End, Machine, MeasuredPart, Pass, Ranks
from pipeline_lib.plan.memory import predict
from pipeline_lib.plan.passes import COMPILE_S, ends_passes, layer_passes, shape_of
from pipeline_lib.plan.predict import Prediction, host_need_of_node, lacks_host_memory, predict_step
from pipeline_lib.plan.step_time import overlapped, step_time
from pipeline_lib.plan.traffic import Reach, exchanges_of, reach_of
from pipeline_lib.plan.ways import Ways
from pipeline_lib.plan.words import describe, why_chosen
from pipeline_lib.records.plan import Figure, Workload
from tests.plan.fleet import QWEN3_06B, QWEN3_8B, asking, case_of, machine, workload

TWO_NODES = Ranks(16, 8)
ways = st.fixed_dictionaries(
    {
        "strategy": st.sampled_from(list(STRATEGIES)),
        "method": st.sampled_from(["full", "lora"]),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "micro_batch_blocks": st.sampled_from([1, 2, 4]),
    }
)
geometries = st.sampled_from([QWEN3_06B, QWEN3_8B])
fleets = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 8]))


def of(
    geometry: Geometry, way: dict[str, Any], fleet: Machine, blocks_of_a_rank: int = 8
) -> Prediction:
    train = Train.model_validate(way)
    return predict_step(
        Case(geometry, train, fleet, workload(), blocks_of_a_rank * fleet.ranks, None)
    )


def usable(way: dict[str, Any], nodes: int, per_node: int) -> bool:
    return way["strategy"] != "hsdp" or (nodes > 1 and per_node > 1)


@given(
    geometry=geometries,
    way=ways,
    counts=fleets,
    rate=st.sampled_from(list(machine().rates)),
    factor=st.floats(1, 50),
)
def test_nothing_that_gets_faster_makes_a_step_slower(
    geometry: Geometry, way: dict[str, Any], counts: tuple[int, int], rate: str, factor: float
) -> None:
    fleet = machine(*counts) if usable(way, *counts) else machine(2, 2)
    is_cost = rate == "launch_s" or rate.endswith("latency_s")
    value = fleet.rates[rate].value
    better = fleet.with_rate(rate, value / factor if is_cost else value * factor)
    now, then = of(geometry, way, fleet), of(geometry, way, better)
    assert then.step_s.value <= now.step_s.value * (1 + 1e-9)
    assert then.memory == now.memory


@given(geometry=geometries, way=ways, counts=fleets)
def test_a_prediction_adds_up(
    geometry: Geometry, way: dict[str, Any], counts: tuple[int, int]
) -> None:
    found = of(geometry, way, machine(*counts) if usable(way, *counts) else machine(2, 2))
    assert sum(found.parts.values()) == pytest.approx(found.step_s.value)
    assert all(seconds >= 0 for seconds in found.parts.values())
    phases = (found.forward_s, found.backward_s, found.update_s)
    assert sum(phase.value for phase in phases) == pytest.approx(found.step_s.value)
    for figure in vars(found).values():
        if isinstance(figure, Figure):
            assert 0 <= figure.low <= figure.value <= figure.high
    assert sum(one.exposed_s for one in found.exchanges) == pytest.approx(
        found.parts["exchange"], abs=1e-9
    )
    assert found.mfu is not None
    assert found.mfu.value < 1
    assert found.mfu.high <= 1 or found.train.precision == "fp8"


@given(geometry=geometries, way=ways, counts=fleets)
def test_only_what_crosses_nodes_is_network(
    geometry: Geometry, way: dict[str, Any], counts: tuple[int, int]
) -> None:
    nodes, per_node = counts if usable(way, *counts) else (2, 2)
    found = of(geometry, way, machine(nodes, per_node))
    assert (found.network_bytes.value > 0) == (nodes > 1)
    assert bool(found.exchanges) == (nodes * per_node > 1)


@given(
    way=ways.filter(lambda way: way["strategy"] in ("fsdp", "zero1", "zero2", "zero3")),
    geometry=geometries,
    few=st.sampled_from([1, 2, 4]),
)
def test_more_gpus_never_raise_what_is_sharded(
    way: dict[str, Any], geometry: Geometry, few: int
) -> None:
    train = Train.model_validate(way)
    less, more = (
        predict(geometry, train, Ranks(count, count), 4096, 2) for count in (few, 2 * few)
    )
    assert more.state_bytes <= less.state_bytes
    assert more.allocated_bytes <= less.allocated_bytes


@given(way=ways, geometry=geometries)
def test_larger_micro_batches_need_more_memory_and_launch_less(
    way: dict[str, Any], geometry: Geometry
) -> None:
    fleet = machine(2, 4)
    small, large = (of(geometry, {**way, "micro_batch_blocks": size}, fleet) for size in (1, 8))
    assert large.memory.allocated_bytes > small.memory.allocated_bytes
    assert large.step_s.value <= small.step_s.value * (1 + 1e-9)


def volumes(
    strategy: str, accumulation: int = 3, ranks: Ranks = TWO_NODES, **way: Any
) -> dict[str, float]:
    """Bytes of a step by name, for each parameter."""
    train = Train.model_validate({"strategy": strategy, **way})
    found = exchanges_of(QWEN3_8B, train, ranks)
    return {
        one.name: one.payload_bytes * one.times(accumulation) / QWEN3_8B.parameters for one in found
    }


def test_what_each_strategy_exchanges() -> None:
    """Bytes a parameter in a step of three micro-batches: bf16 weights, fp32 gradients."""
    ends = (
        2 * 151936 * 4096 + 4096
    ) / QWEN3_8B.parameters  # embedding, head and last norm stay gathered
    fsdp = {"weights": 6.0, "weights again": 6.0 * (1 - ends), "gradients": 12.0}
    assert volumes("ddp") == {"gradients": 4.0}
    assert volumes("fsdp") == pytest.approx(fsdp)
    assert volumes("fsdp", reshard=False) == pytest.approx({"weights": 2.0, "gradients": 12.0})
    assert volumes("hsdp") == pytest.approx({**fsdp, "parts of gradients": 4.0 / 8})
    assert volumes("zero1") == {"gradients": 4.0, "updated weights": 2.0}
    assert volumes("zero2") == {"gradients": 12.0, "updated weights": 2.0}
    assert volumes("zero3")["gradients"] == 12.0
    assert volumes("ddp", gradient_compression="bf16") == {"gradients": 2.0}
    for strategy, gradients in (("fsdp", 6.0), ("zero1", 2.0), ("zero2", 6.0), ("zero3", 6.0)):
        assert volumes(strategy, gradient_compression="bf16")["gradients"] == gradients
    assert volumes("hsdp", gradient_compression="bf16")["parts of gradients"] == 2.0 / 8
    assert volumes("ddp", local_sgd_steps=8) == {"models": 12.0 / 8}
    assert volumes("ddp", gradient_compression="powersgd")["gradients"] < 0.02
    assert volumes("ddp", ranks=Ranks(1, 1)) == {}


def test_muon_exchanges_matrices_in_bf16_with_whoever_makes_their_update() -> None:
    """All have them with ddp and receive the result; parts of them go there and back otherwise."""
    matrices = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288) / QWEN3_8B.parameters
    for strategy, bytes_each in (("ddp", 2), ("fsdp", 4 / 16), ("hsdp", 4 / 8)):
        found = volumes(strategy, optimizer="muon")
        assert found.pop("orthogonal updates") == pytest.approx(bytes_each * matrices)
        assert found == volumes(strategy)
    assert volumes("ddp", ranks=Ranks(1, 1), optimizer="muon") == {}


@pytest.mark.parametrize(("strategy", "shared_by"), [("ddp", 8), ("fsdp", 8), ("hsdp", 4)])
def test_muon_adds_the_products_of_its_iterations_to_the_update(
    strategy: str, shared_by: int
) -> None:
    fleet = machine(2, 4)
    adamw, muon = (
        step_time(
            Case(QWEN3_8B, train, fleet, workload(), 64, None),
            Ways.one(train, QWEN3_8B),
            End.EXPECTED,
        )
        for optimizer in ("adamw", "muon")
        if (train := Train.model_validate({"strategy": strategy, "optimizer": optimizer}))
    )
    # s x l: 4 s s l + 2 s s s; queries and output, keys and values, the MLP
    by_shape = [(2, 4096, 4096), (2, 1024, 4096), (3, 4096, 12288)]
    products = sum(
        count * (4 * short * short * long + 2 * short**3) for count, short, long in by_shape
    )
    flops = 36 * 5 * products / shared_by
    added_s = muon.update.device_s - adamw.update.device_s
    assert added_s >= flops / fleet.speeds(End.EXPECTED).matmul_flop_s
    assert added_s < 1.5 * flops / fleet.speeds(End.EXPECTED).matmul_flop_s
    assert muon.forward.total_s == adamw.forward.total_s
    assert muon.backward.total_s == adamw.backward.total_s


def test_lora_exchanges_adapters_and_gathers_the_base() -> None:
    adapters = QWEN3_8B.adapter_parameters(Train().lora) / QWEN3_8B.parameters
    assert volumes("ddp", method="lora") == pytest.approx({"gradients": 4.0 * adapters})
    assert volumes("fsdp", method="lora")["weights"] == 6.0


def test_an_all_reduce_over_a_network_by_hand() -> None:
    """8.19e9 fp32 gradients, 2 nodes: each sends 2 x 1/2 of 32.8 GB; 26.2 s at 10 Gbit/s."""
    fleet = machine(2, 8, between_gbit_s=10)
    found = of(QWEN3_8B, {"strategy": "ddp"}, fleet, blocks_of_a_rank=1)
    assert found.network_bytes.value == pytest.approx(4 * QWEN3_8B.parameters)
    assert found.exchanges[0].seconds == pytest.approx(4 * QWEN3_8B.parameters / 1.25e9, rel=0.01)
    # one ring through all
    assert found.network_bytes.high == pytest.approx(2 * 15 / 16 * 4 * QWEN3_8B.parameters)
    assert found.bound == "exchange"


def test_hsdp_sends_a_nodes_parts_of_the_gradients_only() -> None:
    found = of(QWEN3_8B, {"strategy": "hsdp"}, machine(4, 8, between_gbit_s=100))
    assert found.network_bytes.value == pytest.approx(2 * 3 / 4 * 4 * QWEN3_8B.parameters)


def test_what_overlaps_takes_as_long_as_the_longest() -> None:
    first_s, second_s = np.array([1.0, 0.0, 3.0, 1.0]), np.array([0.0, 0.0, 1.0, 1.0])
    *plain_s, equal_s = overlapped(first_s, second_s)
    assert plain_s == pytest.approx([1.0, 0.0, 3.0], rel=1e-3)
    assert 1.0 < equal_s < 1.15


def test_what_was_measured_takes_the_place_of_the_formula() -> None:
    shape = (151936, 1024, 3072, 16, 8, 128, 0, 0, 0)
    layer = MeasuredPart(
        "layer", shape, "ddp/full/none", 500.0, 0.5, Pass(0.0, 1e-6, 0.0), Pass(0.0, 2e-6, 0.0)
    )
    ends = replace(layer, part="ends", forward=Pass(0.0, 3e-6, 0.0), backward=Pass(0.0, 0.0, 0.0))
    fleet = replace(machine(1, 1, launch_s=1e-12), measured=(layer, ends))
    train = Train(strategy="ddp")
    found = predict_step(Case(QWEN3_06B, train, fleet, workload(4096, 500), 1, None))
    assert found.forward_s.value == pytest.approx(4096 * (28 * 1e-6 + 3e-6))
    assert found.backward_s.value == pytest.approx(4096 * 28 * 2e-6)
    longer = predict_step(Case(QWEN3_06B, train, fleet, workload(4096, 4000), 1, None))
    assert longer.forward_s.value > found.forward_s.value  # attention in longer documents
    other = predict_step(
        Case(QWEN3_06B, Train(strategy="fsdp"), fleet, workload(4096, 500), 1, None)
    )
    # nothing was measured of fsdp
    assert other.forward_s.value != pytest.approx(found.forward_s.value, rel=0.05)


def test_a_run_is_its_steps_and_what_it_saves_and_validates() -> None:
    train = Train(strategy="ddp", save_every_steps=10)
    fleet = machine(1, 8)
    plain = predict_step(Case(QWEN3_06B, train, fleet, workload(), 64, 100))
    work = replace(workload(), validation_blocks=640)
    often = train.model_copy(update={"validate_every_steps": 10})
    validated = predict_step(Case(QWEN3_06B, often, fleet, work, 64, 100))
    assert plain.run_s is not None
    assert plain.gpu_hours is not None
    assert validated.run_s is not None
    saves_s = 10 * 12 * QWEN3_06B.parameters / 8 / 20e9
    last_s = plain.checkpoint_s.value  # of the others nothing is waited for, but steps are slower
    assert last_s < 10 * plain.step_s.value
    assert plain.run_s.value == pytest.approx(
        100 * plain.step_s.value + saves_s + last_s + 9 * 0.29 * last_s
    )
    assert plain.gpu_hours.value == pytest.approx(8 * plain.run_s.value / 3600)
    assert validated.run_s.value == pytest.approx(
        plain.run_s.value + 100 * plain.forward_s.value, rel=1e-6
    )


def test_offloading_waits_for_copies() -> None:
    fleet = machine(1, 2)
    offloaded = of(
        QWEN3_8B, {"strategy": "fsdp", "offload": "optimizer+params"}, fleet, blocks_of_a_rank=1
    )
    kept = of(QWEN3_8B, {"strategy": "fsdp"}, fleet, blocks_of_a_rank=1)
    assert offloaded.step_s.value > kept.step_s.value
    assert offloaded.memory.total_bytes < kept.memory.total_bytes
    assert offloaded.parts["offload"] + offloaded.parts["update"] > 1.0
    small = of(
        QWEN3_8B,
        {"strategy": "fsdp", "offload": "optimizer+params"},
        machine(1, 2, host_memory_gb=64),
    )
    assert not small.fits


def test_the_attention_of_long_documents_is_not_computed_again() -> None:
    """Its part of the time of a pass is what full checkpointing saves from 16,384 tokens on."""
    train = Train(method="lora", recompute="full", compile=True)
    again: list[float] = []
    for tokens in (16383.0, 16384.0):
        data = replace(workload(), block_tokens=65536, document_tokens=tokens)
        case = Case(QWEN3_8B, train, machine(), data, 1)
        again.append(layer_passes(case, End.EXPECTED).recomputed_per_token_s)
        attention_s = 2 * 4096 * tokens / case.machine.speeds_in(tokens).attention_flop_s
    assert again[0] - again[1] == pytest.approx(attention_s, rel=1e-3)


def test_copies_of_activations_cost_what_does_not_hide_behind_computing() -> None:
    """Over a slow bus a step is bound by them; over a fast one it takes hardly longer."""
    way = {"method": "lora", "recompute": "full", "compile": True}
    slow, fast = (machine(1, 1).with_rate("copy_bytes_s", rate) for rate in (2e9, 50e9))
    for bus, least, most in ((fast, 1.0, 1.03), (slow, 1.5, 100.0)):
        here, away = (
            of(QWEN3_8B, {**way, "offload_activations": value}, bus, 1) for value in (False, True)
        )
        assert least <= away.step_s.value / here.step_s.value < most
        assert (away.bound == "offload") == (bus is slow)


def test_activations_go_to_the_host_only_if_the_run_does_not_fit_without() -> None:
    """36 layers of Qwen3-8B keep 145 GiB of 262,144 tokens, half inputs: too much for an H200."""
    train = Train(strategy="ddp", method="lora", compile=True)
    chosen = []
    for tokens, memory_gb in ((8192, 1000), (262_144, 1000), (262_144, 64), (524_288, 64)):
        data = replace(workload(), block_tokens=tokens, document_tokens=float(tokens))
        setting = case_of(QWEN3_8B, machine(1, 1, host_memory_gb=memory_gb), data, 1, None)
        chosen.append(choose(asking(setting, train, (), True)).chosen)
    assert [way.train.offload_activations for way in chosen] == [False, True, False, True]
    assert [way.fits for way in chosen] == [True, True, True, False]
    assert [way.train.kept_attention_layers == "auto" for way in chosen] == [
        True,
        True,
        False,
        False,
    ]
    assert "activations on the host" in describe(chosen[1])


def test_the_band_follows_from_the_rates() -> None:
    fleet = machine(1, 8)
    sure = replace(
        fleet,
        rates={name: replace(r, low=r.value, high=r.value) for name, r in fleet.rates.items()},
    )
    wide, narrow = (of(QWEN3_8B, {"strategy": "fsdp"}, one).step_s for one in (fleet, sure))
    assert wide.value == narrow.value
    assert wide.high / wide.low > narrow.high / narrow.low > 1
    assert fleet.speeds(End.BAD).launch_s > fleet.speeds(End.GOOD).launch_s
    assert fleet.speeds(End.BAD).matmul_flop_s < fleet.speeds(End.GOOD).matmul_flop_s


def calibrated(fleet: Machine, factor: float, *variants: str) -> Machine:
    """Layers of these variants took `factor` times as long as the formula says."""
    shape, parts = shape_of(QWEN3_8B), []
    for variant in variants:
        strategy, method, recompute, *compiled = variant.split("/")
        way = {
            "strategy": strategy,
            "method": method,
            "recompute": recompute,
            "compile": bool(compiled),
        }
        train = Train.model_validate(way)
        for part, passes in (("layer", layer_passes), ("ends", ends_passes)):
            found = passes(Case(QWEN3_8B, train, fleet, workload(), 1), End.EXPECTED)
            slower = [
                Pass(*(factor * value for value in vars(one).values()))
                for one in (found.forward, found.backward)
            ]
            parts.append(MeasuredPart(part, shape, variant, 500.0, 0.5, *slower))
    return replace(fleet, measured=tuple(parts))


def test_what_was_not_measured_is_as_far_off_as_its_like() -> None:
    """Else what calibration had no time for would look faster than what it had."""
    fleet = calibrated(machine(1, 8), 1.5, "fsdp/full/none")
    found = {
        recompute: of(QWEN3_8B, {"strategy": "fsdp", "recompute": recompute}, fleet).step_s.value
        for recompute in ("none", "selective", "full")
    }
    plain = of(QWEN3_8B, {"strategy": "zero3"}, machine(1, 8)).step_s.value
    assert found["none"] < found["selective"] < found["full"]
    assert of(QWEN3_8B, {"strategy": "zero3"}, fleet).step_s.value > 1.3 * plain


def test_compiled_layers_are_measured_by_themselves() -> None:
    plain = machine(1, 8)
    eager, both = (
        calibrated(plain, 1.5, *variants)
        for variants in (("fsdp/full/none",), ("fsdp/full/none", "fsdp/full/none/compiled"))
    )
    times = [
        of(QWEN3_8B, {"strategy": "fsdp", "compile": True}, fleet).step_s.value
        for fleet in (plain, eager, both)
    ]
    # what is not measured is as its like
    assert times[0] < times[1] == pytest.approx(times[2], rel=0.05)
    measured = layer_passes(
        Case(QWEN3_8B, Train(strategy="fsdp", compile=True), both, workload(), 1), End.EXPECTED
    )
    assert measured.is_measured


def test_layers_that_stay_gathered_are_copied_out_once() -> None:
    fleet = calibrated(machine(1, 8), 1.0, "fsdp/full/none")
    kept, let_go = (
        layer_passes(
            Case(QWEN3_8B, Train(strategy="fsdp", reshard=reshard), fleet, workload(), 1),
            End.EXPECTED,
        )
        for reshard in (False, True)
    )
    assert kept.is_measured
    assert kept.forward == let_go.forward
    assert 0 < kept.backward.fixed_s < let_go.backward.fixed_s


@given(geometry=geometries, way=ways.filter(lambda way: way["strategy"] != "zero3"), counts=fleets)
def test_compiled_layers_take_less_time_and_less_memory(
    geometry: Geometry, way: dict[str, Any], counts: tuple[int, int]
) -> None:
    fleet = machine(*counts) if usable(way, *counts) else machine(2, 2)
    eager, compiled = (of(geometry, {**way, "compile": value}, fleet) for value in (False, True))
    assert compiled.step_s.value < eager.step_s.value
    assert compiled.memory.allocated_bytes <= eager.memory.allocated_bytes


def test_a_run_waits_for_disks_that_are_slower_than_its_steps() -> None:
    slow = machine(1, 8).with_rate("disk_bytes_s", 1e8)
    train = Train.model_validate({"strategy": "fsdp", "save_every_steps": 10})
    ahead, at_once = (
        predict_step(
            Case(
                QWEN3_06B, train.model_copy(update={"save_async": value}), slow, workload(), 64, 100
            )
        )
        for value in (True, False)
    )
    assert ahead.run_s is not None
    assert at_once.run_s is not None
    hidden_s = 9 * 10 * ahead.step_s.value  # of which steps lose 29 % to what is written meanwhile
    assert at_once.run_s.value - ahead.run_s.value == pytest.approx((1 - 0.29) * hidden_s)
    assert at_once.run_s.value == pytest.approx(
        100 * at_once.step_s.value + 10 * at_once.checkpoint_s.value, rel=0.02
    )  # copies are the rest
    assert at_once.run_s.low < at_once.run_s.value < at_once.run_s.high


@pytest.mark.parametrize(
    ("gpu", "precision", "compiles"),
    [
        ("V100 32GB SXM", "fp16", False),
        ("T4", "fp16", False),
        ("A10", "fp16", True),
        ("A10", "bf16", True),
    ],
)
def test_layers_whose_documents_attend_one_by_one_are_not_compiled(
    gpu: str, precision: str, compiles: bool
) -> None:
    """GPUs before Ampere lack a packed kernel: layers would be compiled anew by length.

    The kernel is the one for packed documents.
    """
    fleet = replace(machine(1, 1, memory_gib=300), name=gpu)
    assert chosen_of({"strategy": "ddp", "precision": precision}, fleet).train.compile is compiles


def chosen_of(
    train: dict[str, Any], fleet: Machine, steps: int | None = None, blocks: int = 64
) -> Prediction:
    """What is chosen under a strategy that is named."""
    setting = case_of(QWEN3_8B, fleet, workload(), blocks, steps)
    return choose(asking(setting, Train.model_validate(train), (), True)).chosen


def test_what_is_auto_is_the_fastest_that_fits_under_a_strategy_that_is_named() -> None:
    roomy, tight, tiny = (machine(1, 8, memory_gib=size) for size in (140, 34, 4))
    found = [chosen_of({"strategy": "fsdp"}, fleet).train for fleet in (roomy, tight)]
    assert (found[0].recompute, found[0].reshard, found[0].compile) == ("none", False, True)
    said = describe(chosen_of({"strategy": "fsdp"}, roomy))
    assert said == "fsdp, micro-batch 1 x accumulation 8, no reshard after forward, compiled"
    assert found[1].recompute in ("selective", "full")
    assert all(train.micro_batch_blocks == 1 for train in found)
    least = chosen_of({"strategy": "fsdp"}, tiny)
    assert not least.fits
    assert (least.train.recompute, least.train.reshard) == ("full", True)
    held = chosen_of(
        {"strategy": "fsdp", "recompute": "none", "reshard": True, "compile": False}, tight
    )
    assert (held.train.recompute, held.train.reshard, held.train.compile) == ("none", True, False)
    assert chosen_of({"strategy": "ddp"}, roomy).train.reshard is True


@pytest.mark.parametrize(
    ("train", "steps", "compiled"),
    [
        ({"strategy": "fsdp"}, None, True),
        ({"strategy": "fsdp"}, 5, False),
        ({"strategy": "fsdp"}, 5000, True),
        ({"strategy": "zero1"}, None, False),
        ({"strategy": "zero3"}, None, False),
        ({"strategy": "fsdp", "precision": "fp32"}, None, False),
        ({"strategy": "fsdp", "compile": True}, 5, True),
        ({"strategy": "ddp", "method": "lora"}, None, True),
        ({"strategy": "ddp", "method": "lora", "lora": {"dora": True}}, None, False),
        ({"strategy": "ddp", "method": "lora", "lora": {"dropout": 0.1}}, None, False),
    ],
)
def test_layers_are_compiled_where_the_run_wins_the_time_back(
    train: dict[str, Any], steps: int | None, compiled: bool
) -> None:
    assert chosen_of(train, machine(1, 8), steps).train.compile is compiled


def test_a_run_is_as_long_as_it_takes_with_its_compilation() -> None:
    eager, compiled = (
        chosen_of({"strategy": "fsdp", "compile": value}, machine(1, 8), steps=100)
        for value in (False, True)
    )
    assert eager.run_s is not None
    assert compiled.run_s is not None
    assert compiled.run_s.value - 100 * compiled.step_s.value == pytest.approx(
        COMPILE_S + eager.run_s.value - 100 * eager.step_s.value
    )
    assert compiled.run_s.low < compiled.run_s.value < compiled.run_s.high


def test_on_cpus_nothing_is_compiled_or_kept_by_choice() -> None:
    cpus = replace(machine(1, 2), is_gpu=False, gpu_memory_bytes=None, host_memory_bytes=None)
    found = chosen_of({"strategy": "fsdp"}, cpus).train
    assert (found.recompute, found.reshard, found.compile) == ("none", True, False)
    small = replace(cpus, host_memory_bytes=180 * 10**9)
    assert chosen_of({"strategy": "fsdp"}, small).train.recompute != "none"


def test_replicas_that_straddle_nodes_cross_the_network() -> None:
    """On 3 nodes of 8: 12 ranks span two nodes, the middle one with two replicas; so do 6 of 24."""
    ranks = Ranks(24, 8)
    spans = {
        size: reach_of("shard", Train(strategy="hsdp", shard_ranks=size), ranks)
        for size in (2, 4, 6, 8, 12)
    }
    assert {size: reach.nodes for size, reach in spans.items()} == {2: 1, 4: 1, 6: 2, 8: 1, 12: 2}
    assert spans[12].groups_per_node == 2
    assert reach_of("replicas", Train(strategy="hsdp", shard_ranks=8), ranks) == Reach(3, 3, 8)


def test_frozen_weights_get_no_gradients() -> None:
    layers, embedding = ("model.layers.*",), ("model.embed_tokens.*",)
    steps = [
        of(QWEN3_8B, {"strategy": "fsdp", "freeze": names}, machine(1, 8))
        for names in ((), embedding, layers)
    ]
    assert steps[2].backward_s.value < 0.8 * steps[0].backward_s.value
    assert steps[1].backward_s.value <= steps[0].backward_s.value
    assert steps[2].update_s.value < 0.3 * steps[0].update_s.value


def test_adapters_of_higher_rank_exchange_more_by_powersgd_and_never_more_than_plainly() -> None:
    def sent(rank: int, **way: Any) -> float:
        lora = {"rank": rank, "alpha": 32}
        return volumes("ddp", method="lora", lora=lora, **way)["gradients"]

    assert sent(4, gradient_compression="powersgd") <= sent(4)
    assert sent(4, gradient_compression="powersgd") < sent(64, gradient_compression="powersgd")


def test_what_is_said_to_fit_fits_at_the_end_of_the_band() -> None:
    for gib_of_gpu in range(20, 140, 5):
        found = of(
            QWEN3_8B, {"strategy": "hsdp", "shard_ranks": 4}, machine(1, 8, memory_gib=gib_of_gpu)
        )
        assert found.fits == (found.needed_memory_bytes.high <= gib_of_gpu * 2**30)


def test_an_optimizer_in_host_memory_counts_as_offloading() -> None:
    found = of(
        QWEN3_8B, {"strategy": "zero2", "offload": "optimizer"}, machine(1, 8), blocks_of_a_rank=1
    )
    assert found.bound == "offload"
    assert found.parts["offload"] > 28 * QWEN3_8B.parameters / 50e9


def test_ranks_without_gpus_share_the_host_memory() -> None:
    cpus = replace(machine(1, 2, host_memory_gb=64), is_gpu=False, gpu_memory_bytes=None)
    setting = case_of(QWEN3_8B, cpus, workload(), 8, None)
    choice = choose(asking(setting, Train(strategy="ddp"), (), True))
    assert not choice.chosen.fits
    assert "cluster.memory_gb gives 64.00 GB" in why_chosen(choice, setting, False)
    assert of(QWEN3_8B, {"strategy": "ddp"}, replace(cpus, host_memory_bytes=10**12)).fits
    assert of(QWEN3_8B, {"strategy": "ddp"}, replace(cpus, host_memory_bytes=None)).fits


def test_offloading_without_gpus_frees_no_memory() -> None:
    """16 bytes a parameter stay on the host, whether or not they are said to be offloaded."""
    cpus = replace(machine(1, 2, host_memory_gb=120), is_gpu=False, gpu_memory_bytes=None)
    moved = of(
        QWEN3_8B, {"strategy": "fsdp", "offload": "optimizer+params", "recompute": "full"}, cpus
    )
    need = host_need_of_node(moved.memory, cpus)
    assert need.state_bytes > 16 * QWEN3_8B.parameters
    assert need.copied_bytes == 0
    assert need.total_bytes > 1.15 * need.peak_bytes
    assert not moved.fits
    assert of(QWEN3_8B, {"strategy": "fsdp"}, replace(cpus, host_memory_bytes=10**12)).fits


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
@pytest.mark.parametrize("save_async", [True, False])
def test_a_save_copies_a_checkpoint_to_the_hosts_of_all_nodes(
    strategy: str, save_async: bool
) -> None:
    """Ranks share the writing, whatever they hold, and copy all or 1 GiB and a tensor at a time.

    6 GB a rank and 2.5 GB are beside that.
    """
    for nodes in (1, 4):
        found = of(QWEN3_8B, {"strategy": strategy, "save_async": save_async}, machine(nodes, 8))
        need = host_need_of_node(found.memory, machine(nodes, 8))
        assert need.state_bytes == 0
        at_once = 12 * QWEN3_8B.parameters / nodes if save_async else 8 * 2**30 + 4 * 151_936 * 4096
        assert need.copied_bytes == pytest.approx(1.2 * at_once)
        assert need.own_bytes == 50_500_000_000
        assert not lacks_host_memory(
            found.memory, replace(machine(nodes, 8), host_memory_bytes=need.total_bytes)
        )
        assert lacks_host_memory(
            found.memory, replace(machine(nodes, 8), host_memory_bytes=need.total_bytes - 1)
        )


def test_offloading_competes_within_the_host_memory_that_is_assumed() -> None:
    """Offloading makes room for larger micro-batches: here, with memory for them, faster ones."""
    known = machine(1, 2, memory_gib=96)
    auto, eager = Train(strategy="auto", compile=False), ("compile",)
    chosen = []
    for name, own in (
        ("test GPU", known.host_memory_bytes),
        ("test GPU", None),
        ("RTX 4090", None),
    ):
        fleet = replace(known, name=name, host_memory_bytes=own)
        setting = case_of(QWEN3_8B, fleet, workload(), 512, None)
        choice = choose(asking(setting, auto, eager, True))
        assert ("GB are assumed, as cluster" in why_chosen(choice, setting, True)) == (
            own is None and choice.chosen.memory.host_bytes > 0
        )
        chosen.append(choice.chosen.train.offload)
    assert chosen == ["optimizer", "optimizer", "none"]


def test_the_host_memory_of_a_node_is_assumed_by_its_gpus_where_it_is_not_given() -> None:
    """A run that offloads nothing is not refused by a limit that is only assumed."""
    fleet = replace(machine(2, 8), host_memory_bytes=None)
    assert [fleet.is_host_assumed, fleet.host_limit_bytes] == [True, 8 * 192 * 10**9]
    assert replace(fleet, ranks_per_node=16).host_limit_bytes == 2000 * 10**9
    for name in ("RTX 4090", "NVIDIA GeForce GTX 1080 Ti", "rtx4090"):
        assert replace(fleet, name=name).host_limit_bytes == 8 * 32 * 10**9
        assert replace(fleet, name=name, ranks_per_node=1).host_limit_bytes == 64 * 10**9
    assert replace(fleet, is_gpu=False).host_limit_bytes is None
    given = machine(1, 8, host_memory_gb=5)
    assert [given.is_host_assumed, given.host_limit_bytes] == [False, 5 * 10**9]
    desktop = replace(machine(1, 2), name="RTX 4090", host_memory_bytes=None)
    away, here = (
        of(QWEN3_8B, {"strategy": "fsdp", "offload": value, "save_async": True}, desktop)
        for value in ("optimizer", "none")
    )
    assert host_need_of_node(here.memory, desktop).total_bytes > 64 * 10**9
    assert [lacks_host_memory(way.memory, desktop) for way in (away, here)] == [True, False]


@pytest.mark.parametrize(
    ("size", "layers", "block_tokens", "document_tokens", "supervised", "gain"),
    [("8B", 8, 16384, 1024, 0.5, 1.25), ("4B", 36, 8192, 8192, 1.0, 1.10)],
    ids=["8B's widths", "4B"],
)
def test_fp8_gains_what_it_gained_on_a_gpu(
    size: str,
    layers: int,
    block_tokens: int,
    document_tokens: float,
    supervised: float,
    gain: float,
) -> None:
    """Of benchmarks/RESULTS.md, on one H200; wide linears gain more: rounding goes by edges."""
    geometry = with_layers(geometry_in(published(f"Qwen/Qwen3-{size}") or {}), layers)
    machine = machine_of(Cluster.model_validate({"gpus_per_node": 1, "gpu": "h200"}), "bf16", None)
    assert machine is not None
    workload = Workload(block_tokens, 1.0, supervised, document_tokens, None, None)
    setting = case_of(geometry, machine, workload, 16384 // block_tokens, None)
    keys = {"strategy": "fsdp", "compile": True, "recompute": "none", "reshard": True}
    bf16, fp8 = (
        best_way(setting.by(Train.model_validate({**keys, "precision": precision})))
        for precision in ("bf16", "fp8")
    )
    assert bf16.step_s.value / fp8.step_s.value == pytest.approx(gain, rel=0.03)
    assert fp8.memory.total_bytes == bf16.memory.total_bytes


def test_experts_are_not_rounded_to_fp8() -> None:
    """Only their attention is, which is little of a layer."""
    with_experts = geometry_in(published("Qwen/Qwen3-30B-A3B") or {})
    gains = []
    for geometry in (with_experts, QWEN3_8B):
        bf16, fp8 = (
            layer_passes(
                Case(
                    geometry,
                    Train.model_validate({"precision": precision}),
                    machine(),
                    workload(),
                    1,
                ),
                End.EXPECTED,
            )
            for precision in ("bf16", "fp8")
        )
        gains.append(bf16.forward.per_token_s / fp8.forward.per_token_s)
    assert gains[0] < 1.1 < gains[1]


@pytest.mark.parametrize("train", [{"precision": "bf16"}, {"precision": "fp32", "method": "lora"}])
def test_on_cpus_a_simpler_strategy_is_taken_than_the_one_that_formulas_of_gpus_call_a_little_faster(
    train: dict[str, Any],
) -> None:
    small = Geometry(2048, 320, 960, 12, 8, 4, 40, True, 4096)
    cpus = machine_of(Cluster(cpu_ranks=2, cpus_per_rank=2), train["precision"], None)
    assert cpus is not None
    setting = case_of(small, cpus, workload(256, 64.0), 64, None)
    found = choose(asking(setting, Train(strategy="auto", **train), (), True))
    fastest_s = min(one.step_s.value for one in found.best.values())
    assert found.chosen.train.strategy == "ddp"
    assert 1 < found.best["ddp"].step_s.value / fastest_s < 1.25
    assert "within 25% of the fastest" in why_chosen(found, setting, is_auto=True)


def test_every_doubling_of_the_nodes_costs_a_wait_for_the_slowest() -> None:
    """MPT's public table for H100 loses 2 to 4 % from 128 GPUs to 256."""

    def tokens_s(nodes: int) -> float:
        train = Train(strategy="fsdp", micro_batch_blocks=4, compile=True)
        fleet = machine(nodes, between_gbit_s=3200.0)
        case = Case(QWEN3_8B, train, fleet, workload(), 4 * fleet.ranks, None)
        return predict_step(case).tokens_per_s_per_rank.value

    for nodes in (2, 16, 32):
        assert 0.975 < tokens_s(2 * nodes) / tokens_s(nodes) < 0.99


def test_the_band_holds_all_lengths_that_assumed_documents_may_have() -> None:
    """From chats of 200 tokens to whole blocks; once a length is told, the band is the rates'."""
    assumed = replace(workload(32768, 8192.0), is_assumed=True, document_band=(200.0, 32768.0))
    train = Train(strategy="fsdp", recompute="full", compile=True)

    def step_s(data: Workload) -> Figure:
        return predict_step(Case(QWEN3_8B, train, machine(), data, 64)).step_s

    found = step_s(assumed)
    for tokens in (200.0, 1000.0, 8192.0, 32768.0):
        told = step_s(assumed.with_documents(tokens))
        assert found.low <= told.low < told.high <= found.high
        assert told.high / told.low < 0.75 * found.high / found.low
