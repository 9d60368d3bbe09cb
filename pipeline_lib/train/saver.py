"""Saves checkpoints in the background, one at a time.

The loop waits for the copies in host memory, and for the previous checkpoint if it is still being
written: with buffers, the copies of both use the same memory. A failure of the thread is raised by
the next `wait`, on every rank alike; the ranks agree on when that is (`has_failed`).
"""

import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipeline_lib.arch.geometry import FP32_BYTES
from pipeline_lib.config.train import Train
from pipeline_lib.core.events import EventLog, EventName
from pipeline_lib.core.lock import Lock
from pipeline_lib.core.run_folder import retain
from pipeline_lib.core.store import Spec
from pipeline_lib.plan.memory import COPIED_AT_ONCE_BYTES
from pipeline_lib.plan.saving import auto_apart_s
from pipeline_lib.train.checkpoint import StateSnapshot, publish_checkpoint
from pipeline_lib.train.dist import PATIENT, World
from pipeline_lib.train.keepers import grouped
from pipeline_lib.train.staging import HostBuffers, Named, new_copies
from pipeline_lib.train.strategy import Strategy
from pipeline_lib.train.together import together


@dataclass
class Saver:
    """A publisher of snapshots of the run `spec` in `folder`, under `lock`.

    All ranks create and call it alike. The copies go to `buffers`, or else to new memory each time;
    `state_elements`, of all tensors of a checkpoint, give the approximate size of the buffers.
    """

    folder: Path
    world: World
    train: Train
    spec: Spec
    events: EventLog
    lock: Lock
    state_elements: int = 0
    buffers: HostBuffers | None = None
    _flight: Future[dict[str, Any]] | None = field(default=None, init=False)
    _reported_trouble: str = field(default="", init=False)
    # when the last save, or the training, began
    _counted_from_s: float | None = field(default=None, init=False)
    _took_s: float = field(default=0.0, init=False)  # the last save

    def __enter__(self) -> "Saver":
        """Create the thread and its process group, which keeps its exchanges from the training's.

        Its ranks wait for each other's disks, so the group has the timeout of the start.
        """
        timeout = timedelta(seconds=self.train.start_timeout_s)
        self.group = dist.new_group(backend="gloo", timeout=timeout, group_desc=PATIENT)
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the checkpoint in progress finish, even if the run fails; then do not raise its own.

        A failed run waits for it only as long as for a peer: the lost peer may be missing in the
        save too.
        """
        if kind is not None and self.buffers is not None:
            self.buffers.stop_growing()
        if self._flight is not None:
            wait([self._flight], None if kind is None else self.train.timeout_s)
        self._pool.shutdown(wait=self._flight is None or self._flight.done())
        if kind is None:
            self.wait()
            if self.buffers is not None:
                self.buffers.close()

    def parts(
        self, strategy: Strategy, kinds: Collection[str] | None = None
    ) -> Iterable[Mapping[str, Tensor]]:
        """Return copies of what this rank writes of `strategy`'s state: of all of it, made now.

        With `save_async: false` they are made part by part, each in the memory of the one before.
        Making one is a collective, like writing it.
        """
        sizes = strategy.state_sizes(kinds)
        if self.train.save_async:
            return [strategy.snapshot(sizes, self.copies)]
        at_once = COPIED_AT_ONCE_BYTES * self.world.size // FP32_BYTES
        return (strategy.snapshot(names, self.copies) for names in grouped(sizes, at_once))

    def copies(self, tensors: Named) -> dict[str, Tensor]:
        """Return copies of `tensors` in host memory for the next `save`.

        They may overwrite the copies of the last one. Raises ValueError if the last one is still
        being written; call `wait` first.
        """
        if self._flight is not None:
            raise ValueError("the checkpoint before is still being written, from the same memory")
        if self.buffers is None:
            return new_copies(tensors)
        copies = self.buffers.copies(tensors)
        if self.buffers.trouble != self._reported_trouble:
            self._reported_trouble = self.buffers.trouble
            self.events.emit(EventName.CHECKPOINT_SLOW_COPIES, reason=self._reported_trouble)
        return copies

    @property
    def has_failed(self) -> bool:
        """Return whether the current save has failed on this rank; others may learn later."""
        return (
            self._flight is not None
            and self._flight.done()
            and self._flight.exception() is not None
        )

    def save(
        self, snapshot: StateSnapshot, best_step: int, waited_s: float, trusted_step: int = 0
    ) -> None:
        """Start to write `snapshot`; call `wait` first.

        `waited_s` is how long the loop has waited for it. The checkpoints of `best_step` and
        `trusted_step` are kept unless these are 0. With `save_async: false`, this one is complete
        on return.
        """
        self._counted_from_s = time.monotonic()
        if self.train.save_async:
            self._flight = self._pool.submit(
                self._publish, snapshot, best_step, waited_s, trusted_step
            )
        else:  # its parts are made by collectives of the training, whose thread is this one
            saved = self._publish(snapshot, best_step, waited_s, trusted_step)
            saved["wait_s"] += saved["duration_s"]
            self._emit_saved(saved)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete, and emit its event.

        Raises DiskFull, SaveFailed or LockLost, on all ranks alike.
        """
        if self._flight is not None:
            flight = self._flight
            self._flight = None
            self._emit_saved(flight.result())

    def _emit_saved(self, saved: dict[str, Any]) -> None:
        self._took_s = saved["duration_s"]
        self.events.emit(EventName.CHECKPOINT_SAVED, **saved)

    @property
    def is_due(self) -> bool:
        """Return whether `save_every_steps: auto` asks for a checkpoint by this rank's clock."""
        if self._flight is not None or self._counted_from_s is None:
            return False
        return time.monotonic() - self._counted_from_s >= auto_apart_s(self.train, self._took_s)

    def emit_completed(self) -> None:
        """Emit the event of a checkpoint completed meanwhile; the thread never emits events.

        Call it between steps. The first call, when the training has its memory, also starts to
        allocate the buffers.
        """
        if self._counted_from_s is None:  # the training begins
            self._counted_from_s = time.monotonic()
            self._expect_copies()
        if self._flight is not None and self._flight.done() and not self.has_failed:
            self.wait()

    def _expect_copies(self) -> None:
        if self.buffers is None or not self.state_elements:
            return
        size_bytes = FP32_BYTES * self.state_elements // self.world.size
        self.buffers.expect(
            size_bytes if self.train.save_async else min(size_bytes, COPIED_AT_ONCE_BYTES)
        )

    def _publish(
        self, snapshot: StateSnapshot, best_step: int, waited_s: float, trusted_step: int
    ) -> dict[str, Any]:
        def kept_with(step: int) -> set[int]:
            """Return the steps to go back to if a run continues from `step` or goes on."""
            return {self.train.guards.step_before(step + 1), trusted_step}

        def delete_others() -> None:
            if self.world.is_first:
                self.lock.require()
                retain(self.folder, self.train.keep_last, snapshot.step, best_step, kept_with)

        start_s = time.monotonic()
        size_bytes = publish_checkpoint(
            self.folder, self.world, self.spec, snapshot, self.lock, self.group
        )
        together(self.group, self.folder, delete_others)
        duration_s = round(time.monotonic() - start_s, 3)
        return {
            "step": snapshot.step,
            "bytes": size_bytes,
            "duration_s": duration_s,
            "wait_s": round(waited_s, 3),
        }
