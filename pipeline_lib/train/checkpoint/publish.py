"""From a copy in memory to a sealed checkpoint: staged, hashed, sealed and renamed once.

`checkpoints/step-N/` holds `tensors/` (sharded safetensors), `rank-R.safetensors` (what rank R alone has: its random
state and what its strategy keeps for itself), `state.json`, `metrics/` (rows.py) and the manifest. A kill at any moment
leaves the one before intact.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pipeline_lib.base import fsio
from pipeline_lib.base.errors import DiskFull
from pipeline_lib.base.fsio import write_json
from pipeline_lib.base.lock import Lock
from pipeline_lib.base.manifest import FileEntry, Manifest, describe_file, write_manifest
from pipeline_lib.base.run_folder import step_name
from pipeline_lib.base.spec import Spec
from pipeline_lib.train.checkpoint.agree import together
from pipeline_lib.train.checkpoint.rows import SavedRows
from pipeline_lib.train.checkpoint.shard_files import write_file
from pipeline_lib.train.checkpoint.tensors import save_tensors
from pipeline_lib.train.dist import World
from pipeline_lib.train.state import own_part

TENSORS = "tensors"
STATE_NAME = "state.json"
_SPARE_BYTES = 1_000_000  # for headers and JSON


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes of the state after `step`, in host memory: nothing of it changes until it is written.

    `tensors` are shared out over the ranks, `own` is this rank's alone; `scalars` are the same on all, and the first
    has the rows.
    """

    step: int
    tensors: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    scalars: dict[str, Any]
    rows: SavedRows

    @property
    def bytes(self) -> int:
        """How many this rank will write."""
        held = [*self.tensors.values(), *self.own.values()]
        return sum(own_part(tensor).nbytes for tensor in held)


def rank_name(rank: int) -> str:
    """What the file of `rank` is called."""
    return f"rank-{rank:05d}.safetensors"


def publish_checkpoint(
    folder: Path, world: World, spec: Spec, snapshot: Snapshot, lock: Lock, group: dist.ProcessGroup | None = None
) -> int:
    """Publish `folder/step-N`, and return its bytes. All ranks of `group` call it.

    On failure nothing of it stays, the one before is untouched, and all ranks raise alike: DiskFull, SaveFailed, or
    LockLost, where `folder` is the next owner's.
    """
    final = folder / step_name(snapshot.step)
    need_bytes = sum(together(group, folder, lambda: snapshot.bytes)) + _SPARE_BYTES
    name, free_bytes = together(group, folder, partial(_stage, world, final, need_bytes))[0]
    staged = Path(name)
    try:
        mine = save_tensors(staged / TENSORS, snapshot.tensors, group)
        described = together(group, staged, partial(_write_own, staged, world, snapshot.own, mine))
        files = {name: FileEntry(**entry) for part in described for name, entry in part.items()}
        together(group, staged, partial(_seal, world, spec, staged, final, snapshot, lock, files))
    except DiskFull as error:
        sizes = f"a checkpoint needs {need_bytes / 1e6:,.1f} MB, {free_bytes / 1e6:,.1f} MB were free when it was begun"
        raise DiskFull(f"{error} ({sizes})") from error
    finally:
        if world.is_first:
            shutil.rmtree(staged, ignore_errors=True)
    return sum(entry.bytes for entry in files.values())


def _stage(world: World, final: Path, need_bytes: int) -> tuple[str, int]:
    """Make the folder that files go to first: its name, and the bytes that were free before."""
    if not world.is_first:
        return "", 0
    final.parent.mkdir(parents=True, exist_ok=True)
    fsio.require_space(final.parent, need_bytes, f"the checkpoint {final.name}")
    free_bytes = shutil.disk_usage(final.parent).free
    return str(fsio.stage_dir(final)), free_bytes


def _write_own(
    staged: Path, world: World, own: Mapping[str, Tensor], tensor_files: Mapping[str, FileEntry]
) -> dict[str, Any]:
    """Write this rank's file; what it wrote in all, with sizes and hashes."""
    name = rank_name(world.rank)
    mine = {f"{TENSORS}/{each}": entry for each, entry in tensor_files.items()}
    mine[name] = write_file(staged / name, own, {})
    return {each: entry.model_dump() for each, entry in mine.items()}


def _seal(
    world: World,
    spec: Spec,
    staged: Path,
    final: Path,
    snapshot: Snapshot,
    lock: Lock,
    files: dict[str, FileEntry],
) -> None:
    """The first rank writes what all share, seals the directory and gives it its name."""
    if not world.is_first:
        return
    write_json(staged / STATE_NAME, {"step": snapshot.step, "world_size": world.size, **snapshot.scalars})
    files |= {STATE_NAME: describe_file(staged / STATE_NAME), **snapshot.rows.write(staged)}
    write_manifest(
        staged, Manifest(stage="checkpoint", digest=final.parent.parent.name, spec=spec.to_json(), files=files)
    )
    lock.require()
    fsio.remove_dir(final)
    fsio.publish_dir(staged, final, lock.require)
