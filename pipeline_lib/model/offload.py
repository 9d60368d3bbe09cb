"""What checkpointed layers keep, in page-locked host memory until the backward pass needs it.

Copies run on a stream of their own. In the forward pass a tensor leaves while the next layer
computes; the device's memory is free once the copy is complete, two layers later at the latest. In
the backward pass, the tensors of a layer come while the layer after it computes. Host memory is
allocated in the first step, and used again by all later ones.
"""

import weakref
from collections import defaultdict
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from pipeline_lib.arch.layers import LAYERS_ON_DEVICE

_PORTABLE = 1  # cudaHostRegisterPortable
_LEAST_BYTES = 1 << 20  # smaller tensors stay on the device


def page_lock(memory: Tensor) -> None:
    """Page-lock host `memory`, so that the GPU can write to it directly.

    Raises RuntimeError if the system refuses.
    """
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if code := int(driver.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)):
        raise RuntimeError(f"cudaHostRegister: error {code}")


def page_unlock(memory: Tensor) -> None:
    """Undo `page_lock`."""
    _unlock(memory.data_ptr())


def _unlock(address: int) -> None:
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    driver.cudaHostUnregister(address)


class HostMemory:
    """The host memory of one model's activations, and the stream of the copies.

    On CPUs, copies are made at once.
    """

    def __init__(self, least_bytes: int = _LEAST_BYTES) -> None:
        """Allocate nothing yet. Tensors of less than `least_bytes` are not copied."""
        self.least_bytes = least_bytes
        self.allocated_bytes = 0
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # by size in bytes
        self._recent: list[weakref.ref[LayerCall]] = []
        self._stream: Any = None

    def call(self) -> "LayerCall":
        """Return a record for a layer's next call; what earlier calls kept leaves the device."""
        for reference in self._recent[: 1 - LAYERS_ON_DEVICE]:
            if (earlier := reference()) is not None:
                earlier.let_go()
        before = self._recent[-1] if self._recent else None
        new = LayerCall(self, before)
        self._recent = [*self._recent[1 - LAYERS_ON_DEVICE :], weakref.ref(new)]
        return new

    def stream(self, device: torch.device) -> Any:
        """Return the stream of the copies; None on CPUs."""
        if device.type == "cuda" and self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._stream

    def take(self, tensor: Tensor) -> Tensor:
        """Return memory for a copy of `tensor`: page-locked for a GPU, if the system allows it."""
        if free := self._free[tensor.nbytes]:
            return free.pop()
        memory = torch.empty(tensor.nbytes, dtype=torch.uint8)
        self.allocated_bytes += tensor.nbytes
        if tensor.is_cuda:
            with suppress(RuntimeError):  # copies then take longer
                page_lock(memory)
                weakref.finalize(memory, _unlock, memory.data_ptr())
        return memory

    def give_back(self, memory: Tensor) -> None:
        """Take `memory` back.

        Copies from it may still run: the next copy into it is on the same stream.
        """
        self._free[memory.nbytes].append(memory)


class LayerCall:
    """What one call of a layer keeps, owned by the graph of that call.

    `before` is the call before it. `keep` and `get` are the hooks of
    `torch.autograd.graph.saved_tensors_hooks`.
    """

    def __init__(self, host: HostMemory, before: "weakref.ref[LayerCall] | None") -> None:
        """Keep nothing yet."""
        self._host, self._before = host, before
        self._away: list[_Away] = []

    def keep(self, tensor: Tensor) -> "Tensor | _Away":
        """Start to copy `tensor` to the host; return what `get` takes.

        Small tensors and parameters are not copied.
        """
        is_small = tensor.nbytes < self._host.least_bytes
        if is_small or isinstance(tensor, nn.Parameter) or not tensor.is_contiguous():
            return tensor
        away = _Away(tensor.detach(), self._host)
        self._away.append(away)
        return away

    def get(self, kept: "Tensor | _Away") -> Tensor:
        """Return a tensor on its device again, and start to bring those of the call before."""
        if isinstance(kept, Tensor):
            return kept
        self._bring()
        if self._before is not None and (before := self._before()) is not None:
            before._bring()
        return kept.arrived()

    def let_go(self) -> None:
        """Free the device's memory once the copies are complete; the device waits, not the host."""
        for away in self._away:
            away.let_go()

    def _bring(self) -> None:
        for away in self._away:
            away.bring()


class _Away:
    """A tensor with a copy on the host."""

    def __init__(self, value: Tensor, host: HostMemory) -> None:
        """Start the copy of `value`, which is contiguous."""
        self._host = host
        self._value: Tensor | None = value  # None while it is on the host alone
        self._shape = value.shape
        self._dtype = value.dtype
        self._device = value.device
        self._memory: Tensor | None = host.take(value)  # None once it is on its way back
        self._event: Any = None  # of the last copy
        self._copy(self._on_host(self._memory), value)

    def __del__(self) -> None:
        """Give the host memory back, also of a graph that is dropped without a backward pass."""
        if self._memory is not None:
            self._host.give_back(self._memory)

    def _on_host(self, memory: Tensor) -> Tensor:
        return memory.view(self._dtype).view(self._shape)

    def _copy(self, to: Tensor, source: Tensor) -> None:
        """Copy after all the device's work so far: that makes `source` or still uses `to`."""
        stream = self._host.stream(self._device)
        if stream is None:
            to.copy_(source)
            return
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            self._event = stream.record_event()

    def let_go(self) -> None:
        """Free the device's memory for what it computes after the copy."""
        if self._memory is not None:
            self._wait()
            self._value = None

    def bring(self) -> None:
        """Start the copy back, unless the tensor is still there or coming."""
        if self._value is None and self._memory is not None:
            # Allocated on the stream that computes, on which it is freed later.
            self._value = torch.empty(self._shape, dtype=self._dtype, device=self._device)
            self._copy(self._value, self._on_host(self._memory))
            self._host.give_back(self._memory)
            self._memory = None

    def arrived(self) -> Tensor:
        """Return the tensor, for use by the device's current stream, after `bring`."""
        if self._value is None:
            raise RuntimeError("the tensor is not on its device")
        if self._memory is None:  # else it has never left
            self._wait()
        return self._value

    def _wait(self) -> None:
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
