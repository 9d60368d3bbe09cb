"""Writing safetensors files one tensor at a time, so that no file has to fit in memory."""

import json
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

KINDS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NAMES = {dtype: kind for kind, dtype in KINDS.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor to write, before it exists."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Of its elements."""
        return prod(self.shape) * self.dtype.itemsize


def write_tensors(path: Path, entries: Sequence[Entry], value_of: Callable[[Entry], Tensor]) -> None:
    """Write `entries` to a safetensors file at `path`, in their order; each value is asked for when it is its turn.

    Values are on the CPU, and have the shape and dtype of their entry: ValueError otherwise.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}  # transformers wants it
    end = 0
    for entry in entries:
        begin, end = end, end + entry.size_bytes
        header[entry.name] = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begins on a multiple of 8
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for entry in entries:
            value = value_of(entry)
            if (tuple(value.shape), value.dtype) != (entry.shape, entry.dtype):
                raise ValueError(f"{entry.name}: {value.dtype} {list(value.shape)} is not what was announced: {entry}")
            file.write(value.contiguous().flatten().view(torch.uint8).numpy().data)
            del value  # before the next one is made
