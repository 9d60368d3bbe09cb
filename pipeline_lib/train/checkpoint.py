"""A sealed checkpoint, independent of the strategy: how it is published, and read with its tensors.

`checkpoints/step-N/` holds `weights/` and `tensors/` (sharded safetensors, the latter of the
moments), `rank-R.safetensors` (what rank R alone has: its random state and its strategy's own
state), `state.json`, `metrics/` (train/metrics.py) and the manifest. Copies in memory are written
to a staging folder, hashed, sealed and renamed once: a kill at any moment leaves the previous
checkpoint intact.
"""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from pipeline_lib.config.rope import ROPE
from pipeline_lib.config.train import DEALING
from pipeline_lib.core.errors import DiskFull, IntegrityError
from pipeline_lib.core.files import (
    publish_dir,
    read_json,
    remove_dir,
    require_space,
    stage_dir,
    write_json,
)
from pipeline_lib.core.lock import Lock
from pipeline_lib.core.run_folder import STATE_NAME, step_name
from pipeline_lib.core.store import (
    FileEntry,
    Manifest,
    Spec,
    describe_file,
    read_manifest,
    write_manifest,
)
from pipeline_lib.train.dist import World
from pipeline_lib.train.metrics import SavedRows
from pipeline_lib.train.saved_tensors import save_parts
from pipeline_lib.train.shard_files import write_file
from pipeline_lib.train.state import LOSS_SCALE
from pipeline_lib.train.together import together

_SPARE_BYTES = 1_000_000  # for headers and JSON


@dataclass(frozen=True)
class StateSnapshot:
    """One rank's part of the state after `step`, in host memory: unchanged until it is written.

    `parts` are tensors divided over the ranks: all at once, or as many as are copied at a time;
    `tensor_bytes` is the size of all of them on all ranks. `own` is this rank's alone; `scalars`
    are the same on all ranks, and only the first has `rows`.
    """

    step: int
    parts: Iterable[Mapping[str, Tensor]]
    tensor_bytes: int
    own: Mapping[str, Tensor]
    scalars: dict[str, Any]
    rows: SavedRows


def rank_name(rank: int) -> str:
    """Return the name of the file of `rank`."""
    return f"rank-{rank:05d}.safetensors"


def publish_checkpoint(
    folder: Path,
    world: World,
    spec: Spec,
    snapshot: StateSnapshot,
    lock: Lock,
    group: dist.ProcessGroup | None = None,
) -> int:
    """Publish `folder/step-N`, and return its size in bytes. All ranks of `group` call it.

    On failure nothing of it stays, the previous checkpoint is untouched, and all ranks raise alike:
    DiskFull, SaveFailed, or LockLost if another process has taken over `folder`.
    """
    final = folder / step_name(snapshot.step)
    own_bytes = sum(tensor.nbytes for tensor in snapshot.own.values())
    need_bytes = (
        snapshot.tensor_bytes + sum(together(group, folder, lambda: own_bytes)) + _SPARE_BYTES
    )

    def stage() -> tuple[str, int]:
        if not world.is_first:
            return "", 0
        folder.mkdir(parents=True, exist_ok=True)
        require_space(folder, need_bytes, f"the checkpoint {final.name}")
        free_bytes = shutil.disk_usage(folder).free
        return str(stage_dir(final)), free_bytes

    def write_own() -> dict[str, Any]:
        """Return the sizes and hashes of all files that this rank wrote."""
        name = rank_name(world.rank)
        entries = {**state_files, name: write_file(staged / name, snapshot.own, {})}
        return {each: entry.model_dump() for each, entry in entries.items()}

    def seal() -> None:
        if not world.is_first:
            return
        write_json(
            staged / STATE_NAME,
            {"step": snapshot.step, "world_size": world.size, **snapshot.scalars},
        )
        entries.update(
            {STATE_NAME: describe_file(staged / STATE_NAME), **snapshot.rows.write(staged)}
        )
        write_manifest(
            staged,
            Manifest(
                stage="checkpoint", digest=folder.parent.name, spec=spec.to_json(), files=entries
            ),
        )
        lock.require()
        remove_dir(final)
        publish_dir(staged, final, lock.require)

    name, free_bytes = together(group, folder, stage)[0]
    staged = Path(name)
    try:
        state_files = save_parts(staged, snapshot.parts, world, group)
        of_ranks = together(group, staged, write_own)
        entries = {}
        for of_rank in of_ranks:
            for name, entry in of_rank.items():
                entries[name] = FileEntry(**entry)
        together(group, staged, seal)
    except DiskFull as error:
        sizes = (
            f"a checkpoint needs {need_bytes / 1e6:,.1f} MB, {free_bytes / 1e6:,.1f} MB were "
            "free when it was begun"
        )
        raise DiskFull(f"{error} ({sizes})") from error
    finally:
        if world.is_first:
            shutil.rmtree(staged, ignore_errors=True)
    return sum(entry.bytes for entry in entries.values())


RANDOM, STRATEGY = "random.", "strategy."  # prefixes of the names in a rank's file


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the scalars of a verified checkpoint."""
    return dict(read_json(checkpoint / STATE_NAME))


def refuse_foreign(checkpoint: Path, spec: Spec) -> None:
    """Raise IntegrityError naming settings and inputs where `checkpoint`'s run differs from `spec`.

    The placement of a run is in neither, and may change.
    """

    def decisive(of: Spec) -> dict[str, Any]:
        """Return what determines the resulting weights, by a name that says where it is set."""
        named = {ROPE: f"model.{ROPE}", DEALING: "what the ranks are dealt"}
        values: dict[str, Any] = {"the version of the training code": of.version}
        for key, value in of.settings.items():
            if key != "until_step":
                values[named.get(key, f"train.{key}")] = value
        for name, ref in of.inputs.items():
            values[f"the {name}"] = ref.digest
        return values

    def value_in(values: Mapping[str, Any], key: str) -> str:
        return repr(values[key]) if key in values else "the default"

    theirs = decisive(Spec.from_json(read_manifest(checkpoint).spec, str(checkpoint)))
    ours = decisive(spec)
    differing = []
    for key in sorted(theirs.keys() | ours.keys()):
        if theirs.get(key) != ours.get(key):
            differing.append(
                f"{key} is {value_in(theirs, key)} there and {value_in(ours, key)} here"
            )
    if differing:
        named = "; ".join(differing)
        raise IntegrityError(
            f"{checkpoint}: left by a run that computes something else ({named}); take it away "
            f"from {checkpoint.parent} to begin anew, or give the config back what differs"
        )


def own_tensors(world: World, strategy_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state of this rank alone: torch's random states, and `own_state` of its strategy.

    Training draws nothing from the random states of Python and NumPy.
    """
    own = {f"{RANDOM}cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        own[f"{RANDOM}cuda"] = torch.cuda.get_rng_state(world.device)
    return own | {f"{STRATEGY}{name}": tensor for name, tensor in strategy_state.items()}


def read_own(checkpoint: Path, world: World) -> dict[str, Tensor]:
    """Return what `own_tensors` returned on this rank; nothing for another number of ranks."""
    path = checkpoint / rank_name(world.rank)
    if read_state(checkpoint)["world_size"] != world.size or not path.exists():
        return {}
    return load_file(str(path))


def strategy_state(checkpoint: Path, world: World, strategy: str) -> dict[str, Tensor]:
    """Return this rank's own strategy state; from another strategy or world, the loss scale."""
    own: dict[str, Tensor] = {}
    if read_state(checkpoint)["strategy"] == strategy:
        own = read_own(checkpoint, world)
    if own:
        names = [name for name in own if name.startswith(STRATEGY)]
        return {name.removeprefix(STRATEGY): own[name] for name in names}
    first = load_file(str(checkpoint / rank_name(0)))
    scale = first.get(f"{STRATEGY}{LOSS_SCALE}")
    return {} if scale is None else {LOSS_SCALE: scale}


def restore_random_state(checkpoint: Path, world: World) -> None:
    """Restore this rank's random states, as far as the checkpoint has them."""
    own = read_own(checkpoint, world)
    if f"{RANDOM}cpu" in own:
        torch.set_rng_state(own[f"{RANDOM}cpu"])
    if world.device.type == "cuda" and f"{RANDOM}cuda" in own:  # a run may move from CPUs to GPUs
        torch.cuda.set_rng_state(own[f"{RANDOM}cuda"], world.device)
