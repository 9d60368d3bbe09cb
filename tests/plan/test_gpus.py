"""GPUs by drivers' names, as torch.cuda.get_device_name shows them, and by users' names."""

import pytest
from pydantic import ValidationError

from pipeline_lib.config.schema import Cluster
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.plan.cluster import machine_of
from pipeline_lib.plan.gpus import find_gpu, gpu_names, near_names, peak_flops

HALF = {
    "NVIDIA H200": 989.4e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H20": 148e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA L40S": 362.05e12,
    "NVIDIA GeForce RTX 3090": 71.2e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA B200": 2250e12,
}

# By driver, and as users write them.
NAMES = {
    "h200": "H200",
    "H200 SXM5 141GB": "H200",
    "NVIDIA H100 80GB HBM3": "H100 SXM",
    "h100": "H100 SXM",
    "H100-80G": "H100 SXM",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA GH200 144G HBM3e": "GH200 144GB",
    "NVIDIA H20-3e": "H20-3e",
    "NVIDIA A100-SXM4-80GB": "A100 80GB SXM",
    "NVIDIA A100-PCIE-40GB": "A100 40GB PCIe",
    "a100 80gb": "A100 80GB SXM",
    "a100 80 GB": "A100 80GB SXM",
    "A100-SXM4-80": "A100 80GB SXM",
    "a100 pcie 40": "A100 40GB PCIe",
    "H100 NVL 94GB": "H100 NVL",
    "a100": "A100 40GB SXM",
    "NVIDIA A800-SXM4-80GB": "A800 80GB SXM",
    "a10": "A10",
    "rtx 4090": "RTX 4090",
    "rtx4090": "RTX 4090",
    "4090 24GB": "RTX 4090",
    "NVIDIA GeForce RTX 4090 D": "RTX 4090 D",
    "4090D": "RTX 4090 D",
    "rtx 3090ti": "RTX 3090 Ti",
    "NVIDIA RTX A6000": "RTX A6000",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000",
    "NVIDIA B300 SXM6 AC": "B300",
    "NVIDIA GB200": "GB200",
    "rtx 3080": "RTX 3080",
    "4070ti": "RTX 4070 Ti",
    "Tesla V100-SXM2-32GB": "V100 32GB SXM",
    "Tesla V100-PCIE-32GB": "V100 32GB PCIe",
}

# Bytes that torch counts, as its messages of running out of memory say it.
TOTAL_GIB = {
    "NVIDIA H200": 139.81,
    "NVIDIA H100 80GB HBM3": 79.11,
    "NVIDIA H100 NVL": 93.00,
    "NVIDIA A100-SXM4-80GB": 79.25,
    "NVIDIA A100-SXM4-40GB": 39.50,
    "NVIDIA L40S": 44.42,
    "NVIDIA GeForce RTX 4090": 23.52,
}


@pytest.mark.parametrize("name", HALF)
def test_each_name_finds_its_own_gpu(name: str) -> None:
    assert peak_flops(name, "bf16") == peak_flops(name, "fp16") == HALF[name]
    assert 15e12 < (peak_flops(name, "fp32") or 0) < 100e12


@pytest.mark.parametrize(
    "name",
    ["AMD Instinct MI300X", "", "NVIDIA H2000"]
    + ["NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU"],
)
def test_an_unknown_gpu_and_a_part_of_a_known_one_have_no_peak(name: str) -> None:
    assert peak_flops(name, "bf16") is None
    assert find_gpu(name) is None


@pytest.mark.parametrize("name", NAMES)
def test_users_and_drivers_mean_the_same(name: str) -> None:
    found = find_gpu(name)
    assert found is not None
    assert found.name == NAMES[name]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("A6000 Ada", "RTX A6000, RTX 6000 Ada"),
        ("4090, 3090", "RTX 4090"),
        ("5090 D", "RTX 5090"),
        ("L40S x8", "L40S"),
        ("3080 Ti", "RTX 3080"),
        ("h200 pcie", "H200"),
        ("RTX PRO 6000 Blackwell Max-Q", "RTX PRO 6000"),
    ],
)
def test_a_name_that_is_not_exactly_one_card_is_refused_with_the_nearest(
    name: str, near: str
) -> None:
    """Each was planned in silence as the card that some of its words name."""
    assert find_gpu(name) is None
    assert near in near_names(name)
    with pytest.raises(ConfigError, match="is not known; did you mean"):
        machine_of(Cluster(gpus_per_node=1, gpu=name), "bf16", None)


def test_a_gpu_is_described_by_hand() -> None:
    sheet = {"name": "B40", "memory_gb": 48, "bf16_tflops": 200, "memory_gb_s": 900}
    given = Cluster.model_validate({"gpus_per_node": 2, "gpu": {**sheet, "link_gb_s": 25}})
    machine = machine_of(given, "bf16", None)
    assert machine is not None
    assert (machine.name, machine.gpu_memory_bytes) == ("B40", 48 * 10**9)
    assert machine.peak_flop_s == 200e12
    assert machine.rates["in_node_bytes_s"].value == 25e9
    assert machine.rates["memory_bytes_s"].value < 900e9
    assert machine.rates["matmul_flop_s"].source == "catalogue: B40, guessed from its data sheet"
    assert given.gpu_name == "B40"
    with pytest.raises(ValidationError, match="memory_gb"):
        Cluster.model_validate({"gpus_per_node": 1, "gpu": {"name": "B40"}})


@pytest.mark.parametrize(("gpus", "assumed_gb"), [(1, 64), (2, 64), (4, 128), (8, 256)])
def test_the_assumed_memory_of_a_node_of_consumer_cards_grows_with_them(
    gpus: int, assumed_gb: int
) -> None:
    machine = machine_of(Cluster(gpus_per_node=gpus, gpu="4090"), "bf16", None)
    assert machine is not None
    assert machine.host_limit_bytes == assumed_gb * 10**9


@pytest.mark.parametrize(
    "name", ["h200 80gb", "a100 24gb", "4090 48gb", "h100 40gb", "v100 80gb", "H100 96GB"]
)
def test_a_size_that_a_gpu_does_not_come_in_is_refused(name: str) -> None:
    assert find_gpu(name) is None
    assert peak_flops(name, "fp16") is not None, "its cores are known all the same"


@pytest.mark.parametrize("name", gpu_names())
def test_every_name_of_the_catalogue_finds_itself_with_figures_of_the_size_that_gpus_have(
    name: str,
) -> None:
    """What a slip in a unit or a column would leave."""
    gpu = find_gpu(name)
    assert gpu is not None
    assert gpu.name == name
    assert gpu.source
    assert 7 * 2**30 < gpu.memory_bytes < 270 * 2**30
    assert 25e12 < gpu.half_flop_s <= 2500e12
    assert 1.7 < gpu.half_flop_s / gpu.fp32_flop_s < 32
    assert 300e9 <= gpu.memory_bytes_per_s <= 8000e9
    assert 4e9 < gpu.link.bytes_per_s < gpu.memory_bytes_per_s
    assert 1 < gpu.link.factor <= 3


@pytest.mark.parametrize("name", TOTAL_GIB)
def test_memory_is_what_torch_sees(name: str) -> None:
    """Never more, so that no plan is too large, and less by half a percent at most."""
    gpu = find_gpu(name)
    assert gpu is not None
    assert 0.995 * TOTAL_GIB[name] <= gpu.memory_bytes / 2**30 <= TOTAL_GIB[name]


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("h200", 359e9),
        ("a100", 234.9e9),
        ("b200", 741e9),
        ("h800", 160e9),
        ("a10", 4.3e9),
        ("a100 pcie", 20e9),
    ],
)
def test_links_are_as_others_measured_them(name: str, measured: float) -> None:
    gpu = find_gpu(name)
    assert gpu is not None
    assert gpu.link.bytes_per_s == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("name", ["V100", "T4"])
def test_what_has_no_bf16_has_no_peak_in_it(name: str) -> None:
    gpu = find_gpu(name)
    assert gpu is not None
    assert not gpu.computes_in("bf16")
    assert gpu.peak_flop_s("bf16") is None
    assert peak_flops(name, "bf16") is None
    assert peak_flops(name, "fp16") == gpu.half_flop_s
    assert peak_flops(name, "fp32") == gpu.fp32_flop_s


def test_products_in_fp8_begin_with_ada_and_mfu_is_over_the_peak_of_bf16() -> None:
    without = {"V100 16GB SXM", "T4", "A100 80GB SXM", "A30", "A10", "RTX 3090"}
    having = {"L4", "L40S", "RTX 4090", "H20", "H100 SXM", "H200", "B200", "RTX 5090"}
    found = {name: find_gpu(name) for name in without | having}
    assert {name for name, gpu in found.items() if gpu and gpu.computes_in("fp8")} == having
    assert {
        name for name, gpu in found.items() if gpu and gpu.peak_flop_s("fp8") is None
    } == without
    assert peak_flops("h200", "fp8") == peak_flops("h200", "bf16")


@pytest.mark.parametrize(
    ("name", "mebibytes"), [("b300", 275_040), ("gb200", 189_471), ("b200", 183_359)]
)
def test_torch_has_a_little_less_of_a_blackwell_board_than_nvidia_smi_shows(
    name: str, mebibytes: int
) -> None:
    gpu = find_gpu(name)
    assert gpu is not None
    assert 0.99 < gpu.memory_bytes / (mebibytes * 2**20) < 1


def test_a_b300_is_found_by_its_nominal_size() -> None:
    assert find_gpu("B300 288GB") == find_gpu("b300")
