"""The doctor on real GPUs. Skipped where there are none; run on the GPU machine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU"),
]


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    written = tmp_path_factory.mktemp("doctor") / "doctor.json"
    done = subprocess.run(
        [sys.executable, "-m", "pipeline_lib", "doctor", "--json", str(written)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PIPELINE_STORE": str(written.parent / "store")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout
    assert "Traceback" not in done.stdout
    return dict(json.loads(written.read_text())["facts"])


def test_the_gpus_are_described(facts: dict[str, Any]) -> None:
    assert facts["torch"]["cuda_works"]
    assert facts["torch"]["gpus"] == GPUS
    assert facts["torch"]["nccl"]
    assert facts["GPUs"]["0"]["memory_bytes"] > 1 << 30
    assert facts["GPUs"]["driver"]


def test_each_gpu_is_measured_at_work(facts: dict[str, Any]) -> None:
    at_work = facts["exchange"]["gpus_at_work"]
    assert len(at_work) == GPUS
    assert all(gpu["bf16_flops"] > 1e12 for gpu in at_work.values())
    assert at_work["0"]["sm_clock_mhz"] > 0


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")
def test_the_gpus_exchange_data_and_nccl_says_how(facts: dict[str, Any]) -> None:
    exchange = facts["exchange"]
    assert exchange["all_reduce.268435456"] > 1e9
    assert exchange["all_gather.268435456"] > 1e9
    assert exchange["transports"], "NCCL's log was not understood"
    assert set(facts["links"]) >= {"0-1"}
