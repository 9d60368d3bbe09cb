"""Prefetching: the next step's batches are read while the current step computes."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial

import torch

from pipeline_lib.model.batch import Batch

Read = Callable[[int], list[Batch]]


class Prefetcher(AbstractContextManager["Prefetcher"]):
    """A reader that calls `read` one step ahead in a thread and measures the time spent waiting.

    Steps may be taken in any order: a step that was not prefetched is read at once. For a GPU the
    batches are in pinned memory, so that copies are asynchronous. `take` raises the errors of
    `read`.
    """

    def __init__(self, read: Read, last_step: int, device: torch.device) -> None:
        """Prefetch steps below `last_step` for `device`; the thread starts at the first `take`."""
        self._read = read
        self._last_step = last_step
        self._is_pinned = device.type == "cuda"
        # Pinned memory belongs to the GPU that its thread has selected, by default GPU 0.
        select = partial(torch.cuda.set_device, device) if self._is_pinned else None
        self._pool = ThreadPoolExecutor(1, "prefetch", initializer=select)
        self._coming: dict[int, Future[list[Batch]]] = {}

    def __exit__(self, *error: object) -> None:
        """Stop the thread after the read in progress."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self, step: int) -> tuple[list[Batch], float]:
        """Return the micro-batches of global step `step`, from 0, and the seconds of waiting."""
        start_s = time.monotonic()
        if step not in self._coming:
            self._coming = {step: self._pool.submit(self._read_step, step)}
        batches = self._coming[step].result()
        following = step + 1
        self._coming = {}
        if following < self._last_step:
            self._coming[following] = self._pool.submit(self._read_step, following)
        return batches, time.monotonic() - start_s

    def _read_step(self, step: int) -> list[Batch]:
        batches = self._read(step)
        return [batch.pinned() for batch in batches] if self._is_pinned else batches
