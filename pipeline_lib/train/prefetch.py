"""The next step's batches are read while the current step computes."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch

from pipeline_lib.train.batch import Batch

Read = Callable[[int], list[Batch]]


class Prefetcher:
    """Gives the batches that `read` gives, one step ahead, and measures the wait for them.

    They are the same whatever is asked for in whatever order: a step that was not expected is read at once. For a
    GPU they lie in pinned memory, so that copies to it wait for nothing. An error of `read` is raised by `take`.
    """

    def __init__(self, read: Read, last_step: int, device: torch.device) -> None:
        """Read steps up to `last_step`, not included, for `device`."""
        self._read, self._last_step, self._device = read, last_step, device
        self._pool = ThreadPoolExecutor(1, "prefetch", initializer=_use, initargs=(device,))
        self._expected = -1
        self._coming: Future[list[Batch]] | None = None

    def __enter__(self) -> "Prefetcher":
        """The thread starts with the first step that is asked for."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the thread; a read that goes on is waited for."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def take(self, step: int) -> tuple[list[Batch], float]:
        """The micro-batches of global step `step`, from 0, and the seconds that were waited for them."""
        start_s = time.monotonic()
        if self._coming is None or self._expected != step:
            self._ask_for(step)
        batches = self._coming.result() if self._coming is not None else []
        if step + 1 < self._last_step:
            self._ask_for(step + 1)
        else:
            self._coming = None
        return batches, time.monotonic() - start_s

    def _ask_for(self, step: int) -> None:
        self._expected, self._coming = step, self._pool.submit(self._read_pinned, step)

    def _read_pinned(self, step: int) -> list[Batch]:
        batches = self._read(step)
        return [batch.pinned() for batch in batches] if self._device.type == "cuda" else batches


def _use(device: torch.device) -> None:
    """Pinned memory belongs to the GPU that a thread uses: GPU 0, if it is not told another."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
