"""What is measured of real GPUs: kernels, power, predicted memory; measuring changes nothing."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline_lib.arch.families import read_geometry
from pipeline_lib.core.events import read_events
from pipeline_lib.core.units import gib
from pipeline_lib.model.gpu import has_triton
from pipeline_lib.plan.gpus import peak_flops
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.memory import predict
from pipeline_lib.train.rank import RankJob
from tests.gpu.wide import WIDE_BLOCK_TOKENS, wide_arena
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import losses, rows, train

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA GPU"),
]
# of the predicted peak; the reserve is not in it, nor half a GiB of ddp with small batches
TOLERANCE = 0.2


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Arena:
    return wide_arena(tmp_path_factory.mktemp("wide"))


def job_of(arena: Arena, out: Path, ranks: int, **settings: Any) -> RankJob:
    common = {
        "precision": "bf16",
        "global_batch_tokens": 16 * WIDE_BLOCK_TOKENS,
        "until_step": 1,
        "timeout_s": 120,
    }
    return arena.job(ranks, out, device="cuda", **{**common, **settings})


def test_profiled_steps_tell_what_the_gpu_did_and_change_no_result(
    arena: Arena, tmp_path: Path
) -> None:
    ranks = min(2, GPUS)
    settings: dict[str, Any] = {
        "device": "cuda",
        "strategy": "fsdp",
        "precision": "bf16",
        "deterministic": True,
    }
    plain = arena.job(ranks, tmp_path / "plain", replica="plain", **settings)
    profiled = arena.job(
        ranks, tmp_path / "profiled", replica="profiled", profile_every_steps=2, **settings
    )
    for job in (plain, profiled):
        run_ranks(train, ranks, job)
    assert losses(profiled.out) == losses(plain.out)
    events = [
        event
        for event in read_events(profiled.run_dir / "events.jsonl")
        if event["event"] == "step.profiled"
    ]
    assert [event["step"] for event in events] == [2, 4, 6]
    for event in events:
        assert "problem" not in event, event
        shares = [
            event[f"{name}_fraction"]
            for name in ("compute", "exposed_communication", "exposed_copy", "idle")
        ]
        assert sum(shares) == pytest.approx(1.0, abs=1e-3)
        assert min(shares) >= 0
        assert event["compute_s"] > 0
        assert rows(profiled.out)[event["step"] - 1]["profile_compute_s"] == event["compute_s"]
        assert ranks == 1 or event["exposed_communication_s"] + event["hidden_communication_s"] > 0
    print(events[-1])


def test_rows_hold_speed_and_what_the_driver_sees(arena: Arena, tmp_path: Path) -> None:
    job = arena.job(1, tmp_path / "out", device="cuda", precision="bf16")
    run_ranks(train, 1, job)
    last = rows(job.out)[-1]
    print(last)
    assert last["tokens_per_s"] > last["supervised_tokens_per_s"] > 0
    assert 0 <= last["data_wait_s"] < 1
    if peak_flops(torch.cuda.get_device_name(), "bf16") is not None:
        assert 0 <= last["mfu"] <= last["mfu_full_attention"] < 1
    if importlib.util.find_spec("pynvml") is not None:
        assert 0 <= last["gpu_utilization"] <= 1
        assert 1 < last["gpu_power_w"] < 2000
        assert 1 < last["gpu_temperature_c"] < 120
        assert last["gpu_memory_used_bytes"] > 0


@pytest.mark.skipif(GPUS < 2, reason="needs two CUDA GPUs")
def test_rows_hold_the_utilization_and_memory_of_every_gpu(arena: Arena, tmp_path: Path) -> None:
    job = arena.job(2, tmp_path / "out", device="cuda", precision="bf16", epochs=4)
    run_ranks(train, 2, job)
    found = {row["step"]: row for row in rows(job.out) if "peak_memory_bytes_of_ranks" in row}
    print(found[24])
    assert list(found) == [10, 20, 24]
    for row in found.values():
        assert [value > 0 for value in row["peak_memory_bytes_of_ranks"]] == [True, True]
        if importlib.util.find_spec("pynvml") is not None:
            assert [0 <= value <= 1 for value in row["gpu_utilization_of_ranks"]] == [True, True]


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "ddp"},
        {"strategy": "ddp", "micro_batch_blocks": 4},
        {"strategy": "ddp", "precision": "fp32"},
        {"strategy": "ddp", "recompute": "selective", "micro_batch_blocks": 4},
        {"strategy": "ddp", "recompute": "full", "micro_batch_blocks": 4},
        {"strategy": "ddp", "method": "lora", "micro_batch_blocks": 4},
        {"strategy": "fsdp", "micro_batch_blocks": 4},
        {"strategy": "fsdp", "recompute": "full", "micro_batch_blocks": 4},
        {"strategy": "fsdp", "method": "lora", "micro_batch_blocks": 4},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_the_peak_is_as_predicted(
    wide: Arena, tmp_path: Path, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    ranks, case = min(2, GPUS), request.node.callspec.id
    job = job_of(wide, tmp_path / "out", ranks, replica=case, **settings)
    run_ranks(train, ranks, job, timeout_s=300)
    shutil.rmtree(job.run_dir)  # a checkpoint of a gigabyte
    measured = rows(job.out)[-1]["peak_memory_bytes"]
    geometry = read_geometry(job.input("model"))
    accumulation = 16 // ranks // job.train.micro_batch_blocks
    predicted = predict(
        geometry,
        job.train,
        Ranks(ranks, ranks, has_triton(torch.device("cuda", 0))),
        WIDE_BLOCK_TOKENS,
        accumulation,
    )
    print(f"{case}: measured {gib(measured)}, predicted {predicted}")
    assert measured == pytest.approx(predicted.allocated_bytes, rel=TOLERANCE)
