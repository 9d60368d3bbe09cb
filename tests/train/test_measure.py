"""What a row holds of speed, and what a person is shown of it."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.train import Train
from pipeline_lib.core.events import EventLog
from pipeline_lib.data import order
from pipeline_lib.data.blocks import BlockReader, documents_of
from pipeline_lib.model.batch import read_batch
from pipeline_lib.train.dist import World
from pipeline_lib.train.gpu_sampler import GpuSampler, Sample, gpu_sampler
from pipeline_lib.train.guards import Judgement, Verdict
from pipeline_lib.train.measure import Meter, instruments
from pipeline_lib.train.metrics import append_metrics, print_progress
from pipeline_lib.train.rank_meter import memory_fields
from pipeline_lib.train.step import StepResult
from tests.train.conftest import Arena

QWEN3_8B = Geometry(151936, 4096, 12288, 36, 32, 8, 128, False, 40960)
WORLD = World(0, 0, 8, torch.device("cpu"))
# 8 GPUs, each with 16,384 tokens in two documents, in 1.835 s, as measured.
RESULT = StepResult(
    loss=1.0,
    grad_norm=1.0,
    judgement=Judgement(Verdict.APPLY),
    supervised_tokens=8 * 16384,
    tokens=8 * 16384,
    squared_lengths=16 * 8192**2,
    duration_s=1.735,
    phases={"forward_s": 0.6, "backward_s": 1.0, "update_s": 0.1},
    stop_agreed=False,
    save_failed=False,
    save_due=False,
)


def test_mfu_is_the_published_one_for_the_published_throughput() -> None:
    fields = Meter(WORLD, QWEN3_8B, Train(), 989e12).fields(RESULT, data_wait_s=0.1)
    assert fields["tokens_per_s"] / 8 == pytest.approx(8929, rel=1e-3)
    assert fields["mfu"] == pytest.approx(0.475, abs=2e-3)
    assert fields["mfu_full_attention"] > fields["mfu"] + 0.05
    assert fields["data_wait_s"] == 0.1
    assert fields["peak_memory_bytes"] > 0


def test_the_head_is_work_only_where_something_is_supervised() -> None:
    meter = Meter(WORLD, QWEN3_8B, Train(), 989e12)
    some = meter.fields(replace(RESULT, supervised_tokens=8 * 4096), data_wait_s=0.1)
    assert some["supervised_tokens_per_s"] == pytest.approx(some["tokens_per_s"] / 4, rel=1e-4)
    assert some["mfu"] < meter.fields(RESULT, data_wait_s=0.1)["mfu"] - 0.02


def test_a_batch_knows_the_squares_of_its_documents_and_counts_no_padding(arena: Arena) -> None:
    reader = BlockReader(arena.store.sealed(arena.shard) / "train")
    blocks = list(range(8))
    lengths = [len(document.tokens) for block in blocks for document in documents_of(reader[block])]
    batch = read_batch(reader, [*blocks, order.PADDING])
    assert batch.squared_lengths == sum(length**2 for length in lengths)
    assert batch.real_tokens == sum(lengths)


def test_without_a_gpu_there_is_no_mfu_and_only_the_memory_of_the_process() -> None:
    assert "mfu" not in Meter.of(WORLD, QWEN3_8B, Train()).fields(RESULT, 0.0)
    assert memory_fields(WORLD).keys() == {"peak_memory_bytes"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_tells_what_is_allocated_what_is_reserved_and_what_is_in_use() -> None:
    device = torch.device("cuda", 0)
    held = torch.zeros(2**28, dtype=torch.uint8, device=device)
    found = memory_fields(World(0, 0, 1, device))
    assert (
        held.nbytes
        <= found["peak_memory_bytes"]
        <= found["reserved_memory_bytes"]
        < found["device_memory_bytes"]
    )


def test_instruments_measure_without_a_gpu_and_leave_no_thread() -> None:
    meter = Meter.of(WORLD, QWEN3_8B, Train(profile_every_steps=1))
    events: list[str] = []
    log = EventLog(None, (lambda name, fields: events.append(name),))
    with instruments(lambda step: [], 3, meter, log) as found:
        batches, wait_s = found.prefetcher.take(0)
        with found.profiler.around(1):
            pass
        assert found.fields(RESULT, wait_s).keys() >= {"tokens_per_s", "data_wait_s"}
        found.profiler._last = {"profile_idle_s": 0.5}  # as a step on a GPU leaves it
        assert found.fields(RESULT, wait_s)["profile_idle_s"] == 0.5
        assert "profile_idle_s" not in found.fields(RESULT, wait_s)
    assert batches == []
    assert events == ["profile.left_out"]


def test_a_row_is_not_glued_to_one_that_a_kill_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_metrics(path)("step.end", {"step": 1})
    with path.open("a") as file:
        file.write('{"st')
    append_metrics(path)("step.end", {"step": 2})
    assert path.read_text() == '{"step": 1}\n{"st\n{"step": 2}\n'


def test_samples_are_averaged_between_two_looks() -> None:
    values = iter(range(10**6))

    def sample() -> Sample:
        return {"gpu_power_w": float(next(values))}

    with GpuSampler(sample, every_s=0.01) as sampler:
        time.sleep(0.2)
        first = sampler.take()["gpu_power_w"]
        time.sleep(0.1)
        second = sampler.take()["gpu_power_w"]
    assert 1 < first < 20
    assert second > first
    assert sampler.take()["gpu_power_w"] >= second  # what is known stays


def test_a_gpu_that_cannot_be_sampled_leaves_its_values_out() -> None:
    def fails() -> Sample:
        raise OSError("the driver went away")

    with GpuSampler(fails, every_s=0.01) as sampler:
        time.sleep(0.05)
        assert sampler.take() == {}
    with gpu_sampler(torch.device("cpu")) as nothing:
        assert nothing.take() == {}


ROW: dict[str, Any] = {
    **{
        "step": 1,
        "loss": 1.23456,
        "lr": 1e-5,
        "grad_norm": None,
        "tokens_per_s": 71432.1,
        "step_s": 2.0,
    },
    **{
        "peak_memory_bytes": 58.2e9,
        "elapsed_s": 4.0,
        "data_wait_s": 0.001,
        "checkpoint_wait_s": 1.5,
    },
}


def lines_of(*events: tuple[str, dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    observe = print_progress(lines.append, last_step=3)
    for name, fields in events:
        observe(name, fields)
    return lines


def test_the_line_of_a_step() -> None:
    gpu = {"mfu": 0.475, "gpu_power_w": 651.3}
    (line,) = lines_of(("step.end", ROW | gpu))
    assert line == (
        "step 1/3  loss 1.2346  lr 1.00e-05  grad not finite  71,432 tokens/s  MFU 47.5%  54.2 "
        "GiB  651 W  checkpoint wait 1.50 s  ETA 0:08"
    )
    assert "MFU" not in lines_of(("step.end", ROW))[0]


def test_the_time_left_counts_what_is_between_steps() -> None:
    lines = lines_of(
        ("step.end", ROW),
        ("step.end", ROW | {"step": 2, "elapsed_s": 14.0}),
        ("step.end", ROW | {"step": 3}),
    )
    assert len(lines) == 2  # the first, and the last
    assert lines[-1].endswith("ETA 0:00")


def test_what_is_special_is_said_at_once() -> None:
    profile = {
        **{
            "step": 2,
            "step_s": 1.5,
            "compute_fraction": 0.8,
            "exposed_communication_fraction": 0.1,
        },
        **{"exposed_copy_fraction": 0.02, "idle_fraction": 0.08},
    }
    lines = lines_of(
        ("step.end", ROW | {"validation_loss": 2.5}),
        ("step.skipped", {"step": 2, "reason": "loss nan"}),
        ("run.rolled_back", {"step": 3, "to_step": 1}),
        ("step.profiled", profile),
    )
    assert lines[0] == "step 1: held-out loss 2.5000"
    assert lines[2:] == [
        "step 2: not applied: loss nan",
        "step 3: back to what was learned by step 1",
        "step 2: 1.500 s profiled: 80.0% computing, 10.0% exchanging, 2.0% copying, 8.0% idle",
    ]
