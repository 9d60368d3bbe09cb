import errno
import os
import signal
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import save_file

from pipeline_lib.core import files
from pipeline_lib.core.errors import DataError, DiskFull, IntegrityError, LockLost
from pipeline_lib.core.files import list_files, sha256_file
from pipeline_lib.core.lock import holder
from pipeline_lib.core.stage import Job, open_sealed, processor, run_stage
from pipeline_lib.core.store import MANIFEST_NAME, Spec, Store, verify
from tests.locks import take_over
from tests.processes import FORK, finish, lines_of, running, wait_for

SPEC = Spec("tokenize", 1, {"max_tokens": 64})


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def silent(text: str) -> None:
    """Say nothing."""


def write_rows(job: Job) -> dict[str, Any]:
    """Write a file and count the call in the working directory, which outlives a failure."""
    with (job.run_dir / "calls").open("a") as file:
        file.write(f"{os.getpid()}\n")
    (job.out / "rows.txt").write_text("a\nb\n")
    return {"rows": 2}


def calls(store: Store, spec: Spec = SPEC) -> int:
    return len(lines_of(store.run_dir(spec.digest) / "calls"))


def everything_below(store: Store) -> set[str]:
    return {path.relative_to(store.root).as_posix() for path in store.root.rglob("*")}


def test_a_stage_leaves_a_sealed_directory_and_its_pointer(store: Store) -> None:
    said = list[str]()

    manifest = run_stage(write_rows, SPEC, store, said.append)

    sealed = store.sealed(SPEC.ref)
    assert verify(sealed) == manifest
    assert everything_below(store) == {
        "tokenize",
        f"tokenize/{SPEC.digest}",
        f"tokenize/{SPEC.digest}/rows.txt",
        f"tokenize/{SPEC.digest}/manifest.json",
        f"tokenize/{SPEC.digest}.ok",
    }
    assert store.pointer(SPEC.ref).read_text().strip() == sha256_file(sealed / MANIFEST_NAME)
    assert said[-1].startswith(f"tokenize {SPEC.digest}: done in ")


def test_a_file_whose_hash_the_stage_knows_is_not_read_to_be_sealed(store: Store) -> None:
    def write(job: Job) -> dict[str, Any]:
        (job.out / "weights").mkdir()
        for name in ("weights/known", "weights/other"):
            (job.out / name).write_text("some")
        # that of another content, so that it shows where it came from
        job.hashes["weights/known"] = "0" * 64
        return {}

    files_of = run_stage(write, SPEC, store, silent).files
    assert (files_of["weights/known"].bytes, files_of["weights/known"].sha256) == (4, "0" * 64)
    assert files_of["weights/other"].sha256 == sha256_file(store.sealed(SPEC.ref) / "weights/other")
    with pytest.raises(IntegrityError, match="weights/known: content differs"):
        verify(store.sealed(SPEC.ref))


@pytest.mark.parametrize(("umask", "of_folder"), [(0o002, 0o775), (0o022, 0o755), (0o077, 0o700)])
def test_what_is_sealed_has_the_modes_of_the_umask_whoever_wrote_it(
    store: Store, tmp_path: Path, umask: int, of_folder: int
) -> None:
    """Libraries write through private temporary files; hard links stay as their other name.

    Also through private temporary folders.
    """
    linked = tmp_path / "linked"
    linked.write_text("a user's")
    linked.chmod(0o604)

    def write_privately(job: Job) -> dict[str, Any]:
        descriptor, path = tempfile.mkstemp(dir=job.out)
        os.close(descriptor)
        Path(path).rename(job.out / "file")
        Path(tempfile.mkdtemp(dir=job.out)).rename(job.out / "folder")
        (job.out / "folder" / "inner").touch(0o600)
        (job.out / "linked").hardlink_to(linked)
        return {}

    before = os.umask(umask)
    try:
        run_stage(write_privately, SPEC, store, silent)
    finally:
        os.umask(before)

    sealed = store.sealed(SPEC.ref)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (sealed, *sealed.rglob("*"))}
    assert modes.pop("linked") == 0o604
    of_file = of_folder & 0o666
    assert modes == {
        sealed.name: of_folder,
        "folder": of_folder,
        "file": of_file,
        "inner": of_file,
        MANIFEST_NAME: of_file,
    }


def test_the_manifest_says_what_was_made_from_what_and_with_what(store: Store) -> None:
    upstream = run_stage(write_rows, SPEC, store, silent)
    spec = Spec("shard", 1, {"shards": 2}, {"tokens": SPEC.ref})

    environ = {"ATEN_CPU_CAPABILITY": "default", "HOME": "/home/me"}
    manifest = run_stage(lambda job: {"blocks": 3}, spec, store, silent, environ=environ)

    assert processor({}) in manifest.machine
    assert "ATEN_CPU_CAPABILITY=default" in manifest.machine
    assert "/home/me" not in manifest.machine
    assert (manifest.stage, manifest.digest, manifest.spec) == (
        "shard",
        spec.digest,
        spec.to_json(),
    )
    assert manifest.counts == {"blocks": 3}
    assert manifest.inputs["tokens"].digest == upstream.digest
    assert manifest.inputs["tokens"].manifest_sha256 == sha256_file(
        store.sealed(SPEC.ref) / MANIFEST_NAME
    )
    assert {"python", "numpy", "torch", "transformers"} <= manifest.versions.keys()
    assert manifest.peak_rss_bytes > 10_000_000
    assert manifest.duration_s >= 0


def test_a_second_run_verifies_and_keeps(store: Store) -> None:
    first = run_stage(write_rows, SPEC, store, silent)
    inode = store.sealed(SPEC.ref).stat().st_ino
    store.pointer(SPEC.ref).unlink()  # as Snakemake does before it starts a job
    said = list[str]()

    second = run_stage(write_rows, SPEC, store, said.append)

    assert second == first
    assert calls(store) == 1
    assert store.sealed(SPEC.ref).stat().st_ino == inode
    assert store.pointer(SPEC.ref).exists()
    assert said == [f"tokenize {SPEC.digest}: already done, verified"]


@pytest.mark.parametrize("error", [DataError("row 3"), KeyboardInterrupt()])
def test_a_failure_leaves_no_debris_and_no_pointer(store: Store, error: BaseException) -> None:
    def fail(job: Job) -> dict[str, Any]:
        write_rows(job)
        raise error

    with pytest.raises(type(error)):
        run_stage(fail, SPEC, store, silent)

    assert everything_below(store) == {"tokenize"}
    assert calls(store) == 1, "what is in the working directory stays"
    assert not store.lock_path(SPEC.digest).exists()
    assert run_stage(write_rows, SPEC, store, silent).counts == {"rows": 2}


def test_a_damaged_result_is_refused_with_its_remedy(store: Store) -> None:
    run_stage(write_rows, SPEC, store, silent)
    sealed = store.sealed(SPEC.ref)
    (sealed / "rows.txt").write_text("a\nc\n")
    store.pointer(SPEC.ref).unlink()

    with pytest.raises(IntegrityError, match=f"delete {sealed} and run snakemake again"):
        run_stage(write_rows, SPEC, store, silent)

    assert (sealed / "rows.txt").read_text() == "a\nc\n", "evidence is not destroyed"
    assert not store.pointer(SPEC.ref).exists()
    assert calls(store) == 1


def test_an_input_that_lacks_a_file_stops_the_stage_before_it_starts(store: Store) -> None:
    run_stage(write_rows, SPEC, store, silent)
    (store.sealed(SPEC.ref) / "rows.txt").unlink()
    spec = Spec("shard", 1, {}, {"tokens": SPEC.ref})

    with pytest.raises(IntegrityError, match="rows.txt: missing"):
        run_stage(write_rows, spec, store, silent)

    assert calls(store, spec) == 0


def write_two_files(job: Job) -> dict[str, Any]:
    for name in ("read", "left"):
        (job.out / name).write_text(name)
    return {}


def test_a_damaged_file_stops_the_stage_that_reads_it_and_no_other(store: Store) -> None:
    run_stage(write_two_files, SPEC, store, silent)
    spec = Spec("shard", 1, {}, {"tokens": SPEC.ref})
    (store.sealed(SPEC.ref) / "left").write_text("LEFT")

    def read(job: Job) -> dict[str, Any]:
        return {"read": job.inputs["tokens"].file("read").read_text()}

    assert run_stage(read, spec, store, silent).counts == {"read": "read"}
    with pytest.raises(IntegrityError, match="left: content differs"):
        open_sealed(SPEC.ref, store).folder()
    assert open_sealed(SPEC.ref, store).folder("r*") == store.sealed(SPEC.ref)

    (store.sealed(SPEC.ref) / "read").write_text("READ")
    with pytest.raises(IntegrityError, match="read: content differs"):
        run_stage(read, Spec("shard", 2, {}, {"tokens": SPEC.ref}), store, silent)
    assert not open_sealed(SPEC.ref, store).file("never sealed").exists()


def test_an_input_under_the_name_of_another_is_refused(store: Store) -> None:
    run_stage(write_rows, SPEC, store, silent)
    other = Spec("tokenize", 1, {"max_tokens": 65})
    store.sealed(SPEC.ref).rename(store.sealed(other.ref))

    with pytest.raises(IntegrityError, match=f"sealed as tokenize {SPEC.digest}"):
        run_stage(write_rows, Spec("shard", 1, {}, {"tokens": other.ref}), store, silent)


def test_a_directory_without_a_manifest_is_made_anew(store: Store) -> None:
    (store.sealed(SPEC.ref) / "half").mkdir(parents=True)

    run_stage(write_rows, SPEC, store, silent)

    assert list_files(store.sealed(SPEC.ref)) == ["manifest.json", "rows.txt"]


def fill_slowly(job: Job) -> dict[str, Any]:
    counts = write_rows(job)
    sleep(0.2)
    return counts


def run_with_barrier(store: Store, barrier: Any) -> None:
    barrier.wait()
    run_stage(fill_slowly, SPEC, store, silent)


def test_of_processes_that_run_the_same_stage_one_computes(store: Store) -> None:
    barrier = FORK.Barrier(4)
    racers = [FORK.Process(target=run_with_barrier, args=(store, barrier)) for _ in range(4)]
    for racer in racers:
        racer.start()
    finish([*racers])

    assert calls(store) == 1
    assert verify(store.sealed(SPEC.ref)).counts == {"rows": 2}


def publish_behind_its_back(job: Job) -> dict[str, Any]:
    """Somebody without our lock (another view of a network disk) is faster."""
    faster = Store(job.store.root.parent / "elsewhere" / "store")
    run_stage(write_rows, job.spec, faster, silent)
    faster.sealed(job.spec.ref).rename(job.store.sealed(job.spec.ref))
    return {"rows": "the loser's"}


def test_the_loser_of_a_race_keeps_the_verified_winner(store: Store) -> None:
    manifest = run_stage(publish_behind_its_back, SPEC, store, silent)

    assert manifest.counts == {"rows": 2}
    assert sorted(path.name for path in (store.root / "tokenize").iterdir()) == [
        SPEC.digest,
        f"{SPEC.digest}.ok",
    ]


def test_a_stage_that_lost_its_lock_seals_nothing(store: Store) -> None:
    def lose_it(job: Job) -> dict[str, Any]:
        take_over(job.lock.path)
        return write_rows(job)

    with pytest.raises(LockLost, match="was taken over by process 4711 on elsewhere"):
        run_stage(lose_it, SPEC, store, silent)

    assert everything_below(store) == {"tokenize"}
    assert holder(store.lock_path(SPEC.digest)) is not None, "the next owner's lock stays"


def fill_for_ever(job: Job) -> dict[str, Any]:
    write_rows(job)
    sleep(600)
    return {}


def run_for_ever(store: Store) -> None:
    run_stage(fill_for_ever, SPEC, store, silent)


def test_after_a_kill_the_same_command_does_the_work(store: Store) -> None:
    with running(run_for_ever, store) as child:
        wait_for(lambda: any(store.root.glob("tokenize/.stage-*/rows.txt")), "the work")
        os.kill(child.pid or 0, signal.SIGKILL)
    assert not store.sealed(SPEC.ref).exists()

    run_stage(write_rows, SPEC, store, silent)

    assert verify(store.sealed(SPEC.ref)).counts == {"rows": 2}
    assert sorted(path.name for path in (store.root / "tokenize").iterdir()) == [
        SPEC.digest,
        f"{SPEC.digest}.ok",
    ]


def test_specs_that_share_a_working_directory_exclude_each_other(store: Store) -> None:
    held = list[bool]()

    def look(job: Job) -> dict[str, Any]:
        held.append(store.lock_path("shared").exists())
        return {}

    run_stage(look, SPEC, store, silent, lock_digest="shared")

    assert held == [True]


@pytest.mark.root
def test_a_disk_too_full_for_the_lock_is_named(small_disk: Path) -> None:
    small = Store(small_disk / "store")
    small.lock_path(SPEC.digest).parent.mkdir(parents=True)
    (small.root / SPEC.stage).mkdir(parents=True)
    with suppress(OSError):
        (small_disk / "rest").write_bytes(bytes(2_000_000))
    with pytest.raises(DiskFull, match=f"{SPEC.digest}: the disk is full"):
        run_stage(write_rows, SPEC, small, silent)


def test_a_disk_too_full_for_the_folder_of_the_stage_is_named(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(final: Path) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "stage_dir", full)
    with pytest.raises(DiskFull, match=f"{SPEC.stage}/{SPEC.digest}: the disk is full"):
        run_stage(write_rows, SPEC, store, silent)


def write_too_much(out: Path) -> None:
    (out / "big").write_bytes(bytes(2_000_000))


def write_tensors(out: Path) -> None:
    save_file({"big": np.zeros(2_000_000, np.uint8)}, out / "model.safetensors")


def write_tokenizer(out: Path) -> None:
    vocabulary = {f"word{number}": number for number in range(100_000)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="word0")).save(
        str(out / "tokenizer.json")
    )


@pytest.mark.root
@pytest.mark.parametrize("write", [write_too_much, write_tensors, write_tokenizer])
def test_a_full_disk_is_named_whoever_meets_it_and_leaves_nothing(
    small_disk: Path, write: Callable[[Path], None]
) -> None:
    def fill_the_disk(job: Job) -> dict[str, Any]:
        write(job.out)
        return {}

    small = Store(small_disk / "store")
    with pytest.raises(DiskFull, match="the disk is full"):
        run_stage(fill_the_disk, SPEC, small, silent)

    assert everything_below(small) == {"tokenize"}
    assert run_stage(write_rows, SPEC, small, silent).counts == {"rows": 2}
