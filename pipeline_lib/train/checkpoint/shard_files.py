"""A rank's part of a checkpoint as safetensors files: hashed while they are written, several at a time.

The names, the tensors and the metadata are those of torch's own writer, which makes two more copies of everything in
memory, holding the interpreter, and leaves the hashing to a second pass over the files.
"""

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from pipeline_lib.base.manifest import FileEntry

FILES_AT_ONCE = 4  # of a rank: one thread writes and hashes about 1 GB/s
LEAST_FILE_BYTES = 256 * 10**6  # less is not worth a file of its own
_CHUNK_BYTES = 16 << 20
_KINDS = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}


class ShardWriter(HuggingFaceStorageWriter):
    """Writes this rank's part of what torch's distributed checkpointing saves; `written` says what, by file name."""

    def __init__(self, folder: Path) -> None:
        """Write to `folder`."""
        super().__init__(path=str(folder), save_distributed=True)
        self.written: dict[str, FileEntry] = {}
        self._folder = folder

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the tensors of `plan`."""
        tensors: dict[str, Tensor] = {}
        offsets: dict[str, list[int]] = {}
        for item in plan.items:
            data = planner.resolve_data(item)
            if not isinstance(data, Tensor) or item.tensor_data is None:
                raise TypeError(f"{item.index.fqn} is no tensor")
            tensors[item.index.fqn] = data.detach()
            offsets[item.index.fqn] = list(item.tensor_data.chunk.offsets)
        files = split(tensors)
        shard: int = plan.storage_data["shard_index"]
        paths = [
            self._folder / f"shard-{shard:05d}-model-{number:05d}-of-{len(files):05d}.safetensors"
            for number in range(1, len(files) + 1)
        ]
        with ThreadPoolExecutor(FILES_AT_ONCE, "shard-files") as pool:
            entries = pool.map(lambda path, file: write_file(path, file, _metadata(file, offsets)), paths, files)
            self.written = {path.name: entry for path, entry in zip(paths, entries, strict=True)}
        done: Future[list[WriteResult]] = Future()
        done.set_result([])  # only an index over all files would need more
        return done


def _metadata(tensors: Mapping[str, Tensor], offsets: Mapping[str, list[int]]) -> dict[str, str]:
    """Where in the whole each begins, as torch's reader looks for it."""
    places = {name: {"saved_offsets": offsets[name]} for name in tensors}
    return {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}


def split(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """`tensors` in files of about the same size; none without tensors."""
    total = sum(tensor.nbytes for tensor in tensors.values())
    count = min(FILES_AT_ONCE, max(1, total // LEAST_FILE_BYTES), len(tensors))
    files: list[dict[str, Tensor]] = [{} for _ in range(count)]
    sizes = [0] * count
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        least = min(range(count), key=lambda number: sizes[number])
        files[least][name] = tensors[name]
        sizes[least] += tensors[name].nbytes
    return files


@dataclass
class _HashedFile:
    """Bytes on their way to a file, and the hash of them."""

    file: BinaryIO
    size: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`, and let the disk begin with it: else it would idle until the file is closed."""
        self.digest.update(data)
        self.file.write(data)
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # some file systems have no such hints
                os.posix_fadvise(self.file.fileno(), self.size, len(data), os.POSIX_FADV_DONTNEED)
        self.size += len(data)


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileEntry:
    """Write the safetensors file `path`, and put it on disk. Its tensors are ordered as that library orders them."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    with path.open("wb") as file:
        hashed = _HashedFile(file)
        hashed.write(_header({name: tensors[name] for name in names}, metadata))
        for name in names:
            for chunk in _chunks(tensors[name]):
                hashed.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(bytes=hashed.size, sha256=hashed.digest.hexdigest())


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": _KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data begins on a multiple of 8
    return struct.pack("<Q", len(text)) + text


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of `tensor`, without a copy, and no chunk so long that a signal would have to wait for it."""
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().data
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]
