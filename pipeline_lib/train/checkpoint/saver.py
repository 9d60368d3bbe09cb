"""Writes checkpoints beside the training, one at a time.

The loop waits for copies in host memory, and for the checkpoint before if it is still being written: with buffers the
copies of both lie in the same memory. A failure of the thread is raised by the next `wait`, on every rank alike; the
ranks agree on when that is (`has_failed`).
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipeline_lib.base.events import EventLog
from pipeline_lib.base.lock import Lock
from pipeline_lib.base.run_folder import retain
from pipeline_lib.base.spec import Spec
from pipeline_lib.config.schema import Train
from pipeline_lib.train.checkpoint.agree import together
from pipeline_lib.train.checkpoint.publish import Snapshot, publish_checkpoint
from pipeline_lib.train.checkpoint.staging import HostBuffers, Named, new_copies
from pipeline_lib.train.dist import PATIENT, World
from pipeline_lib.train.state import STATE_KINDS

_FP32_BYTES = 4


@dataclass
class Saver:
    """Publishes snapshots of the run `spec` in `folder`, while `lock` is held. All ranks make and call it alike.

    `buffers` are where the copies go, else to new memory each time; `trained_parameters` are those of all ranks, from
    which it knows about how much that will be.
    """

    folder: Path
    world: World
    train: Train
    spec: Spec
    events: EventLog
    lock: Lock
    trained_parameters: int = 0
    buffers: HostBuffers | None = None
    _flight: Future[dict[str, Any]] | None = field(default=None, init=False)
    _has_told: bool = field(default=False, init=False)
    _trouble_told: str = field(default="", init=False)

    def __enter__(self) -> "Saver":
        """Make the thread, and a process group for it: its exchanges never meet those of the training.

        Its ranks wait for each other's disks, so that they wait as long as those that start.
        """
        timeout = timedelta(seconds=self.train.start_timeout_s)
        self.group = dist.new_group(backend="gloo", timeout=timeout, group_desc=PATIENT)
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the checkpoint that is being written become whole, also when the run fails; its own failure is second.

        Of a failed run it is not waited for longer than for a peer: the one that is lost may be missing in it too.
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

    def copies(self, tensors: Named) -> dict[str, Tensor]:
        """Copies of `tensors` in host memory, for the next `save`. Follows `wait`: they may overwrite the last ones."""
        if self._flight is not None:
            raise ValueError("the checkpoint before is still being written, from the same memory")
        if self.buffers is None:
            return new_copies(tensors)
        found = self.buffers.copies(tensors)
        if self.buffers.trouble != self._trouble_told:
            self._trouble_told = self.buffers.trouble
            self.events.emit("checkpoint.slow_copies", reason=self._trouble_told)
        return found

    @property
    def has_failed(self) -> bool:
        """Whether what is being written has failed on this rank; another may learn of it a little later."""
        return self._flight is not None and self._flight.done() and self._flight.exception() is not None

    def save(self, snapshot: Snapshot, best_step: int, waited_s: float, before_step: int = 0) -> None:
        """Begin to write `snapshot`; `waited_s` is what the loop has waited for it. Follows `wait`.

        The checkpoint of `best_step` is kept, if it is not 0, and the newest from before `before_step`. Unless
        `save_async`, this one is whole on return.
        """
        self._flight = self._pool.submit(self._publish, snapshot, best_step, waited_s, before_step)
        if not self.train.save_async:
            self.wait()

    def wait(self) -> None:
        """Until the checkpoint that is being written is whole.

        Raises DiskFull, SaveFailed or LockLost, on all ranks alike.
        """
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self.events.emit("checkpoint.saved", **flight.result())

    def tell(self) -> None:
        """Emit the event of a checkpoint that has become whole meanwhile; events are never emitted by the thread.

        Called between steps. After the first, when the training has the memory that it needs, buffers are made.
        """
        if self.buffers is not None and self.trained_parameters and not self._has_told:
            self.buffers.expect(_FP32_BYTES * len(STATE_KINDS) * self.trained_parameters // self.world.size)
        self._has_told = True
        if self._flight is not None and self._flight.done() and not self.has_failed:
            self.wait()

    def _publish(self, snapshot: Snapshot, best_step: int, waited_s: float, before_step: int) -> dict[str, Any]:
        start_s = time.monotonic()
        size_bytes = publish_checkpoint(self.folder, self.world, self.spec, snapshot, self.lock, self.group)
        together(self.group, self.folder, partial(self._retain, snapshot.step, best_step, before_step))
        duration_s = round(time.monotonic() - start_s, 3)
        return {"step": snapshot.step, "bytes": size_bytes, "duration_s": duration_s, "wait_s": round(waited_s, 3)}

    def _retain(self, step: int, best_step: int, before_step: int) -> None:
        """Delete what need not be kept, on the first rank. Raises LockLost if it is the next owner's."""
        if self.world.is_first:
            self.lock.require()
            retain(self.folder, self.train.keep_last, step, best_step, before_step)
