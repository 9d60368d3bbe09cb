"""Tensors on disk, whatever world wrote them: sharded safetensors by torch's distributed checkpointing, no pickle."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pipeline_lib.base import fsio
from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.base.manifest import FileEntry
from pipeline_lib.train.checkpoint.agree import SaveFailed
from pipeline_lib.train.checkpoint.shard_files import ShardWriter


def save_tensors(
    folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None
) -> dict[str, FileEntry]:
    """Write `tensors` (whole on one rank, or each rank's part of a DTensor) to `folder` as safetensors.

    Returns the files that this rank wrote, by name.
    All ranks of `group`, else of all, call it, and all raise alike: DiskFull, or SaveFailed for another failure.
    """
    writer = ShardWriter(folder)
    try:
        with _one_process_is_fine():
            save(dict(tensors), storage_writer=writer, process_group=group, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        for failure, _ in error.failures.values():
            if fsio.is_disk_full(failure):
                raise fsio.disk_full(folder) from error
        raise SaveFailed(f"{folder}: cannot be written ({_reason(error)})") from error
    return writer.written


def load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors` in place from `folder`, whatever world wrote it. Raises IntegrityError naming a missing one."""
    try:
        with _one_process_is_fine():
            reader = HuggingFaceStorageReader(path=str(folder))
            load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise IntegrityError(f"{folder}: does not hold the tensors that this run needs ({_reason(error)})") from error


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The whole shapes of the tensors in `folder`, by name. Raises IntegrityError if it does not read."""
    try:
        with fsio.unreadable_named(folder):
            metadata = HuggingFaceStorageReader(path=str(folder)).read_metadata().state_dict_metadata
    except (OSError, ValueError, SafetensorError) as error:
        raise IntegrityError(f"{folder}: damaged ({error}); delete it and run snakemake again") from error
    return {name: tuple(entry.size) for name, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}


def _reason(error: CheckpointException) -> str:
    return str(next(iter(error.failures.values()), error)).strip().splitlines()[-1]


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """Without DCP's warning that there is no process group: the merge stage has none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield
