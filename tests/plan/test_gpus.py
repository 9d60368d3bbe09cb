"""Peaks by the names that drivers give, as torch.cuda.get_device_name shows them."""

import pytest

from pipeline_lib.plan.gpus import peak_flops

HALF = {
    "NVIDIA H200": 989.4e12,
    "NVIDIA H200 NVL": 835.5e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756.5e12,
    "NVIDIA H20": 148e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA A800-SXM4-80GB": 312e12,
    "NVIDIA A10": 125e12,
    "NVIDIA A10G": 70e12,
    "NVIDIA L40S": 362.05e12,
    "NVIDIA L40": 181.05e12,
    "NVIDIA GeForce RTX 3090": 71.2e12,
    "NVIDIA GeForce RTX 4090": 165.2e12,
    "NVIDIA B200": 2250e12,
}


@pytest.mark.parametrize("name", HALF)
def test_each_name_finds_its_own_gpu(name: str) -> None:
    assert peak_flops(name, "bf16") == peak_flops(name, "fp16") == HALF[name]
    assert 15e12 < (peak_flops(name, "fp32") or 0) < 100e12


@pytest.mark.parametrize("name", ["NVIDIA A1000 Laptop GPU", "AMD Instinct MI300X", "", "NVIDIA H2000"])
def test_an_unknown_gpu_has_no_peak(name: str) -> None:
    assert peak_flops(name, "bf16") is None
