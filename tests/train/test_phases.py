"""The phases of a step, in a run of real ranks and by a clock of their own."""

import time
from pathlib import Path

import pytest
import torch

from pipeline_lib.config.train import CHOSEN_KEYS
from pipeline_lib.core.run_record import RunRecord
from pipeline_lib.records.plan import PlanDocument
from pipeline_lib.records.training import Step, read_training
from pipeline_lib.report.plan_check import FIGURES, comparison
from pipeline_lib.train.step import PHASES, PhaseClock
from tests.complete import record
from tests.ranks import run_ranks
from tests.report.fake_plans import plan
from tests.train.conftest import Arena
from tests.train.helpers import rows, train

FIELDS = [f"{name}_s" for name in PHASES]


def test_a_phase_is_as_long_as_it_took_and_adds_up_over_micro_batches() -> None:
    clock = PhaseClock(torch.device("cpu"))
    for _ in range(2):
        with clock.phase("forward"):
            time.sleep(0.03)
        with clock.phase("backward"):
            time.sleep(0.08)
    found = clock.take()
    assert list(found) == FIELDS
    assert 0.06 <= found["forward_s"] < found["backward_s"]
    assert found["backward_s"] >= 0.16
    assert found["update_s"] == 0.0
    assert clock.take() == dict.fromkeys(FIELDS, 0.0)  # what was taken does not come again


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_is_the_device_that_is_timed() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(8192, 8192, device=device)
    _ = matrix @ matrix
    torch.cuda.synchronize()
    clock = PhaseClock(device)
    with clock.phase("forward"):
        start_s = time.perf_counter()
        for _ in range(20):
            _ = matrix @ matrix
        launched_s = time.perf_counter() - start_s
    assert clock.take()["forward_s"] > 2 * launched_s


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_phases_of_a_real_step_fill_it(arena: Arena, tmp_path: Path, strategy: str) -> None:
    job = arena.job(2, tmp_path / "out", strategy=strategy, micro_batch_blocks=2)
    run_ranks(train, 2, job)
    found = rows(job.out)
    assert all(row[name] > 0 for row in found for name in FIELDS)
    # Also in the first: the warm-up leaves nothing in it.
    assert all(sum(row[name] for name in FIELDS) <= row["step_s"] + 1e-5 for row in found)
    late = found[2:]
    share = sum(row[name] for row in late for name in FIELDS) / sum(row["step_s"] for row in late)
    assert share > 0.5  # the rest is counting tokens together, and moving batches


def test_a_run_records_what_each_figure_of_a_plan_is_held_against(
    arena: Arena, tmp_path: Path
) -> None:
    job = arena.job(2, tmp_path / "out", strategy="ddp", save_every_steps=3)
    run_ranks(train, 2, job)
    placed = {key: getattr(job.train, key) for key in ("strategy", *CHOSEN_KEYS)}
    predicted = {**plan(6)["prediction"], "mfu": None, "gpu_hours": None, "changes": placed}
    found = comparison(
        record(PlanDocument, {**plan(steps=6), "prediction": predicted}),
        read_training(job.out),
        [record(Step, row) for row in rows(job.out)],
        RunRecord.read(job.run_dir / "events.jsonl"),
    )
    measured = {one.key: one.measured for one in found}
    left_to_gpus = {"mfu", "peak_memory_bytes", "needed_memory_bytes", "network_bytes", "gpu_hours"}
    assert measured.keys() == FIGURES.keys() - left_to_gpus
    assert all(value > 0 for value in measured.values())
    assert measured["run_s"] == rows(job.out)[-1]["elapsed_s"]
