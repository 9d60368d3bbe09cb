"""Checkpoints are whole or absent, chosen by bytes, limited in number, written beside training."""

import errno
import os
import pickletools
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from pipeline_lib.config.train import Train
from pipeline_lib.core import files
from pipeline_lib.core.errors import DiskFull, IntegrityError, LockLost, PipelineError
from pipeline_lib.core.events import EventLog
from pipeline_lib.core.files import sha256_file
from pipeline_lib.core.lock import Lock
from pipeline_lib.core.run_folder import newest_valid, retain
from pipeline_lib.core.store import Ref, Spec
from pipeline_lib.train import checkpoint, saved_tensors
from pipeline_lib.train.checkpoint import StateSnapshot, publish_checkpoint
from pipeline_lib.train.dist import World, process_group
from pipeline_lib.train.metrics import SavedRows
from pipeline_lib.train.saver import Saver
from pipeline_lib.train.shard_files import write_file
from pipeline_lib.train.together import SaveFailed
from tests.locks import hold, take_over
from tests.processes import free_port, lines_of, wait_for
from tests.ranks import rank_environment, run_ranks
from tests.train.conftest import small_disk
from tests.train.helpers import load_state, load_tensors, read_rows

SPEC = Spec(
    "train",
    3,
    {"lr": 1e-4, "epochs": 2},
    {"model": Ref("download", "m"), "shard": Ref("shard", "s")},
)


def snapshot_of(world: World, step: int, size: int) -> StateSnapshot:
    """A state after `step`: a tensor full of its number on one rank, a sharded one, the rank's."""
    mesh = init_device_mesh("cpu", (world.size,))
    whole = (
        {"weights.a": torch.full((size,), float(step))} if world.rank == step % world.size else {}
    )
    sharded = distribute_tensor(torch.arange(6.0).reshape(3, 2) + step, mesh, [Shard(0)])
    own = {
        "random.cpu": torch.get_rng_state(),
        "strategy.residual": torch.full((3,), float(world.rank)),
    }
    rows = SavedRows(latest=({"step": step},))
    parts = [{**whole, "weights.b": sharded}]
    return StateSnapshot(step, parts, 4 * (size + 6), own, {"attempt": 1, "strategy": "ddp"}, rows)


def lock_of(folder: Path) -> Lock:
    """The checkpoints' lock in `folder`, held by each rank that asks; not on a filled disk.

    Some tests fill their disk.
    """
    return hold(folder.parent.parent / f"{folder.parent.name}.lock")


def save(environ: Mapping[str, str], folder: Path, steps: list[int], size: int) -> None:
    """Save a checkpoint at each of `steps`."""
    world = World.from_env(environ, "cpu")
    with process_group(world, 30):
        for step in steps:
            publish_checkpoint(folder, world, SPEC, snapshot_of(world, step, size), lock_of(folder))


def what_saving_without_the_lock_says(environ: Mapping[str, str], folder: Path) -> str:
    """The error of a save, and of deletions after it, where another owner took the lock."""
    world = World.from_env(environ, "cpu")
    with process_group(world, 30):
        lock = lock_of(folder)
        dist.barrier()
        if world.is_first:
            take_over(lock.path)
        dist.barrier()
        try:
            publish_checkpoint(folder, world, SPEC, snapshot_of(world, 9, 16), lock)
        except LockLost as error:
            return str(error)
    raise AssertionError("was to fail")


def test_nothing_is_published_without_the_lock(folder: Path) -> None:
    """Not in the place of the next owner's checkpoint either."""
    before = {path: sha256_file(path) for path in folder.rglob("*") if path.is_file()}

    said = run_ranks(what_saving_without_the_lock_says, 2, folder)

    assert said[0] == said[1]
    assert "was taken over by process 4711 on elsewhere" in said[0]
    assert {path: sha256_file(path) for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "is_lost_to", ["remove_dir", "publish_dir"], ids=["before", "while the old one goes"]
)
def test_a_lock_that_is_lost_at_the_last_moment_keeps_the_checkpoint_from_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost_to: str
) -> None:
    """Another host may take over at any time, and publish a checkpoint of the same step."""
    folder, act = tmp_path / "checkpoints", getattr(checkpoint, is_lost_to)
    lock, world = lock_of(folder), World(0, 0, 1, torch.device("cpu"))

    def act_late(*arguments: Any) -> Any:
        take_over(lock.path)
        return act(*arguments)

    monkeypatch.setattr(checkpoint, is_lost_to, act_late)
    snapshot = StateSnapshot(
        9, [{"weights.a": torch.zeros(8)}], 32, {}, {"strategy": "ddp"}, SavedRows(latest=())
    )
    with pytest.raises(LockLost):
        publish_checkpoint(folder, world, SPEC, snapshot, lock)
    assert names_in(folder) == []


def test_what_the_next_owner_has_saved_is_not_forgotten(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is lost after a save, before older checkpoints are deleted."""
    lock, world = lock_of(folder), World(0, 0, 1, torch.device("cpu"))
    saver = Saver(
        folder, world, Train(keep_last=1, save_async=False), SPEC, EventLog(None, ()), lock
    )
    saver.group = None  # its ranks are this one alone

    def publish(*_: Any) -> int:
        take_over(lock.path)
        return 0

    monkeypatch.setattr("pipeline_lib.train.saver.publish_checkpoint", publish)
    before = names_in(folder)
    with pytest.raises(LockLost):
        saver.save(StateSnapshot(9, [], 0, {}, {}, SavedRows(latest=())), 0, 0.0)
    assert names_in(folder) == before


def test_each_rank_puts_the_files_that_it_writes_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank, which publishes, may be elsewhere: it cannot flush what others remember."""
    flushed = set[int]()
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.add(os.fstat(descriptor).st_ino))
    path = tmp_path / "rank.safetensors"
    write_file(path, {"a": torch.zeros(8)}, {})
    assert path.stat().st_ino in flushed


def what_saving_says(environ: Mapping[str, str], folder: Path, size: int) -> str:
    """The error of a save that cannot be made."""
    try:
        save(environ, folder, [2], size)
    except PipelineError as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("was to fail")


@contextmanager
def saver_of(
    environ: Mapping[str, str], folder: Path, **settings: Any
) -> Iterator[tuple[Saver, list[dict[str, Any]]]]:
    """A saver within a process group, and the events that it emits."""
    world = World.from_env(environ, "cpu")
    events: list[dict[str, Any]] = []
    log = EventLog(None, (lambda name, fields: events.append(fields),))
    lock = lock_of(folder)
    with (
        process_group(world, 30),
        Saver(folder, world, Train(**settings), SPEC, log, lock) as saver,
    ):
        yield saver, events


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "checkpoints"
    run_ranks(save, 2, path, [3, 6, 9], 8)
    return path


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def rejected(folder: Path, max_step: int = 99) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint and the names of those that were set aside."""
    names: list[str] = []
    found = newest_valid(folder, max_step, lambda path, reason: names.append(path.name))
    return found, names


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_up_to_a_step_is_found_and_loads(folder: Path) -> None:
    assert rejected(folder) == (folder / "step-00000009", [])
    found, _ = rejected(folder, max_step=8)
    assert found == folder / "step-00000006"
    tensors = {"weights.a": torch.zeros(8), "weights.b": torch.zeros(3, 2)}
    load_state(found, tensors)
    assert tensors["weights.a"].tolist() == [6.0] * 8
    assert tensors["weights.b"].tolist() == [[6, 7], [8, 9], [10, 11]]
    assert checkpoint.read_state(found) == {
        "step": 6,
        "world_size": 2,
        "attempt": 1,
        "strategy": "ddp",
    }
    assert read_rows(found) == [{"step": 6}]


def test_a_result_is_links_to_a_checkpoints_weights_where_it_has_such_files(
    folder: Path, tmp_path: Path
) -> None:
    source, target = folder / "step-00000009", tmp_path / "out" / "weights"
    assert saved_tensors.link_weights(source, target)
    loaded = {"a": torch.zeros(8)}
    load_tensors(target, loaded)
    assert loaded["a"].tolist() == [9.0] * 8
    shutil.rmtree(target)
    (source / "weights").rename(source / "elsewhere")  # earlier code had them in `tensors`
    assert not saved_tensors.link_weights(source, target)
    assert not target.exists()


def test_each_rank_gets_back_what_it_alone_has_if_there_are_as_many(saved: Path) -> None:
    path = saved / "step-00000009"
    for rank in range(2):
        world = World(rank, rank, 2, torch.device("cpu"))
        own = checkpoint.read_own(path, world)
        assert checkpoint.strategy_state(path, world, "ddp")["residual"].tolist() == [rank] * 3
        assert checkpoint.strategy_state(path, world, "fsdp") == {}
        assert own["random.cpu"].dtype == torch.uint8
    assert checkpoint.read_own(path, World(0, 0, 3, torch.device("cpu"))) == {}


@pytest.mark.parametrize(
    "victim", ["weights/*.safetensors", "rank-00001.safetensors", "state.json", "metrics/*.jsonl"]
)
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "add"])
def test_damage_to_any_file_is_seen_and_the_one_before_is_used(
    folder: Path, victim: str, damage: str
) -> None:
    path = sorted((folder / "step-00000009").glob(victim))[0]
    content = path.read_bytes()
    if damage == "flip":
        path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    elif damage == "truncate":
        path.write_bytes(content[:-1])
    elif damage == "remove":
        path.unlink()
    else:
        path.with_name("more").write_bytes(content)
    assert rejected(folder) == (folder / "step-00000006", ["rejected-step-00000009"])
    assert rejected(folder) == (folder / "step-00000006", [])


def test_a_damaged_manifest_is_seen_and_without_one_there_is_no_checkpoint(folder: Path) -> None:
    path = folder / "step-00000009" / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])
    assert rejected(folder) == (folder / "step-00000006", ["rejected-step-00000009"])
    (folder / "step-00000006" / "manifest.json").unlink()
    assert rejected(folder) == (folder / "step-00000003", [])


@pytest.mark.parametrize(
    "name", ["step-12", "step-00000012.bak", "xstep-00000012", "step-0000001x"]
)
def test_other_names_are_not_mistaken_for_steps(folder: Path, name: str) -> None:
    (folder / "step-00000009").rename(folder / name)
    assert rejected(folder) == (folder / "step-00000006", [])


@pytest.mark.parametrize(
    "kept",
    [{"best_step": 3}, {"kept_with": lambda step: {step // 6 * 3}}],
    ids=["the best", "what guards go back to"],
)
def test_retention_keeps_the_newest_and(folder: Path, kept: dict[str, Any]) -> None:
    retain(folder, 1, step=9, **kept)
    assert names_in(folder) == ["step-00000003", "step-00000009"]
    retain(folder, 1, step=9)
    assert names_in(folder) == ["step-00000009"]


def test_what_the_guards_may_need_is_one_of_those_that_are_kept(folder: Path) -> None:
    retain(folder, 2, step=9, kept_with=lambda step: {3})
    assert names_in(folder) == ["step-00000003", "step-00000009"]


def test_what_the_guards_may_need_is_no_further_one_if_it_is_among_the_newest(folder: Path) -> None:
    retain(folder, 2, step=9, kept_with=lambda step: {6})
    assert names_in(folder) == ["step-00000006", "step-00000009"]


def test_retention_counts_only_what_is_sealed(folder: Path) -> None:
    """Else the last that can be used would be deleted in favour of one that cannot."""
    (folder / "step-00000009" / "manifest.json").unlink()
    retain(folder, 1, step=9)
    assert rejected(folder) == (folder / "step-00000006", [])


def test_retention_does_not_count_what_a_longer_run_left(folder: Path) -> None:
    """A run that is told to stop earlier, after a longer one, keeps what it saves."""
    retain(folder, 1, step=3)
    assert len(names_in(folder)) == 3
    retain(folder, 1, step=6)
    assert names_in(folder) == ["step-00000006", "step-00000009"]


def test_debris_of_killed_saves_is_swept(folder: Path) -> None:
    (folder / ".stage-step-00000012-abc").mkdir()
    (folder / ".trash-step-00000003-abc").mkdir()
    files.sweep(folder, "step-")
    assert names_in(folder) == ["step-00000003", "step-00000006", "step-00000009"]


def test_nothing_in_a_checkpoint_is_a_pickle(saved: Path) -> None:
    for path in (path for path in saved.rglob("*") if path.is_file()):
        assert path.suffix in (".safetensors", ".json", ".jsonl")
        with pytest.raises(ValueError, match=r"opcode|exhausted|pickle"):
            list(pickletools.genops(path.read_bytes()))


def test_the_checkpoint_of_another_run_is_refused_naming_what_differs(saved: Path) -> None:
    path = saved / "step-00000009"
    checkpoint.refuse_foreign(path, SPEC)
    checkpoint.refuse_foreign(
        path, Spec(SPEC.stage, 3, {**SPEC.settings, "until_step": 4}, SPEC.inputs)
    )
    foreign = Spec(
        "train",
        3,
        {"lr": 3e-4, "seed": 1, "epochs": 2},
        {**SPEC.inputs, "shard": Ref("shard", "other")},
    )
    with pytest.raises(IntegrityError) as refused:
        checkpoint.refuse_foreign(path, foreign)
    for part in (
        str(path),
        "train.lr is 0.0001 there and 0.0003 here",
        "train.seed is the default there and 1 here",
        "the shard is 's' there and 'other' here",
    ):
        assert part in str(refused.value)
    assert "epochs" not in str(refused.value)


def save_in_turn(environ: Mapping[str, str], folder: Path) -> dict[str, Any]:
    """Begin three saves, and change the saved while they are written: what the saver shows."""
    with saver_of(environ, folder, keep_last=2) as (saver, events):
        seen: dict[str, Any] = {"after": []}
        for step in (1, 2, 3):
            snapshot = snapshot_of(saver.world, step, 3_000_000)
            saver.wait()
            saver.save(snapshot, 0, waited_s=step)
            seen["after"].append(len(events))
        saver.wait()
        return {**seen, "events": events}


def test_the_loop_goes_on_while_a_checkpoint_is_written_and_the_next_waits_for_it(
    tmp_path: Path,
) -> None:
    for seen in run_ranks(save_in_turn, 2, tmp_path / "checkpoints").values():
        assert seen["after"] == [0, 1, 2]  # one in flight, told of when it was sealed
        assert [(event["step"], event["wait_s"]) for event in seen["events"]] == [
            (1, 1),
            (2, 2),
            (3, 3),
        ]
    assert names_in(tmp_path / "checkpoints") == ["step-00000002", "step-00000003"]
    for step in (2, 3):
        loaded = {"weights.a": torch.zeros(3_000_000)}
        load_state(tmp_path / "checkpoints" / f"step-{step:08d}", loaded)
        assert loaded["weights.a"].eq(step).all()


def fail_while_another_error_is_raised(environ: Mapping[str, str], folder: Path) -> str:
    """The error that comes out when the training fails while a checkpoint is written."""
    try:
        with saver_of(environ, folder) as (saver, _):
            saver.save(snapshot_of(saver.world, 1, 2_000_000), 0, 0.0)
            raise KeyError("of the training")
    except KeyError as error:
        return str(error)


def test_a_run_that_fails_lets_the_checkpoint_become_whole(tmp_path: Path) -> None:
    said = run_ranks(fail_while_another_error_is_raised, 2, tmp_path / "checkpoints")
    assert set(said.values()) == {"'of the training'"}
    assert rejected(tmp_path / "checkpoints") == (tmp_path / "checkpoints" / "step-00000001", [])
    assert names_in(tmp_path / "checkpoints") == ["step-00000001"]


def fail_beside_the_loop(environ: Mapping[str, str], folder: Path) -> str:
    """The error of a save that fails in its thread, as `wait` raises it."""
    with saver_of(environ, folder) as (saver, _):
        saver.save(snapshot_of(saver.world, 1, 8), 0, 0.0)
        while not saver.has_failed:
            time.sleep(0.01)
        try:
            saver.wait()
        except SaveFailed as error:
            return str(error)
    raise AssertionError("was to fail")


def fail_to_forget(environ: Mapping[str, str], folder: Path) -> str:
    """The error of a save after which old checkpoints stay, which only the first rank deletes."""
    with (
        pytest.MonkeyPatch.context() as patch,
        saver_of(environ, folder, keep_last=1) as (saver, _),
    ):
        patch.setattr(files, "remove_dir", refuse)
        try:
            for step in (1, 2):
                saver.save(snapshot_of(saver.world, step, 8), 0, 0.0)
                saver.wait()
        except SaveFailed as error:
            return str(error)
    raise AssertionError("was to fail")


def refuse(path: Path) -> None:
    raise PermissionError(errno.EACCES, "Permission denied", str(path))


def test_a_failure_to_delete_reaches_all_ranks(tmp_path: Path) -> None:
    said = run_ranks(fail_to_forget, 2, tmp_path / "checkpoints")
    assert said[0] == said[1]
    assert "rank 0" in said[0] and "Permission denied" in said[0]


def test_a_failure_of_one_rank_in_the_thread_reaches_all_with_the_same_words(
    tmp_path: Path,
) -> None:
    """A file lies where the folder should be; only the first rank meets it."""
    (tmp_path / "checkpoints").write_text("no folder")
    said = run_ranks(fail_beside_the_loop, 2, tmp_path / "checkpoints")
    assert said[0] == said[1]
    assert "rank 0" in said[0]
    assert str(tmp_path / "checkpoints") in said[0]


@pytest.mark.root
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("size=3m", r"needs 5\.0 MB, and \d\.\d MB are free"),
        ("size=9m,nr_inodes=13", r"needs 5\.0 MB, \d\.\d MB were"),
    ],
)
def test_a_full_disk_is_told_on_every_rank_and_leaves_the_one_before(
    tmp_path: Path, options: str, said: str
) -> None:
    """The first is seen before anything is written, the second only when a file cannot be made."""
    with small_disk(tmp_path / "small", options) as disk:
        folder = disk / "checkpoints"
        run_ranks(save, 2, folder, [1], 8)
        errors = run_ranks(what_saving_says, 2, folder, 1_000_000)
        assert errors[0] == errors[1]
        assert errors[0].startswith(DiskFull.__name__)
        assert re.search(said, errors[0]), errors[0]
        assert names_in(folder) == ["step-00000001"]
        assert rejected(folder) == (folder / "step-00000001", [])


def save_for_ever(environ: Mapping[str, str], folder: Path, acknowledged: Path) -> None:
    """Save again and again, writing down what was said to be sealed; to be killed."""
    os.environ.update(environ)
    with saver_of(environ, folder, keep_last=2) as (saver, events):
        for step in range(1, 100_000):
            snapshot = snapshot_of(saver.world, step, 200_000)
            saver.wait()
            if saver.world.is_first and events:
                with acknowledged.open("a") as file:
                    file.write(f"{events[-1]['step']}\n")
            saver.save(snapshot, 0, 0.0)


@pytest.mark.slow
def test_a_kill_at_any_moment_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    context, chance = get_context("forkserver"), random.Random(4)
    context.set_forkserver_preload(["pipeline_lib.train.rank"])
    cut_short = 0
    for seed in range(20):
        folder, acknowledged = tmp_path / str(seed), tmp_path / f"acknowledged-{seed}"
        port = free_port()
        ranks = [
            context.Process(
                target=save_for_ever, args=(rank_environment(rank, 2, port), folder, acknowledged)
            )
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        wait_for(lambda at=acknowledged: bool(lines_of(at)), "the first checkpoint")  # type: ignore[misc]
        time.sleep(chance.uniform(0.0, 0.1))
        for process in chance.sample(ranks, 2):
            os.kill(process.pid or 0, signal.SIGKILL)
        for process in ranks:
            process.join()
        cut_short += len(list(folder.glob(f"{files.STAGE_PREFIX}*")))
        files.sweep(folder, "step-")
        found, damaged = rejected(folder)
        assert found is not None
        assert damaged == []
        step = int(found.name.removeprefix("step-"))
        assert step >= int(lines_of(acknowledged)[-1])
        loaded = {"weights.a": torch.zeros(200_000), "weights.b": torch.zeros(3, 2)}
        load_state(found, loaded)
        assert loaded["weights.a"].eq(step).all()
        assert loaded["weights.b"].flatten().tolist() == [step + n for n in range(6)]
    assert cut_short > 0, "no kill came in the middle of a save"
