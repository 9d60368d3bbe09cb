"""Copies of the training state in host memory.

On GPUs they use page-locked buffers, which every save reuses. New memory for every save would be
faulted in page by page while training waits: seconds for a few GB. The buffers are allocated once,
in the background, and are filled at the speed of the bus.
"""

import mmap
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline_lib.core.memory import host_free_bytes
from pipeline_lib.model.offload import page_lock, page_unlock
from pipeline_lib.train.dist import World
from pipeline_lib.train.state import own_part

Named = Iterable[tuple[str, Tensor]]
Copy = Callable[[Named], dict[str, Tensor]]

PIECE_BYTES = 256 << 20  # locked at a time: the device, and so the training, may wait for each lock
UNEVEN = 1.02  # about the largest ratio of a rank's share of the state to the mean
_ALIGNMENT_BYTES = 64


def new_copies(tensors: Named) -> dict[str, Tensor]:
    """Return copies in new host memory."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors}


@dataclass
class _Slab:
    """A region of host memory with its first `used` bytes taken, and its page-locked pieces."""

    memory: Tensor  # [bytes]
    locked: list[Tensor]
    used: int = 0

    def copy(self, tensor: Tensor) -> Tensor | None:
        """Start to copy `tensor` piece by piece: a copy may not span two separately locked pieces.

        The copy is complete once the device's stream has reached this point. Return None if there
        is no room for it.
        """
        start = -(-self.used // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if start + tensor.nbytes > len(self.memory):
            return None
        self.used = start + tensor.nbytes
        source = tensor.contiguous().flatten().view(torch.uint8)
        target = self.memory[start : start + len(source)]
        done = 0
        while done < len(source):
            stop = min(len(source), done + PIECE_BYTES - (start + done) % PIECE_BYTES)
            target[done:stop].copy_(source[done:stop], non_blocking=True)
            done = stop
        return target.view(tensor.dtype).view(tensor.shape)


class HostBuffers:
    """Host memory for the copies of one save, which those of the next save overwrite.

    If the host has no room for the buffers, copies go to new memory, and `trouble` says why.
    """

    def __init__(
        self,
        world: World,
        lock: Callable[[Tensor], None] = page_lock,
        unlock: Callable[[Tensor], None] = page_unlock,
        free_bytes: Callable[[], int] | None = None,
    ) -> None:
        """Set up for one of the `world.local_size` ranks that share the host.

        Nothing is allocated yet.
        """
        self.trouble = ""
        self._world = world
        self._lock, self._unlock = lock, unlock
        self._free_bytes = free_bytes or host_free_bytes
        self._slabs: list[_Slab] = []
        # A driver error persists in the thread in which it happened; this thread launches no
        # kernels.
        self._pool = ThreadPoolExecutor(1, "host-buffers")
        self._growth: Future[None] | None = None
        self._is_closing = False

    def expect(self, size_bytes: int) -> None:
        """Start to allocate about `size_bytes` in the background."""
        self._growth = self._pool.submit(self._grow, max(PIECE_BYTES, round(UNEVEN * size_bytes)))

    def copies(self, tensors: Named) -> dict[str, Tensor]:
        """Return copies of `tensors`, each made when it is yielded.

        The copies of the call before are overwritten.
        """
        self._await_growth()
        for slab in self._slabs:
            slab.used = 0
        found = {name: self._copy(tensor) for name, tensor in tensors}
        if self._world.device.type == "cuda":
            torch.cuda.current_stream(self._world.device).synchronize()
        return found

    def stop_growing(self) -> None:
        """Stop allocating: Python waits for all threads at a process's end, even on failure."""
        self._is_closing = True

    def close(self) -> None:
        """Free the memory, once nothing reads the last copies.

        An allocation in progress ends at its next piece.
        """
        self.stop_growing()
        self._await_growth()
        self._pool.shutdown()
        for piece in (piece for slab in self._slabs for piece in slab.locked):
            self._unlock(piece)
        self._slabs = []

    def _copy(self, tensor: Tensor) -> Tensor:
        local = own_part(tensor).detach()
        copied = self._copy_to_slab(local)
        if copied is None and not self.trouble:  # else growing has failed before
            self.expect(local.nbytes)
            self._await_growth()
            copied = self._copy_to_slab(local)
        if copied is None:
            return tensor.to("cpu", copy=True)
        # `from_local` would move it to the device of the mesh.
        if isinstance(tensor, DTensor):
            return DTensor(copied, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
        return copied

    def _copy_to_slab(self, tensor: Tensor) -> Tensor | None:
        for slab in self._slabs:
            if (copied := slab.copy(tensor)) is not None:
                return copied
        return None

    def _await_growth(self) -> None:
        if self._growth is not None:
            growth = self._growth
            self._growth = None
            growth.result()

    def _grow(self, size_bytes: int) -> None:
        """Add a slab, unless all the host's slabs would take more than half its free memory.

        The slabs of all ranks of the host count.
        """
        needed_bytes = size_bytes * self._world.local_size
        free_bytes = self._free_bytes()
        if 2 * needed_bytes > free_bytes:
            self.trouble = self.trouble or (
                f"buffers of {needed_bytes / 1e9:.1f} GB for the ranks of this host, which has "
                f"{free_bytes / 1e9:.1f} "
                "GB free, would leave too little: each save copies to new memory"
            )
            return
        if self._world.device.type == "cuda":
            # otherwise the thread would initialize the first GPU
            torch.cuda.set_device(self._world.device)
        try:
            self._slabs.append(self._locked_slab(size_bytes))
        except OSError as error:  # such as a limit on the address space
            self.trouble = f"no memory for buffers ({error}): each save copies to new memory"

    def _locked_slab(self, size_bytes: int) -> _Slab:
        """Allocate a slab and touch its pages now, not while training waits.

        Unlockable pieces are used as they are.
        """
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (
            "MADV_HUGEPAGE",
            "MADV_DONTFORK",
        ):  # a fork could separate our pages from the GPU's
            with suppress(AttributeError, OSError):  # a system or a kernel without it
                pages.madvise(getattr(mmap, advice))
        slab = _Slab(torch.frombuffer(pages, dtype=torch.uint8), [])
        for piece in torch.split(slab.memory, PIECE_BYTES):
            if self._is_closing:  # a failing rank must not wait for tens of GB
                break
            piece.zero_()
            if self.trouble:
                continue
            try:
                self._lock(piece)
                slab.locked.append(piece)
            except RuntimeError as error:
                self.trouble = f"host memory cannot be page-locked ({error}): copies take longer"
        return slab
