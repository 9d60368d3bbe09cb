"""From a copy in memory to a sealed checkpoint: staged, hashed, sealed and renamed once.

`checkpoints/step-N/` holds `tensors/` (sharded safetensors), `rank-R.safetensors` (what rank R alone has: its random
state and what its strategy keeps for itself), `state.json`, `metrics.jsonl` and the manifest. A kill at any moment
leaves the one before intact.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save
from torch import Tensor
from torch.distributed.tensor import DTensor

from pipeline_lib.base import fsio
from pipeline_lib.base.errors import DiskFull
from pipeline_lib.base.fsio import write_json
from pipeline_lib.base.manifest import FileEntry, Manifest, describe_file, write_manifest
from pipeline_lib.base.spec import Spec
from pipeline_lib.train.checkpoint.agree import together
from pipeline_lib.train.checkpoint.tensors import save_tensors
from pipeline_lib.train.dist import World

TENSORS = "tensors"
STATE_NAME = "state.json"
METRICS_NAME = "metrics.jsonl"
_SPARE_BYTES = 1_000_000  # for headers and JSON


@dataclass(frozen=True)
class Snapshot:
    """What one rank writes of the state after `step`, in host memory: nothing of it changes any more.

    `tensors` are shared out over the ranks, `own` is this rank's alone; `scalars` and `rows` are the same on all.
    """

    step: int
    tensors: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    scalars: dict[str, Any]
    rows: list[dict[str, Any]]

    @property
    def bytes(self) -> int:
        """How many this rank will write."""
        held = [*self.tensors.values(), *self.own.values()]
        return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in held)


def step_name(step: int) -> str:
    """What the directory of the checkpoint after `step` is called."""
    return f"step-{step:08d}"


def rank_name(rank: int) -> str:
    """What the file of `rank` is called."""
    return f"rank-{rank:05d}.safetensors"


def publish_checkpoint(
    folder: Path, world: World, spec: Spec, snapshot: Snapshot, group: dist.ProcessGroup | None = None
) -> int:
    """Publish `folder/step-N`, and return its bytes. All ranks of `group` call it.

    On failure nothing of it stays, the one before is untouched, and all ranks raise alike: DiskFull, SaveFailed.
    """
    final = folder / step_name(snapshot.step)
    need_bytes = sum(together(group, folder, lambda: snapshot.bytes)) + _SPARE_BYTES
    staged = Path(together(group, folder, partial(_stage, world, final, need_bytes))[0])
    free_bytes = together(group, folder, lambda: shutil.disk_usage(folder).free)[0]
    try:
        save_tensors(staged / TENSORS, snapshot.tensors, group)
        described = together(group, staged, partial(_write_own, staged, world, snapshot.own))
        files = {name: FileEntry(**entry) for part in described for name, entry in part.items()}
        together(group, staged, partial(_seal, world, spec, staged, final, snapshot, files))
    except DiskFull as error:
        sizes = f"a checkpoint needs {need_bytes / 1e6:,.1f} MB, {free_bytes / 1e6:,.1f} MB were free when it was begun"
        raise DiskFull(f"{error} ({sizes})") from error
    finally:
        if world.is_first:
            shutil.rmtree(staged, ignore_errors=True)
    return sum(entry.bytes for entry in files.values())


def _stage(world: World, final: Path, need_bytes: int) -> str:
    if not world.is_first:
        return ""
    final.parent.mkdir(parents=True, exist_ok=True)
    fsio.require_space(final.parent, need_bytes, f"the checkpoint {final.name}")
    return str(fsio.stage_dir(final))


def _write_own(staged: Path, world: World, own: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write this rank's file, and hash what it wrote: the last of the checkpoint's bytes that this rank makes."""
    path = staged / rank_name(world.rank)
    path.write_bytes(save(dict(own)))
    mine = [path, *sorted((staged / TENSORS).glob(f"shard-{world.rank + 1:05d}-*"))]
    return {path.relative_to(staged).as_posix(): describe_file(path).model_dump() for path in mine}


def _seal(world: World, spec: Spec, staged: Path, final: Path, snapshot: Snapshot, files: dict[str, FileEntry]) -> None:
    """The first rank writes what all share, seals the directory and gives it its name."""
    if not world.is_first:
        return
    write_json(staged / STATE_NAME, {"step": snapshot.step, "world_size": world.size, **snapshot.scalars})
    fsio.write_jsonl(staged / METRICS_NAME, snapshot.rows)
    files |= {name: describe_file(staged / name) for name in (STATE_NAME, METRICS_NAME)}
    write_manifest(
        staged, Manifest(stage="checkpoint", digest=final.parent.parent.name, spec=spec.to_json(), files=files)
    )
    fsio.remove_dir(final)
    fsio.publish_dir(staged, final)
