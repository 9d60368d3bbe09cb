"""The end of a run with a full GPU: torch's words, and their use; on one: tests/gpu/test_oom.py."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeline_lib.arch.geometry import Geometry
from pipeline_lib.config.train import Train
from pipeline_lib.core.errors import TrainingError
from pipeline_lib.core.units import gib
from pipeline_lib.plan.machine import Ranks
from pipeline_lib.plan.memory import predict
from pipeline_lib.train import out_of_memory
from pipeline_lib.train.dist import World
from pipeline_lib.train.out_of_memory import MemoryWatch, Shortage, is_out_of_memory
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import train_and_run_out

GIB = 2**30
QWEN3_8B = Geometry(151936, 4096, 12288, 36, 32, 8, 128, False, 40960)
# As torch 2.9 to 2.13 put it (c10/cuda/CUDACachingAllocator.cpp).
PLAIN = (
    "CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 139.81 GiB of "
    "which 1.06 GiB is "
    "free. Process 4242 has 130.00 MiB memory in use. Including non-PyTorch memory, this process "
    "has 138.62 GiB memory "
    "in use. Of the allocated memory 134.50 GiB is allocated by PyTorch, and 2.51 GiB is reserved "
    "by PyTorch but "
    "unallocated. If reserved but unallocated memory is large try setting "
    "PYTORCH_ALLOC_CONF=expandable_segments:True "
    "to avoid fragmentation.  See documentation for Memory Management  "
    "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf)"
)
LIMITED = (
    "CUDA out of memory. Tried to allocate 512.00 MiB. GPU 3 has a total capacity of 79.25 GiB of "
    "which 70.00 GiB is free. Including non-PyTorch memory, this process has 8.20 GiB memory in "
    "use. 7.92 GiB allowed; Of the allocated memory 7.60 GiB is allocated by PyTorch, and 120.00 "
    "MiB is reserved by PyTorch but unallocated."
)
SHARED = PLAIN.replace(
    "Process 4242 has 130.00 MiB", "Process 17 has 40.00 GiB memory in use. Process 18 has 1.00 GiB"
)
BLOCKS = 256  # of a step: several micro-batches for every rank
NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error ... Cuda failure 2 'out of "
    "memory'"
)


@pytest.fixture(autouse=True)
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same predictions on every machine."""
    monkeypatch.setattr(out_of_memory, "has_triton", lambda _: False)


def watch_of(train: Train | None = None, ranks: int = 8) -> MemoryWatch:
    world = World(0, 0, ranks, torch.device("cuda", 0), ranks)
    return MemoryWatch(
        world, QWEN3_8B, train or Train(strategy="fsdp", micro_batch_blocks=4), 8192, BLOCKS
    )


def test_what_torch_says_is_read() -> None:
    shortage = Shortage.read(PLAIN)
    assert shortage.wanted_bytes == round(2.32 * GIB)
    assert shortage.capacity_bytes == round(139.81 * GIB)
    assert shortage.used_bytes == round(138.62 * GIB)
    assert shortage.others_bytes == 130 * 2**20
    assert Shortage.read(LIMITED).capacity_bytes == round(7.92 * GIB)  # a limit of the process
    assert Shortage.read(SHARED).others_bytes == 41 * GIB  # of all other processes on the GPU


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(PLAIN), RuntimeError(NCCL)])
def test_it_is_known_by_type_or_text(error: RuntimeError) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("Connection closed by peer"))


def explained(watch: MemoryWatch, error: RuntimeError) -> str:
    with pytest.raises(TrainingError) as raised, watch.explained():
        raise error
    return str(raised.value)


def test_the_message_says_what_was_done_predicted_and_would_fit() -> None:
    watch = watch_of()
    watch("run.start", {})
    first, predicted, advice, *offers = explained(watch, torch.OutOfMemoryError(PLAIN)).splitlines()
    assert first == (
        "GPU memory is full in the warm-up before the first step: 2.3 GiB more were wanted with "
        "138.6 GiB of 139.8 GiB in use"
    )
    assert "predicted were 268." in predicted
    assert "activations 238" in predicted
    assert advice.strip() == "what would fit, the cheapest first:"
    assert len(offers) == 3
    assert offers[0].strip().startswith("- train.micro_batch_blocks: 1  (8")
    assert any("train.activation_checkpointing: full" in offer for offer in offers)


def test_what_is_predicted_is_what_the_plan_predicts_for_the_micro_batches_of_a_step() -> None:
    """Gradients exist in the forward pass from the second micro-batch on."""
    watch = watch_of(Train(strategy="fsdp", recompute="full"))
    ranks = Ranks(8, 8, has_triton=False)
    for blocks, accumulation in ((8, 1), (16, 2)):
        needed = predict(QWEN3_8B, watch.train, ranks, 8192, accumulation).total_bytes
        said = explained(replace(watch, batch_blocks=blocks), torch.OutOfMemoryError(PLAIN))
        assert f"predicted were {gib(needed)}, at most " in said


@pytest.mark.parametrize(
    ("event", "fields", "doing"),
    [
        ("none", {}, "while the model was loaded"),
        ("run.start", {}, "in the warm-up before the first step"),
        ("step.begin", {"step": 7}, "in step 7"),
        ("step.end", {"step": 7}, "after step 7, when it was saved or validated"),
    ],
)
def test_it_knows_what_was_being_done(event: str, fields: dict[str, int], doing: str) -> None:
    watch = watch_of()
    watch(event, fields)
    assert f"GPU memory is full {doing}" in explained(watch, torch.OutOfMemoryError(PLAIN))


def test_another_process_on_the_gpu_is_named_and_its_memory_not_promised() -> None:
    train = Train(strategy="fsdp", micro_batch_blocks=8)
    alone, shared = (
        explained(watch_of(train), torch.OutOfMemoryError(text)) for text in (PLAIN, SHARED)
    )
    promised = [
        [float(size) for size in re.findall(r"\(([0-9.]+) GiB a GPU", said)]
        for said in (alone, shared)
    ]
    assert "and 41.0 GiB by other processes on this GPU" in shared
    assert "by other processes" not in alone
    assert len(promised[0]) == len(promised[1]) == 3
    assert max(promised[1]) <= (139.81 - 41) * 0.94


@pytest.mark.parametrize("is_here", [True, False])
def test_deepspeed_is_offered_where_it_is_installed(
    is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out_of_memory, "find_spec", lambda name: object() if is_here else None)
    watch = watch_of(Train(strategy="ddp", recompute="full"), ranks=1)  # it takes offloading
    said = explained(watch, torch.OutOfMemoryError(PLAIN.replace("139.81", "70.00")))
    assert ("train.strategy: zero" in said) == is_here


def test_if_nothing_fits_it_says_so() -> None:
    said = explained(watch_of(Train(), ranks=1), torch.OutOfMemoryError(LIMITED))
    assert "no change is predicted to fit; the least memory is needed by" in said
    assert "it takes more or larger GPUs" in said


def test_a_text_without_numbers_is_told_as_it_is() -> None:
    assert explained(watch_of(), RuntimeError(NCCL)).startswith(
        "memory is full while the model was loaded (NCCL error"
    )


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="closed by peer"), watch_of().explained():
        raise RuntimeError("Connection closed by peer")


def test_on_a_cpu_nothing_is_announced() -> None:
    said: list[str] = []
    MemoryWatch(World(0, 0, 1, torch.device("cpu")), QWEN3_8B, Train(), 8192, BLOCKS).announce(
        said.append
    )
    assert said == []


def test_a_rank_that_runs_out_ends_with_the_message(arena: Arena, tmp_path: Path) -> None:
    said = run_ranks(train_and_run_out, 1, arena.job(1, tmp_path / "out"), "step.end", 2, PLAIN)[0]
    assert said.startswith(
        "GPU memory is full after step 2, when it was saved or validated: 2.3 GiB more were "
        "wanted with 138.6 GiB of 139.8 GiB in use"
    )
