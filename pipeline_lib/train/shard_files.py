"""Writes a rank's part of a checkpoint as safetensors files, several at a time, hashing them.

Names, tensors and metadata are those of torch's own writer (DCP's Hugging Face storage). That one
makes two more copies of everything in memory while it holds the GIL, leaves the hashing to a second
pass over the files, and lets the ranks unpickle what others send.
"""

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from pipeline_lib.core.files import fsync_path, write_hashed
from pipeline_lib.core.store import FileEntry
from pipeline_lib.model.weights import KINDS
from pipeline_lib.train.keepers import balanced

FILES_AT_ONCE = 4  # per rank: one thread writes and hashes about 1 GB/s
LEAST_FILE_BYTES = 256 * 10**6  # less is not worth a file of its own
_NAMES_OF_DTYPES = {dtype: name for name, dtype in KINDS.items()}


@dataclass(frozen=True)
class Chunk:
    """What one rank writes of a tensor: a part that begins at `offsets`, one per dimension."""

    data: Tensor
    offsets: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> "Chunk":
        """Return this rank's part of a DTensor, or the whole of any other tensor."""
        if not isinstance(tensor, DTensor):
            return Chunk(tensor.detach(), (0,) * tensor.dim())
        _, offsets = compute_local_shape_and_global_offset(
            tensor.shape, tensor.device_mesh, tensor.placements
        )
        return Chunk(tensor.to_local().detach(), tuple(offsets))


def holds_a_part(tensor: Tensor) -> bool:
    """Return whether this rank has any of `tensor` to write: few rows leave some without."""
    return not isinstance(tensor, DTensor) or tensor.to_local().numel() > 0


def split(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Divide `tensors` into files of about the same size; no files if there are no tensors."""
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    count = min(FILES_AT_ONCE, max(1, sum(sizes.values()) // LEAST_FILE_BYTES), len(tensors))
    numbers = balanced(sizes, count)
    return [
        {name: tensors[name] for name in numbers if numbers[name] == number}
        for number in range(count)
    ]


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileEntry:
    """Write the safetensors file `path` and fsync it; return its size and hash.

    Tensors are in the library's order.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))

    def content() -> Iterator[bytes | memoryview]:
        yield header_of(
            ((name, tensors[name].dtype, tensors[name].shape) for name in names), metadata
        )
        for name in names:
            yield bytes_of(tensors[name])

    sha256 = write_hashed(path, content())
    fsync_path(path)
    return FileEntry(bytes=path.stat().st_size, sha256=sha256)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the values of `tensor`, on the CPU, as in a safetensors file, without a copy."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def header_of(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str],
    separators: tuple[str, str] = (",", ":"),
) -> bytes:
    """Return what precedes the data of `tensors` in a safetensors file: length and header."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        begin = end
        end = end + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": _NAMES_OF_DTYPES[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=separators, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data begins on a multiple of 8
    return struct.pack("<Q", len(text)) + text
