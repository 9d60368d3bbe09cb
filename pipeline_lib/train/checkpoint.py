"""Sealed, strategy-free checkpoints: full parameter names in safetensors, scalars in JSON, no pickle."""

import json
import math
import shutil
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from pipeline_lib.arch.geometry import FP32_BYTES
from pipeline_lib.arch.weight_files import Piece, read_headers
from pipeline_lib.config.rope import ROPE
from pipeline_lib.config.train import DEALING, Train
from pipeline_lib.core import files
from pipeline_lib.core.errors import DataError, DiskFull, IntegrityError, LockLost, PipelineError
from pipeline_lib.core.events import EventLog, EventName
from pipeline_lib.core.files import (
    fsync_path,
    publish_dir,
    read_json,
    remove_dir,
    require_space,
    stage_dir,
    write_hashed,
    write_json,
)
from pipeline_lib.core.lock import Lock
from pipeline_lib.core.run_folder import STATE_NAME, WEIGHTS, retain, step_name
from pipeline_lib.core.store import FileEntry, Manifest, Spec, describe_file, read_manifest, write_manifest
from pipeline_lib.model.weights import KINDS, Stored, fill_box
from pipeline_lib.plan.memory import COPIED_AT_ONCE_BYTES
from pipeline_lib.plan.saving import auto_apart_s
from pipeline_lib.train.dist import PATIENT, World, gather_texts
from pipeline_lib.train.metrics import SavedRows
from pipeline_lib.train.staging import HostBuffers, Named, new_copies
from pipeline_lib.train.state import LOSS_SCALE, STATE_KINDS, of_kind, own_part
from pipeline_lib.train.strategy import Strategy, balanced, grouped

# Collective failure: an error on one rank is raised on all, so that no rank goes on, or waits, alone.


class SaveFailed(PipelineError):
    """A failure to write a checkpoint, for another reason than a full disk."""

    exit_code = 74


def together(group: dist.ProcessGroup | None, where: Path, act: Callable[[], Any]) -> list[Any]:
    """Call `act` on every rank of `group` (default: all); return the results, which are JSON values, by rank.

    If it fails on any rank, every rank raises the error of the first one: DiskFull, LockLost, or SaveFailed naming the
    file.
    """
    own: dict[str, Any]
    try:
        own = {"value": act()}
    except DiskFull as error:
        own = {"full": str(error)}
    except LockLost as error:
        own = {"lost": str(error)}
    except PipelineError as error:
        own = {"failed": str(error)}
    except (RuntimeError, MemoryError) as error:  # of torch
        own = {"failed": f"{where}: {str(error).strip().splitlines()[-1]}"}
    except OSError as error:
        own = {"failed": f"{error.filename or where}: {error.strerror or error}"}
        if files.is_disk_full(error):
            own = {"full": str(files.disk_full(where))}
    answers = [json.loads(text) for text in gather_texts(json.dumps(own), group)]
    for rank, answer in enumerate(answers):
        if "full" in answer:
            raise DiskFull(answer["full"])
        if "lost" in answer:
            raise LockLost(answer["lost"])
        if "failed" in answer:
            raise SaveFailed(f"rank {rank}: {answer['failed']}")
    return [answer["value"] for answer in answers]


# Writing a rank's part of a checkpoint as safetensors files: hashed while they are written, several at a time.
#
# Names, tensors and metadata are those of torch's own writer (DCP's Hugging Face storage). That one makes two more
# copies of everything in memory while it holds the GIL, leaves the hashing to a second pass over the files, and lets
# the ranks unpickle what others send.

FILES_AT_ONCE = 4  # per rank: one thread writes and hashes about 1 GB/s
LEAST_FILE_BYTES = 256 * 10**6  # less is not worth a file of its own
_NAMES_OF_DTYPES = {dtype: name for name, dtype in KINDS.items()}


@dataclass(frozen=True)
class Chunk:
    """What one rank writes of a tensor: a part of it that begins at `offsets`, one for each dimension."""

    data: Tensor
    offsets: tuple[int, ...]

    @staticmethod
    def of(tensor: Tensor) -> "Chunk":
        """Return this rank's part of a DTensor, or the whole of any other tensor."""
        if not isinstance(tensor, DTensor):
            return Chunk(tensor.detach(), (0,) * tensor.dim())
        _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return Chunk(tensor.to_local().detach(), tuple(offsets))


def holds_a_part(tensor: Tensor) -> bool:
    """Return whether this rank has something of `tensor` to write: few rows leave some ranks without a part."""
    return not isinstance(tensor, DTensor) or tensor.to_local().numel() > 0


def split(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Divide `tensors` into files of about the same size; no files if there are no tensors."""
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    count = min(FILES_AT_ONCE, max(1, sum(sizes.values()) // LEAST_FILE_BYTES), len(tensors))
    numbers = balanced(sizes, count)
    return [{name: tensors[name] for name in numbers if numbers[name] == number} for number in range(count)]


def write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> FileEntry:
    """Write the safetensors file `path` and fsync it; return its size and hash. Tensors are in the library's order."""
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))

    def content() -> Iterator[bytes | memoryview]:
        yield header_of(((name, tensors[name].dtype, tensors[name].shape) for name in names), metadata)
        for name in names:
            yield bytes_of(tensors[name])

    sha256 = write_hashed(path, content())
    fsync_path(path)
    return FileEntry(bytes=path.stat().st_size, sha256=sha256)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the values of `tensor`, which is on the CPU, as they are in a safetensors file; without a copy."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def header_of(
    tensors: Iterable[tuple[str, torch.dtype, Sequence[int]]],
    metadata: Mapping[str, str],
    separators: tuple[str, str] = (",", ":"),
) -> bytes:
    """Return what precedes the data of `tensors` in a safetensors file: the length of the header, and the header."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES_OF_DTYPES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=separators, ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the data begins on a multiple of 8
    return struct.pack("<Q", len(text)) + text


# Writing and reading tensors of any world size: sharded safetensors in the layout of torch's distributed checkpoints,
# which any of its readers can read. No pickle.

_SHARDING_INFO, _OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"  # torch's names


def save_tensors(
    folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None, shards_before: int = 0
) -> dict[str, FileEntry]:
    """Write `tensors` (whole on one rank, or each rank's part of a DTensor) to `folder` as safetensors.

    Its files are numbered after `shards_before` that `folder` holds already. No two ranks have the same part.

    Returns the files that this rank wrote, by name. All ranks of `group` (default: all) call it, and all raise alike:
    DiskFull, or SaveFailed for another failure.
    """
    shard = shards_before + 1 + (dist.get_rank(group) if dist.is_initialized() else 0)
    chunks = {name: Chunk.of(tensor) for name, tensor in tensors.items() if holds_a_part(tensor)}
    data = split({name: chunk.data for name, chunk in chunks.items()})
    written: dict[str, FileEntry] = {}

    def write_one(number: int, file: Mapping[str, Tensor]) -> None:
        name = f"shard-{shard:05d}-model-{number:05d}-of-{len(data):05d}.safetensors"
        places = {name: {_OFFSETS: list(chunks[name].offsets)} for name in file}  # of parts in whole tensors
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
    folder: Path, parts: Iterable[Mapping[str, Tensor]], world: World, group: dist.ProcessGroup | None = None
) -> dict[str, FileEntry]:
    """Write `parts` of a state to `folder`, each before the next is made; all ranks have as many.

    Weights go to `weights/`, in the same files whether moments come with them or not: see `link_weights`. The others go
    to `tensors/`. Returns the files that this rank wrote, by their names in `folder`.
    """
    written: dict[str, FileEntry] = {}
    # A loop's variable, and `enumerate`, would keep each part in memory while the next is made.
    rest, shards_before = iter(parts), 0
    while (part := next(rest, None)) is not None:
        weights = of_kind(part, WEIGHTS)
        others = {name: tensor for name, tensor in part.items() if not name.startswith(f"{WEIGHTS}.")}
        del part
        of_weights = save_tensors(folder / WEIGHTS, weights, group, shards_before)
        of_others = save_tensors(folder / TENSORS, others, group, shards_before)
        del weights, others
        written |= {f"{WEIGHTS}/{name}": entry for name, entry in of_weights.items()}
        written |= {f"{TENSORS}/{name}": entry for name, entry in of_others.items()}
        shards_before += world.size
    return written


def link_weights(checkpoint: Path, folder: Path) -> bool:
    """Make `folder` the weights of the sealed `checkpoint`, by hard links; return whether that was possible.

    It is not where the file system has no links, nor for a checkpoint of earlier code, which has no such files.
    """
    sources = sorted((checkpoint / WEIGHTS).glob("*.safetensors"))
    folder.mkdir(parents=True, exist_ok=True)
    is_linked = bool(sources) and all(files.try_link(source, folder / source.name) for source in sources)
    if not is_linked:
        shutil.rmtree(folder)
    return is_linked


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor in the files that ranks wrote: the part of each, as a box of it and where its values are."""

    parts: tuple[tuple[Piece, Stored], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        ends = [[each.stop for each in piece.slices] for piece, _ in self.parts]
        return tuple(max(of_dimension) for of_dimension in zip(*ends, strict=True))

    def fill(self, target: Tensor, offsets: tuple[int, ...]) -> None:
        """Fill `target`, a box of the tensor from `offsets` on. Raises DataError, Unreadable."""
        for piece, stored in self.parts:
            fill_box(target, offsets, piece, stored.copy_to)


def find_saved(folder: Path) -> dict[str, SavedTensor]:
    """Return the tensors in `folder`, written by any world, by name. Raises IntegrityError if it cannot be read."""
    parts: dict[str, list[tuple[Piece, Stored]]] = {}
    try:
        with files.unreadable_named(folder):
            for path in sorted(path for path in folder.iterdir() if path.suffix == ".safetensors"):
                with safe_open(str(path), framework="pt") as file:
                    info = (file.metadata() or {}).get(_SHARDING_INFO)
                places = json.loads(info) if info else {}
                for header in read_headers(path):
                    offsets = tuple(places[header.name][_OFFSETS]) if info else (0,) * len(header.shape)
                    piece = Piece(header.name, offsets, header.shape)
                    parts.setdefault(header.name, []).append((piece, Stored(**vars(header))))
    except (OSError, ValueError, LookupError, DataError, SafetensorError) as error:
        raise IntegrityError(f"{folder}: damaged ({error}); delete it and run snakemake again") from error
    return {name: SavedTensor(tuple(of_one)) for name, of_one in parts.items()}


def find_state(checkpoint: Path) -> dict[str, SavedTensor]:
    """Return the tensors of a checkpoint, `weights.NAME`, `exp_avg.NAME`, ...; also of one that earlier code wrote.

    That had the weights in `tensors/` too. Raises IntegrityError if it cannot be read.
    """
    found: dict[str, SavedTensor] = {}
    for place, prefix in ((TENSORS, ""), (WEIGHTS, f"{WEIGHTS}.")):
        if (checkpoint / place).exists():
            found |= {f"{prefix}{name}": saved for name, saved in find_saved(checkpoint / place).items()}
    return found


def fill_saved(folder: Path, saved: Mapping[str, SavedTensor], tensors: Mapping[str, Tensor]) -> None:
    """Fill `tensors` (of a DTensor this rank's part) in place from what was found as `saved` in `folder`.

    Raises IntegrityError naming a missing tensor, or one of another shape.
    """
    for name, tensor in tensors.items():
        if name not in saved:
            raise IntegrityError(f"{folder}: does not hold the tensors that this run needs: it lacks {name}")
        if saved[name].shape != tuple(tensor.shape):
            raise IntegrityError(
                f"{folder}: does not hold the tensors that this run needs: it has {name} as "
                f"{list(saved[name].shape)} instead of {list(tensor.shape)}"
            )
        own = Chunk.of(tensor)
        saved[name].fill(own.data, own.offsets)


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of those `tensors` whose part on this rank holds NaN or infinity, without copying them."""
    return [name for name, tensor in tensors.items() if not is_finite(own_part(tensor))]


def is_finite(tensor: Tensor) -> bool:
    """Return whether no value of `tensor` is NaN or infinite, without another tensor of its size."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    low, high = tensor.aminmax()  # both are NaN if any value is
    return math.isfinite(low) and math.isfinite(high)


# Publishing: copies in memory are written to a staging folder, hashed, sealed and renamed once.
#
# `checkpoints/step-N/` holds `weights/` and `tensors/` (sharded safetensors, the latter of the moments),
# `rank-R.safetensors` (what rank R alone has: its random state and its strategy's own state), `state.json`, `metrics/`
# (train/metrics.py) and the manifest. A kill at any moment leaves the previous checkpoint intact.

TENSORS = "tensors"
_SPARE_BYTES = 1_000_000  # for headers and JSON


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of the state after `step`, in host memory: it does not change until it is written.

    `parts` are tensors divided over the ranks: all at once, or as many as are copied at a time; `tensor_bytes` is the
    size of all of them on all ranks. `own` is this rank's alone; `scalars` are the same on all ranks, and only the
    first has `rows`.
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
    folder: Path, world: World, spec: Spec, snapshot: Snapshot, lock: Lock, group: dist.ProcessGroup | None = None
) -> int:
    """Publish `folder/step-N`, and return its size in bytes. All ranks of `group` call it.

    On failure nothing of it stays, the previous checkpoint is untouched, and all ranks raise alike: DiskFull,
    SaveFailed, or LockLost if another process has taken over `folder`.
    """
    final = folder / step_name(snapshot.step)
    own_bytes = sum(tensor.nbytes for tensor in snapshot.own.values())
    need_bytes = snapshot.tensor_bytes + sum(together(group, folder, lambda: own_bytes)) + _SPARE_BYTES

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
        write_json(staged / STATE_NAME, {"step": snapshot.step, "world_size": world.size, **snapshot.scalars})
        entries.update({STATE_NAME: describe_file(staged / STATE_NAME), **snapshot.rows.write(staged)})
        write_manifest(
            staged, Manifest(stage="checkpoint", digest=folder.parent.name, spec=spec.to_json(), files=entries)
        )
        lock.require()
        remove_dir(final)
        publish_dir(staged, final, lock.require)

    name, free_bytes = together(group, folder, stage)[0]
    staged = Path(name)
    try:
        state_files = save_parts(staged, snapshot.parts, world, group)
        of_ranks = together(group, staged, write_own)
        entries = {name: FileEntry(**entry) for of_rank in of_ranks for name, entry in of_rank.items()}
        together(group, staged, seal)
    except DiskFull as error:
        sizes = f"a checkpoint needs {need_bytes / 1e6:,.1f} MB, {free_bytes / 1e6:,.1f} MB were free when it was begun"
        raise DiskFull(f"{error} ({sizes})") from error
    finally:
        if world.is_first:
            shutil.rmtree(staged, ignore_errors=True)
    return sum(entry.bytes for entry in entries.values())


# Reading the state of a verified checkpoint beside its tensors, and checking that it belongs to this run.

RANDOM, STRATEGY = "random.", "strategy."  # prefixes of the names in a rank's file


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return the scalars of a verified checkpoint."""
    return dict(read_json(checkpoint / STATE_NAME))


def refuse_foreign(checkpoint: Path, spec: Spec) -> None:
    """Raise IntegrityError naming the settings and inputs in which the run that left `checkpoint` differs from `spec`.

    The placement of a run is in neither, and may change.
    """

    def decisive(of: Spec) -> dict[str, Any]:
        """Return what determines the resulting weights, by a name that says where it is set."""
        named = {ROPE: f"model.{ROPE}", DEALING: "what the ranks are dealt"}
        settings = {named.get(key, f"train.{key}"): value for key, value in of.settings.items() if key != "until_step"}
        inputs = {f"the {name}": ref.digest for name, ref in of.inputs.items()}
        return {**settings, **inputs, "the version of the training code": of.version}

    def value_in(values: Mapping[str, Any], key: str) -> str:
        return repr(values[key]) if key in values else "the default"

    theirs, ours = decisive(Spec.from_json(read_manifest(checkpoint).spec, str(checkpoint))), decisive(spec)
    if differing := sorted(key for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)):
        named = "; ".join(f"{key} is {value_in(theirs, key)} there and {value_in(ours, key)} here" for key in differing)
        raise IntegrityError(
            f"{checkpoint}: left by a run that computes something else ({named}); take it away from {checkpoint.parent}"
            " to begin anew, or give the config back what differs"
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
    """Return what `own_tensors` returned on this rank; nothing if the checkpoint has another number of ranks."""
    path = checkpoint / rank_name(world.rank)
    if read_state(checkpoint)["world_size"] != world.size or not path.exists():
        return {}
    return load_file(str(path))


def strategy_state(checkpoint: Path, world: World, strategy: str) -> dict[str, Tensor]:
    """Return the own state of this rank's strategy; from another strategy or world, the loss scale alone."""
    own = read_own(checkpoint, world) if read_state(checkpoint)["strategy"] == strategy else {}
    if own:
        return {name.removeprefix(STRATEGY): tensor for name, tensor in own.items() if name.startswith(STRATEGY)}
    first = load_file(str(checkpoint / rank_name(0)))
    return {LOSS_SCALE: first[f"{STRATEGY}{LOSS_SCALE}"]} if f"{STRATEGY}{LOSS_SCALE}" in first else {}


def restore_random_state(checkpoint: Path, world: World) -> None:
    """Restore this rank's random states, as far as the checkpoint has them."""
    own = read_own(checkpoint, world)
    if f"{RANDOM}cpu" in own:
        torch.set_rng_state(own[f"{RANDOM}cpu"])
    if world.device.type == "cuda" and f"{RANDOM}cuda" in own:  # a run may move from CPUs to GPUs
        torch.cuda.set_rng_state(own[f"{RANDOM}cuda"], world.device)


# Saving in the background, one checkpoint at a time.
#
# The loop waits for the copies in host memory, and for the previous checkpoint if it is still being written: with
# buffers, the copies of both use the same memory. A failure of the thread is raised by the next `wait`, on every rank
# alike; the ranks agree on when that is (`has_failed`).


@dataclass
class Saver:
    """A publisher of snapshots of the run `spec` in `folder`, under `lock`. All ranks create and call it alike.

    The copies go to `buffers`, or else to new memory each time; `trained_parameters`, counted over all ranks, gives the
    approximate size of the buffers.
    """

    folder: Path
    world: World
    train: Train
    spec: Spec
    events: EventLog
    lock: Lock
    trained_parameters: int = 0
    buffers: HostBuffers | None = None
    _flight: Future[dict[str, Any]] | None = field(default=None, init=False)
    _expects: bool = field(default=False, init=False)  # whether the buffers know their size
    _reported_trouble: str = field(default="", init=False)
    _counted_from_s: float | None = field(default=None, init=False)  # when the last save, or the training, began
    _took_s: float = field(default=0.0, init=False)  # the last save

    def __enter__(self) -> "Saver":
        """Create the thread, and a process group for it, so that its exchanges never meet those of the training.

        Its ranks wait for each other's disks, so the group has the timeout of the start.
        """
        timeout = timedelta(seconds=self.train.start_timeout_s)
        self.group = dist.new_group(backend="gloo", timeout=timeout, group_desc=PATIENT)
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let the checkpoint that is being written finish, also if the run fails; then its own failure is not raised.

        A failed run waits for it only as long as for a peer: the lost peer may be missing in the save too.
        """
        if kind is not None and self.buffers is not None:
            self.buffers.stop_growing()
        if self._flight is not None:
            wait([self._flight], None if kind is None else self.train.timeout_s)
        self._pool.shutdown(wait=self._flight is None or self._flight.done())
        if kind is None:
            self.wait()
            if self.buffers is not None:
                self.buffers.close()

    def parts(self, strategy: Strategy, kinds: tuple[str, ...] = STATE_KINDS) -> Iterable[Mapping[str, Tensor]]:
        """Return copies of what this rank writes of `strategy`'s state: of all of it, made now.

        With `save_async: false` they are made part by part, each in the memory of the one before. Making one is a
        collective, like writing it.
        """
        sizes = strategy.state_sizes(kinds)
        if self.train.save_async:
            return [strategy.snapshot(sizes, self.copies)]
        at_once = COPIED_AT_ONCE_BYTES * self.world.size // FP32_BYTES
        return (strategy.snapshot(names, self.copies) for names in grouped(sizes, at_once))

    def copies(self, tensors: Named) -> dict[str, Tensor]:
        """Return copies of `tensors` in host memory for the next `save`. They may overwrite the copies of the last one.

        Raises ValueError if the last one is still being written; call `wait` first.
        """
        if self._flight is not None:
            raise ValueError("the checkpoint before is still being written, from the same memory")
        if self.buffers is None:
            return new_copies(tensors)
        copies = self.buffers.copies(tensors)
        if self.buffers.trouble != self._reported_trouble:
            self._reported_trouble = self.buffers.trouble
            self.events.emit(EventName.CHECKPOINT_SLOW_COPIES, reason=self._reported_trouble)
        return copies

    @property
    def has_failed(self) -> bool:
        """Return whether the save in progress has failed on this rank; another rank may learn of it a little later."""
        return self._flight is not None and self._flight.done() and self._flight.exception() is not None

    def save(self, snapshot: Snapshot, best_step: int, waited_s: float, trusted_step: int = 0) -> None:
        """Start to write `snapshot`; call `wait` first. `waited_s` is how long the loop has waited for it.

        The checkpoints of `best_step` and `trusted_step` are kept unless these are 0. With `save_async: false`, this
        one is complete on return.
        """
        self._counted_from_s = time.monotonic()
        if self.train.save_async:
            self._flight = self._pool.submit(self._publish, snapshot, best_step, waited_s, trusted_step)
        else:  # its parts are made by collectives of the training, whose thread is this one
            saved = self._publish(snapshot, best_step, waited_s, trusted_step)
            saved["wait_s"] += saved["duration_s"]
            self._tell_of(saved)

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is complete, and emit its event.

        Raises DiskFull, SaveFailed or LockLost, on all ranks alike.
        """
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._tell_of(flight.result())

    def _tell_of(self, saved: dict[str, Any]) -> None:
        self._took_s = saved["duration_s"]
        self.events.emit(EventName.CHECKPOINT_SAVED, **saved)

    @property
    def is_due(self) -> bool:
        """Return whether `save_every_steps: auto` asks for a checkpoint now, by the clock of this rank."""
        if self._flight is not None or self._counted_from_s is None:
            return False
        return time.monotonic() - self._counted_from_s >= auto_apart_s(self.train, self._took_s)

    def tell(self) -> None:
        """Emit the event of a checkpoint that has been completed meanwhile; the thread itself never emits events.

        Call it between steps. The first call, when the training has its memory, also starts to allocate the buffers.
        """
        if self.buffers is not None and self.trained_parameters and not self._expects:
            size_bytes = FP32_BYTES * len(STATE_KINDS) * self.trained_parameters // self.world.size
            self.buffers.expect(size_bytes if self.train.save_async else min(size_bytes, COPIED_AT_ONCE_BYTES))
        self._expects = True
        if self._counted_from_s is None:
            self._counted_from_s = time.monotonic()
        if self._flight is not None and self._flight.done() and not self.has_failed:
            self.wait()

    def _publish(self, snapshot: Snapshot, best_step: int, waited_s: float, trusted_step: int) -> dict[str, Any]:
        def kept_with(step: int) -> set[int]:
            """Return the steps to which the guards may go back in a run that continues from `step`, or goes on now."""
            return {self.train.guards.step_before(step + 1), trusted_step}

        def delete_others() -> None:
            if self.world.is_first:
                self.lock.require()
                retain(self.folder, self.train.keep_last, snapshot.step, best_step, kept_with)

        start_s = time.monotonic()
        size_bytes = publish_checkpoint(self.folder, self.world, self.spec, snapshot, self.lock, self.group)
        together(self.group, self.folder, delete_others)
        duration_s = round(time.monotonic() - start_s, 3)
        return {"step": snapshot.step, "bytes": size_bytes, "duration_s": duration_s, "wait_s": round(waited_s, 3)}
