"""Writing safetensors files by tensor, several files at a time, hashed while being written.

Each thread makes one tensor at a time in memory that it uses again, so that no file has to fit in
memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from threading import Event

import torch
from torch import Tensor

from pipeline_lib.arch.weight_files import INDEX_NAME
from pipeline_lib.core.errors import TrainingError
from pipeline_lib.core.files import write_hashed, write_json
from pipeline_lib.plan.stages import MERGED_AT_ONCE
from pipeline_lib.train.shard_files import bytes_of, header_of
from pipeline_lib.train.state import is_finite

_METADATA = {"format": "pt"}  # required by transformers


@dataclass(frozen=True)
class Entry:
    """The name, shape and dtype of a tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """The size of the tensor's data in bytes."""
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Buffers:
    """A thread's memory for one tensor's values at a time, in each dtype; the next reuses it."""

    _held: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor without values, valid until the next one of its dtype is asked for."""
        size = prod(shape)
        if dtype not in self._held or len(self._held[dtype]) < size:
            self._held.pop(dtype, None)  # free it before the next one is made
            self._held[dtype] = torch.empty(size, dtype=dtype)
        return self._held[dtype][:size].view(shape)

    def rounded(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Return `values` in `dtype`: themselves if it is theirs."""
        return values if values.dtype == dtype else self.empty(values.shape, dtype).copy_(values)


# what an entry is to hold, on the CPU; may be called in any thread
Value = Callable[[Entry, Buffers], Tensor]


class _Stopped(Exception):
    """Another file could not be written."""


def write_files(
    folder: Path, files: Mapping[str, Sequence[Entry]], value_of: Value
) -> dict[str, str]:
    """Write safetensors files to `folder`, with their entries in order; return each one's SHA-256.

    The hashes are keyed by file name. `value_of` is called just before a value is written. If a
    file fails, the others stop after the tensor that they are at, and the error is raised; of
    several, that of the first file by name. Raises ValueError if a value does not have the shape
    and dtype of its entry.
    """
    cpus = torch.get_num_threads()
    failed = Event()

    def content(entries: Sequence[Entry]) -> Iterator[bytes | memoryview]:
        layout = ((entry.name, entry.dtype, entry.shape) for entry in entries)
        yield header_of(layout, _METADATA, separators=(", ", ": "))
        buffers = Buffers()
        for entry in entries:
            if failed.is_set():
                raise _Stopped
            value = value_of(entry, buffers)
            if (tuple(value.shape), value.dtype) != (entry.shape, entry.dtype):
                raise ValueError(
                    f"{entry.name}: {value.dtype} {list(value.shape)} is not what was announced: "
                    f"{entry}"
                )
            yield bytes_of(value)

    def write(name: str) -> str:
        is_written = False
        try:
            sha256 = write_hashed(folder / name, content(files[name]))
            is_written = True
        finally:
            if not is_written:
                failed.set()
        return sha256

    at_once = max(1, min(len(files), cpus, MERGED_AT_ONCE))
    largest_first = sorted(files, key=lambda name: -sum(entry.size_bytes for entry in files[name]))
    set_threads = partial(torch.set_num_threads, max(1, cpus // at_once))
    with ThreadPoolExecutor(at_once, "files", initializer=set_threads) as pool:
        flights = {name: pool.submit(write, name) for name in largest_first}
        try:
            wait(flights.values())
        finally:
            failed.set()  # also if this thread is interrupted
    torch.set_num_threads(cpus)  # later threads begin with what was set last
    errors = [flights[name].exception() for name in sorted(files)]
    for error in errors:
        if error is not None and not isinstance(error, _Stopped):
            raise error
    return {name: flight.result() for name, flight in flights.items()}


def finite(value: Tensor, entry: Entry) -> Tensor:
    """Return `value`. Raises TrainingError if not all of it is finite."""
    if not is_finite(value):
        raise TrainingError(f"merged weight {entry.name} is not finite; this model is not exported")
    return value


def write_index(out: Path, files: Mapping[str, Sequence[Entry]], size_bytes: int) -> None:
    """Write which of several `files` holds which tensor."""
    file_of = {}
    for file_name, entries in files.items():
        for entry in entries:
            file_of[entry.name] = file_name
    index = {"metadata": {"total_size": size_bytes}, "weight_map": dict(sorted(file_of.items()))}
    write_json(out / INDEX_NAME, index)
