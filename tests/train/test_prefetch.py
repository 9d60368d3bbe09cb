"""Batches read ahead: the same ones, in any order of asking, and no error is lost."""

import threading
import time
from typing import Any

import pytest
import torch

from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.data.blocks import BlockReader
from pipeline_lib.model.batch import Batch, BatchShare
from pipeline_lib.model.prefetch import Prefetcher
from pipeline_lib.train.loop import Batches
from tests.train.conftest import Arena

CPU = torch.device("cpu")


def batches_of(arena: Arena) -> Batches:
    reader = BlockReader(arena.store.sealed(arena.shard) / "train")
    return Batches(reader, 0, 8, 2, BatchShare(0, 2))


def equal(one: list[Batch], other: list[Batch]) -> bool:
    return all(
        torch.equal(a, b) if torch.is_tensor(a) else a == b
        for left, right in zip(one, other, strict=True)
        for a, b in zip(vars(left).values(), vars(right).values(), strict=True)
    )


def test_they_are_the_batches_of_the_step_whatever_was_expected(arena: Arena) -> None:
    batches = batches_of(arena)
    with Prefetcher(batches.of_step, 6, CPU) as prefetcher:
        for step in (0, 1, 2, 1, 1, 5, 0, 3):
            found, _ = prefetcher.take(step)
            assert equal(found, batches.of_step(step))


def test_the_next_one_is_read_while_this_one_computes() -> None:
    read: list[int] = []

    def slow(step: int) -> list[Any]:
        time.sleep(0.2)
        read.append(step)
        return []

    with Prefetcher(slow, 3, CPU) as prefetcher:
        _, first_s = prefetcher.take(0)
        time.sleep(0.4)  # the step
        assert read == [0, 1]
        _, second_s = prefetcher.take(1)
        _, third_s = prefetcher.take(2)  # no time for it
    assert first_s >= 0.2
    assert second_s < 0.1
    assert third_s > 0.1
    assert read == [0, 1, 2]  # and none behind the last step


def test_an_error_of_reading_is_raised_where_the_batch_is_wanted() -> None:
    def damaged(step: int) -> list[Any]:
        if step == 1:
            raise IntegrityError("shard-00000.safetensors: cut off")
        return []

    with Prefetcher(damaged, 3, CPU) as prefetcher:
        prefetcher.take(0)
        with pytest.raises(IntegrityError, match="cut off"):
            prefetcher.take(1)


def test_the_thread_ends_with_the_run() -> None:
    with pytest.raises(KeyError), Prefetcher(lambda step: [], 100, CPU) as prefetcher:
        prefetcher.take(0)
        assert "prefetch_0" in {thread.name for thread in threading.enumerate()}
        raise KeyError
    assert "prefetch_0" not in {thread.name for thread in threading.enumerate()}
