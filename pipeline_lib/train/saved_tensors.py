"""Tensors in files, written and read by any number of ranks, without pickle.

They are sharded safetensors in the layout of torch's distributed checkpoints, which any of its
readers can read.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline_lib.arch.weight_files import Piece, read_headers
from pipeline_lib.core import files
from pipeline_lib.core.errors import DataError, IntegrityError
from pipeline_lib.core.run_folder import WEIGHTS
from pipeline_lib.core.store import FileEntry
from pipeline_lib.model.weights import Stored, fill_box
from pipeline_lib.train.dist import World
from pipeline_lib.train.shard_files import FILES_AT_ONCE, Chunk, holds_a_part, split, write_file
from pipeline_lib.train.state import of_kind
from pipeline_lib.train.together import together

_SHARDING_INFO = "DCP_SHARDING_INFO"  # torch's names
_OFFSETS = "saved_offsets"
TENSORS = "tensors"


def save_tensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    group: dist.ProcessGroup | None = None,
    shards_before: int = 0,
) -> dict[str, FileEntry]:
    """Write `tensors` (whole on one rank, or each rank's part of a DTensor) as safetensors.

    They go to `folder`. Its files are numbered after `shards_before` that `folder` holds already.
    No two ranks have the same part.

    Returns the files that this rank wrote, by name. All ranks of `group` (default: all) call it,
    and all raise alike: DiskFull, or SaveFailed for another failure.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    shard = shards_before + 1 + rank
    chunks = {name: Chunk.of(tensor) for name, tensor in tensors.items() if holds_a_part(tensor)}
    data = split({name: chunk.data for name, chunk in chunks.items()})
    written: dict[str, FileEntry] = {}

    def write_one(number: int, file: Mapping[str, Tensor]) -> None:
        name = f"shard-{shard:05d}-model-{number:05d}-of-{len(data):05d}.safetensors"
        # of parts in whole tensors
        places = {name: {_OFFSETS: list(chunks[name].offsets)} for name in file}
        metadata = {_SHARDING_INFO: json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}
        written[name] = write_file(folder / name, file, metadata)

    def write() -> None:
        if data:
            folder.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(FILES_AT_ONCE, "shard-files") as pool:
            list(pool.map(write_one, range(1, len(data) + 1), data))

    together(group, folder, write)
    return written


def save_parts(
    folder: Path,
    parts: Iterable[Mapping[str, Tensor]],
    world: World,
    group: dist.ProcessGroup | None = None,
) -> dict[str, FileEntry]:
    """Write `parts` of a state to `folder`, each before the next is made; all ranks have as many.

    Weights go to `weights/`, in the same files whether moments come with them or not: see
    `link_weights`. The others go to `tensors/`. Returns the files that this rank wrote, by their
    names in `folder`.
    """
    written: dict[str, FileEntry] = {}
    # A loop's variable, and `enumerate`, would keep each part in memory while the next is made.
    rest = iter(parts)
    shards_before = 0
    while (part := next(rest, None)) is not None:
        weights = of_kind(part, WEIGHTS)
        others = dict(part)
        for name in weights:
            del others[f"{WEIGHTS}.{name}"]
        del part
        of_weights = save_tensors(folder / WEIGHTS, weights, group, shards_before)
        of_others = save_tensors(folder / TENSORS, others, group, shards_before)
        del weights, others
        written |= {f"{WEIGHTS}/{name}": entry for name, entry in of_weights.items()}
        written |= {f"{TENSORS}/{name}": entry for name, entry in of_others.items()}
        shards_before += world.size
    return written


def link_weights(checkpoint: Path, folder: Path) -> bool:
    """Make `folder` the weights of the sealed `checkpoint` by hard links; return whether it worked.

    It is not where the file system has no links, nor for a checkpoint of earlier code, which has no
    such files.
    """
    sources = sorted((checkpoint / WEIGHTS).glob("*.safetensors"))
    folder.mkdir(parents=True, exist_ok=True)
    is_linked = bool(sources) and all(
        files.try_link(source, folder / source.name) for source in sources
    )
    if not is_linked:
        shutil.rmtree(folder)
    return is_linked


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor in the ranks' files: each one's part, as its box and where values are."""

    parts: tuple[tuple[Piece, Stored], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        ends = [[each.stop for each in piece.slices] for piece, _ in self.parts]
        return tuple(max(of_dimension) for of_dimension in zip(*ends, strict=True))

    def with_stored(self, change: Callable[[Stored], Stored]) -> "SavedTensor":
        """Return this tensor with `change` of each stored one."""
        return SavedTensor(tuple((piece, change(stored)) for piece, stored in self.parts))

    def fill(self, target: Tensor, offsets: tuple[int, ...]) -> None:
        """Fill `target`, a box of the tensor from `offsets` on. Raises DataError, Unreadable."""
        for piece, stored in self.parts:
            fill_box(target, offsets, piece, stored.copy_to)


def find_saved(folder: Path) -> dict[str, SavedTensor]:
    """Return the tensors in `folder`, written by any world, by name.

    Raises IntegrityError if it cannot be read.
    """
    parts: dict[str, list[tuple[Piece, Stored]]] = {}
    try:
        with files.unreadable_named(folder):
            paths = [path for path in folder.iterdir() if path.suffix == ".safetensors"]
            for path in sorted(paths):
                with safe_open(str(path), framework="pt") as file:
                    info = (file.metadata() or {}).get(_SHARDING_INFO)
                places = json.loads(info) if info else {}
                for header in read_headers(path):
                    offsets = (0,) * len(header.shape)  # a whole tensor
                    if info:
                        offsets = tuple(places[header.name][_OFFSETS])
                    piece = Piece(header.name, offsets, header.shape)
                    parts.setdefault(header.name, []).append((piece, Stored(**vars(header))))
    except (OSError, ValueError, LookupError, DataError, SafetensorError) as error:
        text = f"{folder}: damaged ({error}); delete it and run snakemake again"
        raise IntegrityError(text) from error
    return {name: SavedTensor(tuple(of_one)) for name, of_one in parts.items()}


def find_state(checkpoint: Path) -> dict[str, SavedTensor]:
    """Return a checkpoint's tensors, `weights.NAME`, `exp_avg.NAME`, ..., or an earlier version's.

    That had the weights in `tensors/` too. Raises IntegrityError if it cannot be read.
    """
    found: dict[str, SavedTensor] = {}
    if (checkpoint / TENSORS).exists():
        found |= find_saved(checkpoint / TENSORS)
    if (checkpoint / WEIGHTS).exists():
        weights = find_saved(checkpoint / WEIGHTS)
        found |= {f"{WEIGHTS}.{name}": saved for name, saved in weights.items()}
    return found


def fill_saved(
    folder: Path, saved: Mapping[str, SavedTensor], tensors: Mapping[str, Tensor]
) -> None:
    """Fill `tensors` (a DTensor's part on this rank) in place from what `saved` finds in `folder`.

    Raises IntegrityError naming a missing tensor, or one of another shape.
    """
    wrong = f"{folder}: does not hold the tensors that this run needs"
    for name, tensor in tensors.items():
        if name not in saved:
            raise IntegrityError(f"{wrong}: it lacks {name}")
        if saved[name].shape != tuple(tensor.shape):
            shape = list(saved[name].shape)
            text = f"it has {name} as {shape} instead of {list(tensor.shape)}"
            raise IntegrityError(f"{wrong}: {text}")
        own = Chunk.of(tensor)
        saved[name].fill(own.data, own.offsets)
