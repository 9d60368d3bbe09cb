"""Rows hold what every rank uses, and gathering it changes no bit of the training."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from pipeline_lib.core.rank_use import RankUse
from pipeline_lib.train import measure
from pipeline_lib.train.gpu_sampler import GpuSampler, Sample
from pipeline_lib.train.rank import RankJob, train_rank
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import Killed, assert_same_result, rows, train

UTILIZATION, MEMORY = "gpu_utilization_of_ranks", "peak_memory_bytes_of_ranks"


def train_with_gpus(
    environ: Mapping[str, str], job: RankJob, used: list[float | None], killed_at: int | None = None
) -> None:
    """Train while the driver tells of this rank's GPU what `used` says; in a process of its own."""
    value = used[int(environ["RANK"])]

    def sampler(_: torch.device) -> GpuSampler:
        def sample() -> Sample:
            return {} if value is None else {"gpu_utilization": value, "gpu_power_w": 100.0}

        return GpuSampler(None if value is None else sample, every_s=0.001)

    def observe(name: str, fields: dict[str, Any]) -> None:
        if name == "step.begin" and fields["step"] == killed_at:
            raise Killed

    vars(measure)["gpu_sampler"] = sampler
    with suppress(Killed):
        train_rank(job, environ, lambda _: None, (observe,))


def readings(out: Path) -> dict[int, list[float]]:
    return {row["step"]: row[UTILIZATION] for row in rows(out) if UTILIZATION in row}


def test_each_tenth_row_and_the_last_have_every_rank_and_the_result_is_the_same(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path
) -> None:
    used = [0.97, 0.61, 0.9, 1.0]
    job = arena.job(4, tmp_path / "out", strategy="ddp", epochs=4)
    run_ranks(train_with_gpus, 4, job, used)
    assert readings(job.out) == {10: used, 20: used, 24: used}
    assert_same_result(job.out, whole(4, strategy="ddp", epochs=4))
    [memory, *_] = [row[MEMORY] for row in rows(job.out) if MEMORY in row]
    assert [value > 10**7 for value in memory] == [True] * 4
    # measured after the step
    assert rows(job.out)[-1]["peak_memory_bytes"] >= rows(job.out)[-1][MEMORY][0]
    assert [row["gpu_utilization"] for row in rows(job.out)[9:]] == [
        0.97
    ] * 15  # of the first rank, as ever
    warned = RankUse.of(rows(job.out)).warnings()
    assert "61% on rank 1, 100% on rank 3" in warned["uneven GPU utilization"]


def test_without_gpus_only_the_memory_is_told_and_nothing_warned(
    arena: Arena, tmp_path: Path
) -> None:
    job = arena.job(2, tmp_path / "out", epochs=4)
    run_ranks(train, 2, job)
    assert readings(job.out) == {}
    assert [row["step"] for row in rows(job.out) if MEMORY in row] == [10, 20, 24]
    assert len(RankUse.of(rows(job.out)).peak_memory_bytes) == 2
    assert RankUse.of(rows(job.out)).warnings() == {}


def test_a_gpu_that_tells_nothing_leaves_the_utilization_of_all_unknown(
    arena: Arena, tmp_path: Path
) -> None:
    job = arena.job(2, tmp_path / "out")
    run_ranks(train_with_gpus, 2, job, [0.9, None])
    assert readings(job.out) == {}
    assert len(rows(job.out)[-1][MEMORY]) == 2


def test_a_killed_run_goes_on_with_the_same_bits_and_readings_at_the_same_steps(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"strategy": "fsdp", "epochs": 4, "save_every_steps": 3}
    run_ranks(train_with_gpus, 2, arena.job(2, tmp_path / "killed", **settings), [0.5, 0.6], 14)
    job = arena.job(2, tmp_path / "resumed", **settings)
    run_ranks(train_with_gpus, 2, job, [0.7, 0.8])
    assert readings(job.out) == {10: [0.5, 0.6], 20: [0.7, 0.8], 24: [0.7, 0.8]}
    assert_same_result(job.out, whole(2, strategy="fsdp", epochs=4))
