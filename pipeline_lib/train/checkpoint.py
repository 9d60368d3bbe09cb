"""Sealed, strategy-free checkpoints: full parameter names in safetensors, scalars in JSON, no pickle.

`checkpoints/step-N/` is staged, sealed and renamed once; a kill leaves the one before intact. Any strategy
and any number of ranks can load what any other saved.
"""

import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from pipeline_lib.base import fsio
from pipeline_lib.base.errors import IntegrityError
from pipeline_lib.base.fsio import read_json, write_json
from pipeline_lib.base.manifest import FileEntry, Manifest, describe_file, verify, write_manifest
from pipeline_lib.train.dist import World

TENSORS = "tensors"
STATE_NAME = "state.json"
METRICS_NAME = "metrics.jsonl"
_STEP_NAME = re.compile(r"step-(\d{8})")


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write `tensors` (whole, or each rank's part of a DTensor) to `folder` as safetensors. All ranks call it."""
    writer = HuggingFaceStorageWriter(path=str(folder), save_distributed=True)
    try:
        with _one_process_is_fine():
            save(dict(tensors), storage_writer=writer, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        for failure in error.failures.values():
            if "No space left" in str(failure) or "Errno 28" in str(failure):
                raise fsio.disk_full(folder) from error
        raise


def load_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors` in place from `folder`, whatever world wrote it. Raises IntegrityError naming a missing one."""
    try:
        with _one_process_is_fine():
            reader = HuggingFaceStorageReader(path=str(folder))
            load(dict(tensors), storage_reader=reader, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        reason = str(next(iter(error.failures.values()), error)).strip().splitlines()[-1]
        raise IntegrityError(f"{folder}: does not hold the tensors that this run needs ({reason})") from error


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """Without DCP's warning that there is no process group: the merge stage has none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def save_checkpoint(
    folder: Path, world: World, step: int, tensors: Mapping[str, Tensor], scalars: dict[str, Any], rows: list[Any]
) -> Path:
    """Publish `folder/step-N` with the tensors, each rank's random state, `scalars` and the metrics so far.

    All ranks call it. On failure nothing of it stays and the one before is untouched.
    """
    final = folder / f"step-{step:08d}"
    staged = Path(_from_first(world, lambda: str(fsio.stage_dir(final))))
    try:
        save_tensors(staged / TENSORS, tensors)
        save_file(_random_state(world), str(staged / f"random-{world.rank:05d}.safetensors"))
        files = _gather_files(staged, world)
        if world.is_first:
            write_json(staged / STATE_NAME, {"step": step, "world_size": world.size, **scalars})
            fsio.write_jsonl(staged / METRICS_NAME, rows)
            files |= {name: describe_file(staged / name) for name in (STATE_NAME, METRICS_NAME)}
            manifest = Manifest(stage="checkpoint", digest=folder.parent.name, spec={}, files=files)
            write_manifest(staged, manifest)
            fsio.remove_dir(final)
            fsio.publish_dir(staged, final)
        dist.barrier()
    finally:
        if world.is_first:
            shutil.rmtree(staged, ignore_errors=True)
    return final


def newest_valid(folder: Path, max_step: int, reject: Callable[[Path, str], None]) -> Path | None:
    """The latest checkpoint up to `max_step` whose every byte verifies; each damaged one is set aside and reported."""
    for step, path in reversed(sealed_steps(folder)):
        if step > max_step:
            continue
        try:
            verify(path)
        except IntegrityError as error:
            aside = path.with_name(f"rejected-{path.name}")
            fsio.remove_dir(aside)
            path.rename(aside)
            reject(aside, str(error))
            continue
        return path
    return None


def sealed_steps(folder: Path) -> list[tuple[int, Path]]:
    """Steps that have a checkpoint with a manifest, ascending."""
    found = ((_STEP_NAME.fullmatch(path.name), path) for path in folder.glob("step-*"))
    return sorted((int(match[1]), path) for match, path in found if match and (path / "manifest.json").exists())


def retain(folder: Path, keep_last: int, step: int) -> None:
    """Delete all but the newest `keep_last` checkpoints up to `step`; later ones belong to a longer run."""
    reached = [path for saved, path in sealed_steps(folder) if saved <= step]
    for path in reached[:-keep_last]:
        fsio.remove_dir(path)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The scalars of a verified checkpoint."""
    return dict(read_json(checkpoint / STATE_NAME))


def restore_random_state(checkpoint: Path, world: World) -> None:
    """Continue this rank's random numbers where the checkpoint left them, if it had this many ranks."""
    path = checkpoint / f"random-{world.rank:05d}.safetensors"
    if read_state(checkpoint)["world_size"] != world.size or not path.exists():
        return
    states = load_file(str(path))
    torch.set_rng_state(states["cpu"])
    if world.device.type == "cuda" and "cuda" in states:  # a run may move from CPUs to GPUs
        torch.cuda.set_rng_state(states["cuda"], world.device)


def _random_state(world: World) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(world.device)
    return states


def _gather_files(staged: Path, world: World) -> dict[str, FileEntry]:
    """Each rank hashes what it wrote; the first rank gets all."""
    mine = [staged / f"random-{world.rank:05d}.safetensors"]
    mine += sorted((staged / TENSORS).glob(f"shard-{world.rank + 1:05d}-*"))
    described = {path.relative_to(staged).as_posix(): describe_file(path).model_dump() for path in mine}
    gathered: list[Any] = [None] * world.size
    dist.all_gather_object(gathered, json.dumps(described))
    return {name: FileEntry(**entry) for part in gathered for name, entry in json.loads(part).items()}


def _from_first(world: World, make: Callable[[], str]) -> str:
    """What the first rank makes, on all ranks."""
    held = [make() if world.is_first else ""]
    dist.broadcast_object_list(held, src=0)
    return held[0]
