"""GPUs by drivers' names, as torch.cuda.get_device_name shows them, and by users' names."""

import pytest

from pipeline_lib.plan.machine import find_gpu, gpu_names, peak_flops

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
    assert 7 * 2**30 < gpu.memory_bytes < 180 * 2**30
    assert 25e12 < gpu.half_flop_s <= 2250e12
    assert 1.7 < gpu.half_flop_s / gpu.fp32_flop_s < 31
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
