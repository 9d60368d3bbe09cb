"""The machine of a cluster section: which source each rate comes from, and what is refused."""

import dataclasses
from typing import Any

import pytest

from pipeline_lib.calibrate.report import NAMES as MEASURABLE
from pipeline_lib.config.schema import Cluster
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.gpus import find_gpu, gpu_names
from pipeline_lib.plan.machine import COSTS, End, Machine, MeasuredPart, Pass, Speeds
from pipeline_lib.plan.measured import Measured
from pipeline_lib.records.plan import Rate

NAMES = {field.name for field in dataclasses.fields(Speeds)}
H200: dict[str, Any] = {"gpus_per_node": 8, "gpu": "h200"}
LAYER = MeasuredPart(
    "layer", (1, 2), "ddp/full/none", 512.0, 0.5, Pass(0, 1e-7, 1e-3), Pass(0, 2e-7, 2e-3)
)


def machine(precision: str = "bf16", measured: Measured | None = None, **keys: Any) -> Machine:
    found = machine_of(Cluster.model_validate(keys), precision, measured)
    assert found is not None
    return found


def measured(gpu: str | None = "NVIDIA H200", precision: str = "bf16", **rates: float) -> Measured:
    return Measured(
        rates={
            name: Rate(value, value / 1.05, value * 1.05, "measured")
            for name, value in rates.items()
        },
        parts=(LAYER,),
        gpu=gpu,
        gpu_memory_bytes=None if gpu is None else 150_000_000_000,
        ranks=2,
        nodes=1,
        precision=precision,
    )


ALL_RATES = {name: 1e-5 if name in COSTS else 1e10 for name in NAMES}
# What calibrate knows how to measure (tests/calibrate holds the real thing to it).
OF_CALIBRATE = {name: value for name, value in ALL_RATES.items() if name in MEASURABLE}


def test_a_named_gpu_is_taken_from_the_catalogue() -> None:
    found = machine(**H200, memory_gb=1024)
    assert (found.name, found.is_gpu, found.nodes, found.ranks_per_node, found.ranks) == (
        "H200",
        True,
        1,
        8,
        8,
    )
    assert found.peak_flop_s == 989.4e12
    assert found.host_memory_bytes == 1024 * 10**9
    assert machine(**H200).host_memory_bytes is None
    assert found.gpu_memory_bytes is not None
    assert 139 * 2**30 < found.gpu_memory_bytes < 140 * 2**30
    assert found.rates["matmul_flop_s"].source.startswith("catalogue: H200, ")
    assert found.rates["in_node_bytes_s"].source == "catalogue: H200, NVLink 4"
    assert found.measured == ()


@pytest.mark.parametrize("gpu", gpu_names())
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_every_gpu_has_every_rate(gpu: str, precision: str) -> None:
    found = machine(precision, gpus_per_node=2, gpu=gpu, nodes=2, internode_gbit_s=100)
    assert set(found.rates) == NAMES
    for rate in found.rates.values():
        assert 0 < rate.low < rate.value < rate.high
        assert rate.source


def test_bands_hold_what_was_measured_on_h200() -> None:
    """Products in real layers, the collective, launches: the catalogue must know our GPU right."""
    bad, good = machine(**H200).speeds(End.BAD), machine(**H200).speeds(End.GOOD)
    assert bad.matmul_flop_s < 640e12 < 665e12 < good.matmul_flop_s
    assert bad.in_node_bytes_s < 359e9 < good.in_node_bytes_s
    assert bad.launch_s > 21e-6 > good.launch_s
    assert bad.memory_bytes_s < 4.3e12 < good.memory_bytes_s


@pytest.mark.parametrize(
    ("attention", "in_8192", "in_1024"),
    [("auto", (405e12, 415e12), 270e12), ("flash", (253e12, 258e12), 160e12)],
)
def test_attention_on_h200_is_by_kernel_and_length(
    attention: str, in_8192: tuple[float, float], in_1024: float
) -> None:
    found = machine_of(Cluster.model_validate(H200), "bf16", None, attention)
    assert found is not None
    bad, good = (found.speeds_in(8192, end).attention_flop_s for end in (End.BAD, End.GOOD))
    assert bad < in_8192[0] < in_8192[1] < good
    bad, good = (found.speeds_in(1024, end).attention_flop_s for end in (End.BAD, End.GOOD))
    assert bad < in_1024 < good


def test_only_hopper_has_another_attention_kernel() -> None:
    for gpu, gain in (("h100", 1.3), ("a100 80gb", 1.0), ("4090", 1.0), ("b200", 1.0)):
        rates = [
            machine_of(Cluster(gpus_per_node=1, gpu=gpu), "bf16", None, attention)
            for attention in ("auto", "flash")
        ]
        auto, flash = (found.speeds().attention_flop_s for found in rates if found is not None)
        assert auto >= gain * flash
        assert (auto == flash) == (gain == 1.0)


def test_what_products_reach_is_as_sure_as_it_was_measured() -> None:
    """In layers of the card, by others on the card, or as other cards of its class."""
    in_layers = {"H200", "H100 SXM", "H800 SXM", "A100 80GB SXM", "A100 40GB SXM", "A800 80GB SXM"}
    elsewhere = {"B200", "H20", "L40S", "RTX A6000", "RTX 6000 Ada", "RTX 4090", "RTX 5090", "T4"}
    geforce = {"RTX 4080", "RTX 5080", "RTX 3080", "RTX 4070 Ti"}
    for gpu in gpu_names():
        found = machine("fp16", gpus_per_node=1, gpu=gpu).rates["matmul_flop_s"]
        width = found.high / found.value - 1
        if gpu in in_layers:
            assert width < 0.15 and found.source.endswith("measured in layers of this card")
        if gpu in elsewhere:
            assert width == pytest.approx(0.2)
            assert found.source.endswith("measured elsewhere on this card")
        if gpu in geforce:
            assert width == pytest.approx(0.25)
        assert width < 0.31
    wide = machine("fp16", gpus_per_node=1, gpu="a30").rates["matmul_flop_s"]
    assert wide.high / wide.value == pytest.approx(1.3)
    assert wide.source == "catalogue: A30, guessed from its data sheet"


@pytest.mark.parametrize(
    ("gpu", "least", "most"),
    [("4090", 0.9, 1.0), ("4090 d", 0.8, 0.95), ("h20", 0.78, 0.95), ("5090", 0.85, 1.05)],
)
def test_consumer_and_cut_down_cards_reach_most_of_their_peak(
    gpu: str, least: float, most: float
) -> None:
    found = machine("bf16", gpus_per_node=1, gpu=gpu)
    assert least < found.rates["matmul_flop_s"].value / (found.peak_flop_s or 1) < most


def test_a_board_of_less_power_reaches_less_of_the_same_sheet() -> None:
    """AD102 at 300 W beside 350 W, and H100's and A100's chips on PCIe beside SXM."""

    def reached(gpu: str) -> float:
        return machine("bf16", gpus_per_node=1, gpu=gpu).rates["matmul_flop_s"].value

    assert reached("6000 ada") < 0.6 * reached("l40s")
    assert reached("l40") == pytest.approx(reached("6000 ada"), rel=0.05)
    for chip in ("h100", "a100 80gb"):
        assert reached(f"{chip} pcie") < reached(chip)


def test_small_kernels_reach_more_of_a_slow_memory() -> None:
    """What they take on the chip weighs less there: 0.4 of H200's bandwidth, two thirds of 4090's."""
    shares = {}
    for gpu in ("h200", "a100 80gb", "4090"):
        rate = machine("bf16", gpus_per_node=1, gpu=gpu).rates["pointwise_bytes_s"]
        found = find_gpu(gpu)
        assert found is not None
        shares[gpu] = rate.value / found.memory_bytes_per_s
    assert shares["h200"] == pytest.approx(0.4, abs=0.01)
    assert shares["a100 80gb"] == pytest.approx(0.57, abs=0.02)
    assert shares["4090"] == pytest.approx(0.69, abs=0.02)


def test_a_measured_rate_of_attention_is_that_of_its_documents() -> None:
    """`calibrate` measures in documents like the data; on CPUs, short ones are unknown."""
    found = machine("bf16", measured(attention_flop_s=200e12), **H200)
    assert found.speeds_in(LAYER.document_tokens).attention_flop_s == pytest.approx(200e12)
    assert found.speeds_in(200 * LAYER.document_tokens).attention_flop_s > 400e12
    cpus = machine("fp32", cpu_ranks=2)
    assert cpus.speeds_in(100.0) == cpus.speeds()


def test_fp32_is_slower_and_a_gpu_without_bf16_is_refused_in_it() -> None:
    assert (
        machine("fp32", **H200).speeds().matmul_flop_s
        < machine("bf16", **H200).speeds().matmul_flop_s / 10
    )
    assert machine("fp32", **H200).peak_flop_s == 67e12
    with pytest.raises(
        ConfigError,
        match="train.precision: bf16, which a V100 32GB SXM does not compute in; .* fp16",
    ):
        machine("bf16", gpus_per_node=8, gpu="v100 32gb")
    assert machine("fp16", gpus_per_node=8, gpu="v100 32gb").peak_flop_s == 125e12
    with pytest.raises(
        ConfigError, match="fp8, which a A10 does not compute in; it may be bf16 or fp16 or fp32"
    ):
        machine("fp8", gpus_per_node=8, gpu="a10")


def test_gpus_that_nothing_is_known_of_are_no_machine() -> None:
    assert machine_of(Cluster(gpus_per_node=8), "bf16", None) is None


@pytest.mark.parametrize(
    ("gpu", "near"),
    [
        ("h201", "did you mean .*H200"),
        (
            "a100 24gb",
            "did you mean one of A100 80GB PCIe, A100 80GB SXM, A100 40GB PCIe, A100 40GB SXM\\.",
        ),
        ("xyz", "known are B300, GB200, B200"),
    ],
)
def test_an_unknown_gpu_is_refused_with_near_names(gpu: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"cluster.gpu: '{gpu}' is not known; {near}") as raised:
        machine(gpus_per_node=8, gpu=gpu)
    assert "qwen3 calibrate" in str(raised.value)


def test_on_one_node_nothing_between_nodes_has_to_be_known() -> None:
    found = machine(**H200)
    for name in ("bytes_s", "latency_s"):
        link = found.rates[f"in_node_{name}"]
        assert found.rates[f"between_{name}"] == dataclasses.replace(
            link, source="there is no such link"
        )


def test_what_stands_for_a_link_that_is_not_there_does_not_pass_for_measured() -> None:
    rates = measured(copy_bytes_s=5e10, in_node_latency_s=1e-5)
    alone = machine("bf16", rates, gpus_per_node=1, gpu="h200").rates
    assert {name for name, rate in alone.items() if rate.source == "measured"} == {
        "copy_bytes_s",
        "in_node_latency_s",
    }


def test_several_nodes_need_the_network() -> None:
    with pytest.raises(
        ConfigError, match="cluster.internode_gbit_s: missing, and cluster.nodes is 2"
    ):
        machine(**H200, nodes=2)
    found = machine(**H200, nodes=2, internode_gbit_s=9)
    assert found.rates["between_bytes_s"] == Rate.around(9e9 / 8, 0.1, "cluster.internode_gbit_s")
    assert found.rates["between_latency_s"].value > found.rates["in_node_latency_s"].value
    assert found.ranks == 16


def test_what_the_user_writes_wins_over_measurements_and_these_over_the_catalogue() -> None:
    rates = measured(
        in_node_bytes_s=355e9, matmul_flop_s=700e12, between_bytes_s=5e9, launch_s=25e-6
    )
    found = machine("bf16", rates, **H200)
    assert {name for name, rate in found.rates.items() if rate.source == "measured"} == set(
        rates.rates
    )
    assert found.rates["matmul_flop_s"] == rates.rates["matmul_flop_s"]
    assert found.rates["attention_flop_s"].source.startswith("catalogue: H200, ")
    given = machine("bf16", rates, **H200, intranode_gbyte_s=300, internode_gbit_s=80)
    assert given.rates["in_node_bytes_s"] == Rate.around(300e9, 0.1, "cluster.intranode_gbyte_s")
    assert given.rates["between_bytes_s"] == Rate.around(10e9, 0.1, "cluster.internode_gbit_s")
    assert given.rates["matmul_flop_s"].source == "measured"


def test_a_measurement_names_the_gpu_and_its_memory() -> None:
    found = machine("bf16", measured(), gpus_per_node=4)
    assert (found.name, found.gpu_memory_bytes, found.peak_flop_s) == (
        "H200",
        150_000_000_000,
        989.4e12,
    )
    assert found.measured == (LAYER,)


@pytest.mark.parametrize("gpu", ["h200", "H200 141GB", "NVIDIA H200"])
def test_a_measurement_of_the_named_gpu_is_taken(gpu: str) -> None:
    assert (
        machine("bf16", measured(launch_s=1e-5), gpus_per_node=2, gpu=gpu).rates["launch_s"].value
        == 1e-5
    )


def test_a_name_without_its_size_means_the_measured_one() -> None:
    found = machine("bf16", measured("NVIDIA A100-SXM4-80GB"), gpus_per_node=8, gpu="a100")
    assert found.name == "A100 80GB SXM"


def test_a_measurement_of_another_gpu_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="cluster.gpu: 'a100 80gb', and .* was measured on 'NVIDIA H200'"
    ):
        machine("bf16", measured(), gpus_per_node=8, gpu="a100 80gb")
    with pytest.raises(ConfigError, match="measured on CPUs, and cluster.gpus_per_node is 8"):
        machine("bf16", measured(None), **H200)
    with pytest.raises(
        ConfigError, match="measured on NVIDIA H200, and cluster.gpus_per_node is 0"
    ):
        machine("bf16", measured(), cpu_ranks=2)


def test_what_was_measured_in_another_precision_is_left_out_where_it_counts() -> None:
    rates = measured(precision="bf16", matmul_flop_s=700e12, in_node_bytes_s=355e9, launch_s=25e-6)
    found = machine("fp32", rates, **H200)
    assert found.rates["matmul_flop_s"].source.startswith("catalogue: H200, ")
    assert found.rates["in_node_bytes_s"].source == found.rates["launch_s"].source == "measured"
    assert found.measured == ()


def test_rates_measured_in_bf16_serve_fp8_and_its_layers_do_not() -> None:
    found = machine("fp8", measured(precision="bf16", matmul_flop_s=700e12), **H200)
    assert found.rates["matmul_flop_s"].value == 700e12
    assert found.measured == ()


def test_a_gpu_outside_the_catalogue_needs_all_its_rates_measured() -> None:
    with pytest.raises(
        ConfigError, match="cluster.measured: lacks matmul_flop_s, .*in_node_bytes_s.* calibrate"
    ):
        machine("bf16", measured("AMD Instinct MI300X", launch_s=1e-5), gpus_per_node=8)
    found = machine(
        "bf16", measured("AMD Instinct MI300X", "bf16", **ALL_RATES), gpus_per_node=8, gpu="mi300x"
    )
    assert (found.name, found.peak_flop_s) == ("AMD Instinct MI300X", None)
    assert find_gpu("mi300x") is None
    assert found.speeds_in(LAYER.document_tokens) == Speeds(**ALL_RATES)


def test_a_gpu_outside_the_catalogue_alone_in_its_node_needs_no_link() -> None:
    """On one rank, calibrate cannot measure collectives."""
    alone = {
        name: value
        for name, value in OF_CALIBRATE.items()
        if not name.startswith(("in_node", "between"))
    }
    found = machine("bf16", measured("AMD Instinct MI300X", "bf16", **alone), gpus_per_node=1)
    assert set(found.rates) == NAMES
    two = {"gpus_per_node": 2}
    with pytest.raises(
        ConfigError,
        match=r"cluster.intranode_gbyte_s: missing, .* or make it again .* on two ranks",
    ):
        machine("bf16", measured("AMD Instinct MI300X", "bf16", **alone), **two)
    given = machine(
        "bf16", measured("AMD Instinct MI300X", "bf16", **alone), **two, intranode_gbyte_s=300
    )
    assert given.speeds().in_node_bytes_s == 300e9


def test_small_kernels_of_a_gpu_outside_the_catalogue_go_by_its_memory() -> None:
    """As those of the catalogue do; nothing measures them."""
    known = machine(**H200).rates
    found = machine(
        "bf16", measured("AMD Instinct MI300X", "bf16", **OF_CALIBRATE), gpus_per_node=2
    ).rates
    on_chip_s = [
        1 / rates["pointwise_bytes_s"].value - 1 / rates["memory_bytes_s"].value
        for rates in (known, found)
    ]
    assert on_chip_s[0] == pytest.approx(on_chip_s[1])
    small = found["pointwise_bytes_s"]
    assert small.value / small.low == pytest.approx(1.3)
    assert small.source == "by memory_bytes_s"


def test_cpus_need_no_name() -> None:
    found = machine("fp32", cpu_ranks=2, cpus_per_rank=4)
    assert (found.name, found.is_gpu, found.ranks, found.gpu_memory_bytes) == (
        "CPU",
        False,
        2,
        None,
    )
    assert found.peak_flop_s is None
    assert set(found.rates) == NAMES
    rate = found.rates["matmul_flop_s"]
    assert (rate.low, rate.value, rate.high) == pytest.approx((160e9 / 3, 160e9, 480e9))
    assert machine("bf16", cpu_ranks=2, cpus_per_rank=4).rates["matmul_flop_s"].low < rate.low


def test_measured_cpus() -> None:
    found = machine("fp32", measured(None, "fp32", matmul_flop_s=50e9), cpu_ranks=2)
    assert found.rates["matmul_flop_s"].source == "measured"
    assert found.measured == (LAYER,)
