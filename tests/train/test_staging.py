"""Copies for a save lie in reused memory, and are right; files are hashed while written."""

import json
import math
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from safetensors.torch import save as save_by_library
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from benchmarks.sizes import model_config
from pipeline_lib.calibrate.random_model import batch_of_documents, random_stepper, take_step
from pipeline_lib.config.train import Train
from pipeline_lib.core import files
from pipeline_lib.core.events import EventLog
from pipeline_lib.core.files import sha256_file, write_json
from pipeline_lib.core.memory import host_free_bytes
from pipeline_lib.core.store import Spec, verify
from pipeline_lib.train import checkpoint, saved_tensors, shard_files, staging
from pipeline_lib.train import saver as saving
from pipeline_lib.train.checkpoint import StateSnapshot
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.metrics import SavedRows
from pipeline_lib.train.saved_tensors import save_tensors
from pipeline_lib.train.saver import Saver
from pipeline_lib.train.shard_files import split, write_file
from pipeline_lib.train.staging import HostBuffers
from pipeline_lib.train.state import own_part
from tests.locks import hold
from tests.ranks import run_ranks
from tests.train.helpers import load_state, load_tensors
from tests.train.strategy_steps import assert_same_bits, local

WORLD = World(0, 0, 1, torch.device("cpu"))
PIECE = 4096


def lock_nothing(memory: Tensor) -> None:
    """Stands in for the page-locking of a device: ordinary memory is used in the same way."""
    assert memory.is_contiguous()
    assert memory.nbytes <= staging.PIECE_BYTES


def buffers_of(world: World = WORLD, free_bytes: int = 10**9) -> HostBuffers:
    return HostBuffers(world, lock_nothing, lock_nothing, lambda: free_bytes)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PIECE_BYTES", PIECE)


@pytest.fixture
def alone() -> Iterator[World]:
    """A process group of this process alone."""
    environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    world = World.from_env(environ, "cpu")
    os.environ.update(environ)
    try:
        with process_group(world, 30):
            yield world
    finally:
        for key in (*environ, "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(key)


def state() -> dict[str, Tensor]:
    """Tensors of many kinds, some larger than a piece."""
    drawn = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(5, 700, generator=drawn),
        "bf16": torch.randn(33, 7, generator=drawn).bfloat16(),
        "turned": torch.randn(40, 60, generator=drawn).t(),
        "number": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "bytes": torch.arange(11, dtype=torch.uint8),
        "-0 and nan": torch.tensor([-0.0, float("nan"), 1e-42]),
    }


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Also of numbers, which have no dimension."""
    flat = (
        {name: local(tensor).flatten() for name, tensor in tensors.items()}
        for tensors in (found, expected)
    )
    assert_same_bits(*flat)


def places(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel()}


def test_copies_have_the_same_bits_and_the_next_ones_take_their_place(small_pieces: None) -> None:
    buffers, tensors = buffers_of(), state()
    buffers.expect(sum(tensor.nbytes for tensor in tensors.values()))
    first = buffers.copies(tensors.items())
    same(first, tensors)
    assert {name: (t.dtype, t.shape) for name, t in first.items()} == {
        n: (t.dtype, t.shape) for n, t in state().items()
    }
    where = places(first)
    for tensor in tensors.values():
        tensor.zero_()
    same(first, state())  # they are copies
    second = buffers.copies(tensors.items())
    assert places(second) == where
    same(second, tensors)
    assert buffers.trouble == ""
    buffers.close()
    same(second, tensors)  # memory that somebody still reads is not gone


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("has_failed", [False, True])
def test_a_rank_that_ends_does_not_wait_for_its_buffers(
    alone: World, tmp_path: Path, has_failed: bool
) -> None:
    locked: list[Tensor] = []
    deadline_s = time.monotonic() + 20

    def lock(memory: Tensor) -> None:
        locked.append(memory)
        while not buffers._is_closing and time.monotonic() < deadline_s:
            time.sleep(0.001)

    buffers = HostBuffers(WORLD, lock, lock_nothing, lambda: 10**9)
    saver = Saver(
        tmp_path,
        alone,
        Train(),
        Spec("train", 1),
        EventLog(None),
        hold(tmp_path / "lock"),
        100 * PIECE,
        buffers,
    )
    with pytest.raises(RuntimeError) if has_failed else nullcontext(), saver:
        saver.emit_completed()
        if has_failed:
            raise RuntimeError("out of memory")
    buffers._pool.shutdown()  # Python waits for its thread before a process ends
    assert len(locked) <= 1


def test_more_than_was_expected_finds_more_memory_which_is_kept_too(small_pieces: None) -> None:
    buffers, tensors = buffers_of(), state()
    buffers.expect(100)
    first = buffers.copies(tensors.items())
    same(first, tensors)
    where = places(first)
    assert places(buffers.copies(tensors.items())) == where
    assert len(buffers._slabs) > 1


def test_a_host_without_room_gets_new_copies_each_time_and_says_so_once(small_pieces: None) -> None:
    buffers = buffers_of(World(0, 0, 8, torch.device("cpu"), local_size=8), free_bytes=16 * 10_000)
    tensors = state()
    first = buffers.copies(tensors.items())
    second = buffers.copies(tensors.items())
    same(first, second)
    assert first["large"].data_ptr() != second["large"].data_ptr()
    assert "which has 0.0 GB free" in buffers.trouble


def test_memory_that_cannot_be_locked_is_used_as_it_is(small_pieces: None) -> None:
    def refuse(_: Tensor) -> None:
        raise RuntimeError("CUDA error: out of memory")

    buffers, tensors = HostBuffers(WORLD, refuse, lock_nothing, lambda: 10**9), state()
    buffers.expect(10**5)
    first = buffers.copies(tensors.items())
    same(first, tensors)
    assert places(buffers.copies(tensors.items())) == places(first)
    assert "cannot be page-locked (CUDA error: out of memory)" in buffers.trouble
    buffers.close()  # nothing is unlocked


def test_a_part_of_a_tensor_stays_one(alone: World, small_pieces: None) -> None:
    whole = torch.arange(3000.0).reshape(300, 10)
    part = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
    copied = buffers_of().copies([("part", part)])["part"]
    assert isinstance(copied, DTensor)
    assert (copied.shape, copied.placements) == (part.shape, part.placements)
    assert torch.equal(copied.to_local(), whole)


def test_the_host_has_some_memory_left() -> None:
    assert 10**6 < host_free_bytes() < 10**15


def save_while_training(environ: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Three saves whose tensors change once `save` returns; what was told, where copies were."""
    world = World.from_env(environ, "cpu")
    events: list[dict[str, Any]] = []
    log = EventLog(None, (lambda name, fields: events.append(fields),))
    spec = Spec("train", 1, {}, {})
    found: dict[str, Any] = {"places": [], "refused": 0}
    with (
        process_group(world, 30),
        Saver(
            folder,
            world,
            Train(),
            spec,
            log,
            hold(folder.parent / "lock"),
            600_000,
            buffers_of(world, 10**10),
        ) as saver,
    ):
        mesh = init_device_mesh("cpu", (world.size,))
        weight = torch.zeros(300_000) if world.rank == 0 else None
        part = distribute_tensor(torch.zeros(600, 500), mesh, [Shard(0)])
        for step in (1, 2, 3):
            for tensor in (weight, part.to_local()):
                if tensor is not None:
                    tensor.fill_(step)
            saver.emit_completed()
            saver.wait()
            mine = {"weights.part": part} | ({} if weight is None else {"weights.whole": weight})
            copied = saver.copies(mine.items())
            found["places"].append(places({"part": copied["weights.part"].to_local()}))  # type: ignore[attr-defined]
            saver.save(
                StateSnapshot(
                    step, [copied], 4 * 900_000, checkpoint.own_tensors(world, {}), {}, SavedRows()
                ),
                0,
                0.0,
            )
            part.to_local().fill_(-1.0)  # the training goes on
            if weight is not None:
                weight.fill_(-1.0)
            try:
                saver.copies(mine.items())
            except ValueError as error:
                found["refused"] += "still being written" in str(error)
    return {**found, "steps": [event["step"] for event in events]}


def test_what_the_training_changes_meanwhile_is_in_no_checkpoint(tmp_path: Path) -> None:
    for found in run_ranks(save_while_training, 2, tmp_path / "checkpoints").values():
        assert found["steps"] == [1, 2, 3]
        assert found["refused"] == 3
        assert found["places"][0] == found["places"][1] == found["places"][2]
    for step in (1, 2, 3):
        path = tmp_path / "checkpoints" / f"step-{step:08d}"
        if path.exists():
            verify(path)
            loaded = {"weights.whole": torch.zeros(300_000), "weights.part": torch.zeros(600, 500)}
            load_state(path, loaded)
            assert all(tensor.eq(step).all() for tensor in loaded.values())


def compare_snapshots(
    environ: Mapping[str, str], folder: Path, runs: list[dict[str, Any]]
) -> list[list[str]]:
    """Of each strategy, that staged copies equal plain ones, before and after a step; names."""
    torch.set_num_threads(1)
    world = World.from_env(environ, "cpu")
    batch, found = batch_of_documents(64, 32, 0.5, 2048), []
    with process_group(world, 60):
        for settings in runs:
            stepper = random_stepper(
                folder, Train.model_validate({"precision": "fp32", **settings}), 1, world
            )
            strategy: Any = stepper.strategy
            buffers = buffers_of(world, 10**10)
            stepper.warm_up(batch)
            for _ in range(2):
                take_step(stepper, [batch])
                plain = strategy.snapshot()
                staged = strategy.snapshot(copied=buffers.copies)
                same(staged, plain)
                assert all(isinstance(staged[name], type(plain[name])) for name in plain)
                assert all(tensor.device.type == "cpu" for tensor in staged.values())
            found.append(sorted(staged))
    return found


def test_every_strategy_stages_what_it_would_copy(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", model_config("demo", 1))
    lora = {"method": "lora", "lora": {"rank": 2, "alpha": 4}}
    runs: list[dict[str, Any]] = [{"strategy": name} for name in ("ddp", "fsdp", "zero1", "zero3")]
    said = run_ranks(compare_snapshots, 2, tmp_path, [*runs, {"strategy": "fsdp", **lora}])
    ddp, fsdp, *_, adapters = (
        {tuple(names) for names in found} for found in zip(*said.values(), strict=True)
    )
    assert len(ddp) == 2  # each rank has others of the whole tensors
    assert len(fsdp) == 1  # and a part of each
    assert all("lora_" in name for names in adapters for name in names)


AT_ONCE_BYTES = 100_000


def _note(events: list[dict[str, Any]], name: str, fields: dict[str, Any]) -> None:
    events.append(fields)


def save_at_once_and_in_parts(
    environ: Mapping[str, str], folder: Path, runs: list[dict[str, Any]]
) -> list[list[int]]:
    """Save each strategy's state in both ways; the bytes of each part that this rank copied."""
    torch.set_num_threads(1)
    saving.COPIED_AT_ONCE_BYTES = AT_ONCE_BYTES  # type: ignore[attr-defined]
    world = World.from_env(environ, "cpu")
    batch, spec, found = batch_of_documents(64, 32, 0.5, 2048), Spec("train", 1, {}, {}), []
    with process_group(world, 60):
        for number, settings in enumerate(runs):
            stepper = random_stepper(
                folder, Train.model_validate({"precision": "fp32", **settings}), 1, world
            )
            strategy = stepper.strategy
            stepper.warm_up(batch)
            take_step(stepper, [batch])
            sizes: list[int] = []

            def measured(
                parts: Iterable[Mapping[str, Tensor]], sizes: list[int] = sizes
            ) -> Iterator[dict[str, Tensor]]:
                for part in parts:
                    sizes.append(sum(own_part(tensor).nbytes for tensor in part.values()))
                    yield dict(part)

            tensor_bytes = 4 * sum(strategy.state_sizes().values())
            for is_async in (True, False):
                events: list[dict[str, Any]] = []
                log = EventLog(None, (partial(_note, events),))
                saves, lock = folder / f"{number}-{is_async}", hold(folder / "lock")
                with Saver(saves, world, Train(save_async=is_async), spec, log, lock) as saver:
                    sizes.clear()
                    parts = measured(saver.parts(strategy))
                    own = checkpoint.own_tensors(world, strategy.own_state())
                    saver.save(StateSnapshot(1, parts, tensor_bytes, own, {}, SavedRows()), 0, 0.0)
                    # complete on return
                    assert is_async or events[0]["wait_s"] == events[0]["duration_s"]
            found.append(list(sizes))
    return found


def test_a_part_is_gone_before_the_next_is_made(tmp_path: Path) -> None:
    """Otherwise copies would take twice the memory that the plan counts for them."""
    alive: list[int] = []

    def made() -> Iterator[dict[str, Tensor]]:
        made_before: list[weakref.ref[Tensor]] = []
        for name in "abc":
            alive.append(sum(part() is not None for part in made_before))
            part = {name: torch.zeros(4)}
            made_before.append(weakref.ref(part[name]))
            yield part
            del part

    written = saved_tensors.save_parts(tmp_path, map(dict, made()), WORLD)
    assert (len(written), alive) == (3, [0, 0, 0])


def test_a_checkpoint_is_the_same_if_little_of_it_is_copied_at_a_time(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", model_config("demo", 1))
    runs: list[dict[str, Any]] = [{"strategy": name} for name in ("ddp", "fsdp", "zero2", "zero3")]
    of_ranks = run_ranks(save_at_once_and_in_parts, 2, tmp_path, runs)
    for number in range(len(runs)):
        at_once, in_parts = (
            tmp_path / f"{number}-{is_async}" / "step-00000001" for is_async in (True, False)
        )
        shapes = {name: saved.shape for name, saved in saved_tensors.find_state(at_once).items()}
        assert {
            name: saved.shape for name, saved in saved_tensors.find_state(in_parts).items()
        } == shapes
        largest_bytes = 4 * max(math.prod(shape) for shape in shapes.values())
        for sizes in (found[number] for found in of_ranks.values()):
            assert len(sizes) > 5
            assert max(sizes) <= max(AT_ONCE_BYTES * 1.5, largest_bytes)
        loaded = []
        for folder in (at_once, in_parts):
            verify(folder)
            loaded.append({name: torch.empty(shape) for name, shape in shapes.items()})
            load_state(folder, loaded[-1])
        same(*loaded)


def header_of(path: Path) -> tuple[Any, dict[str, Any], bytes]:
    """Tensors and metadata of a safetensors file, and the bytes of the data."""
    with safe_open(path, "pt") as file:
        metadata = {
            key: json.loads(text) if text[0] == "{" else text
            for key, text in file.metadata().items()
        }
        named = {
            name: (file.get_slice(name).get_shape(), file.get_slice(name).get_dtype())
            for name in file.keys()  # noqa: SIM118 - it is no mapping
        }
    content = path.read_bytes()
    return named, metadata, content[8 + int.from_bytes(content[:8], "little") :]


def test_a_file_is_what_the_library_writes_and_is_hashed_on_the_way(tmp_path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in state().items()}
    entry = write_file(tmp_path / "ours", tensors, {"format": "pt"})
    (tmp_path / "theirs").write_bytes(save_by_library(tensors, {"format": "pt"}))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert (entry.sha256, entry.bytes) == (
        sha256_file(tmp_path / "ours"),
        (tmp_path / "ours").stat().st_size,
    )
    write_file(tmp_path / "bare", tensors, {})
    assert (tmp_path / "bare").read_bytes() == save_by_library(tensors)


def test_the_folder_is_what_torch_writes(alone: World, tmp_path: Path) -> None:
    part = distribute_tensor(torch.randn(20, 3), init_device_mesh("cpu", (1,)), [Shard(0)])
    tensors = {**{name: tensor.contiguous() for name, tensor in state().items()}, "part": part}
    written = save_tensors(tmp_path / "ours", tensors)
    save_by_torch(
        tensors,
        storage_writer=HuggingFaceStorageWriter(str(tmp_path / "theirs"), save_distributed=True),
    )
    names = sorted(path.name for path in (tmp_path / "theirs").iterdir())
    assert sorted(path.name for path in (tmp_path / "ours").iterdir()) == names == sorted(written)
    for name in names:
        assert header_of(tmp_path / "ours" / name) == header_of(tmp_path / "theirs" / name)


def test_much_is_written_to_several_files_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "LEAST_FILE_BYTES", 5000)
    monkeypatch.setattr(files, "COPIED_AT_ONCE", 1000)
    tensors = {f"weights.{number}": torch.randn(number, 100) for number in range(1, 12)}
    assert [len(file) for file in split({})] == []
    written = save_tensors(tmp_path, tensors)
    assert sorted(written) == [
        f"shard-00001-model-{number:05d}-of-00004.safetensors" for number in (1, 2, 3, 4)
    ]
    assert all(entry.sha256 == sha256_file(tmp_path / name) for name, entry in written.items())
    sizes = [entry.bytes for entry in written.values()]
    assert max(sizes) < 1.5 * min(sizes)
    assert sum(len(load_file(tmp_path / name)) for name in written) == len(tensors)
    loaded = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_tensors(tmp_path, loaded)
    same(loaded, tensors)
