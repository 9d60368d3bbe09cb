"""A file is read once as long as it does not change, and is read again whenever it may have."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.core import store
from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.files import sha256_file
from pipeline_lib.core.store import (
    NOTHING_VERIFIED,
    SMALL_BYTES,
    Manifest,
    VerifiedFiles,
    describe_files,
    verify,
    write_manifest,
)
from pipeline_lib.core.user_cache import UserCache
from tests.core.conftest import edit_unseen
from tests.processes import FORK, finish

SIZE_BYTES = 3 * SMALL_BYTES
pytestmark = pytest.mark.usefixtures("settled")


@pytest.fixture
def large(tmp_path: Path) -> Path:
    path = tmp_path / "sealed" / "weights"
    path.parent.mkdir()
    path.write_bytes(os.urandom(SIZE_BYTES))
    return path


def bytes_read(act: Callable[[], object]) -> int:
    """By this process, while it does that."""

    def so_far() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = so_far()
    act()
    return so_far() - before


def reads(verified: VerifiedFiles, path: Path, sha256: str, beside: Path | None = None) -> bool:
    """Whether the file is read, and whatever it takes found to be the right one."""
    found = []
    count = bytes_read(
        lambda: found.append(verified.has_sha256(path, sha256, beside or path.parent.parent))
    )
    assert found == [True]
    assert count >= SIZE_BYTES or count < SMALL_BYTES // 2
    return count >= SIZE_BYTES


def test_an_unchanged_file_is_read_once_by_all_processes(
    verified: VerifiedFiles, large: Path
) -> None:
    sha256 = sha256_file(large)
    racers = [
        FORK.Process(target=verified.has_sha256, args=(large, sha256, large.parent.parent))
        for _ in range(4)
    ]
    for racer in racers:
        racer.start()
    finish([*racers])

    assert not reads(verified, large, sha256)
    assert not reads(VerifiedFiles(UserCache(verified.cache.folder)), large, sha256)
    assert reads(NOTHING_VERIFIED, large, sha256)
    assert verified.cache.folder is not None
    assert verified.cache.folder.stat().st_mode & 0o777 == 0o700


def replace_it(path: Path) -> None:
    times, other = path.stat(), path.with_name("other")
    other.write_bytes(bytes(SIZE_BYTES))
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    other.replace(path)


@pytest.mark.parametrize("change", [edit_unseen, replace_it])
def test_a_changed_file_is_read_again(
    verified: VerifiedFiles, large: Path, change: Callable[[Path], None]
) -> None:
    sha256 = sha256_file(large)
    assert reads(verified, large, sha256)

    change(large)

    assert not verified.has_sha256(large, sha256, large.parent.parent)
    assert not verified.has_sha256(large, sha256, large.parent.parent), (
        "and what is wrong is not remembered as right"
    )
    assert reads(verified, large, sha256_file(large)), (
        "a hash that was asked for is remembered, no other"
    )


def test_new_times_alone_mean_reading_again(verified: VerifiedFiles, large: Path) -> None:
    sha256 = sha256_file(large)
    assert reads(verified, large, sha256)
    large.chmod(0o600)

    assert reads(verified, large, sha256)
    assert not reads(verified, large, sha256)


def test_a_young_file_is_not_remembered(
    verified: VerifiedFiles, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the resolution of its times it could change again, and they would not show it."""
    sha256 = sha256_file(large)
    monkeypatch.setattr(store, "SETTLED_NS", 3600 * 10**9)

    assert reads(verified, large, sha256)
    assert reads(verified, large, sha256)


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    verified: VerifiedFiles, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256, digest = sha256_file(large), hashlib.file_digest

    def digest_of_what_changes(file: Any, name: str) -> Any:
        found = digest(file, name)
        edit_unseen(large)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", digest_of_what_changes)
        assert verified.has_sha256(large, sha256, large.parent.parent), "as it was when it was read"

    assert not verified.is_marked(large, sha256)
    assert not verified.has_sha256(large, sha256, large.parent.parent)


def test_where_nothing_can_be_written_our_clock_tells_the_age(
    verified: VerifiedFiles, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256, nowhere = sha256_file(large), tmp_path / "not there"
    for _ in range(2):
        assert reads(verified, large, sha256, nowhere), "within an hour"
    monkeypatch.setattr(store, "SETTLED_BY_OUR_CLOCK_NS", 0)

    assert reads(verified, large, sha256, nowhere)
    assert not reads(verified, large, sha256, nowhere)


def test_another_boot_knows_nothing(
    verified: VerifiedFiles, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = sha256_file(large)
    assert reads(verified, large, sha256)
    (tmp_path / "boot_id").write_text("another machine, or this one started again\n")
    monkeypatch.setattr(store, "BOOT_ID", tmp_path / "boot_id")

    assert reads(VerifiedFiles(UserCache(verified.cache.folder)), large, sha256)

    monkeypatch.setattr(store, "BOOT_ID", tmp_path / "none")
    for _ in range(2):
        assert reads(VerifiedFiles(UserCache(verified.cache.folder)), large, sha256)


def open_to_others(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o750)


def in_place_of_it_a_file(folder: Path) -> None:
    folder.parent.mkdir()
    folder.touch()


def in_place_of_it_a_link(folder: Path) -> None:
    (folder.parent / "elsewhere").mkdir(parents=True, mode=0o700)
    folder.symlink_to("elsewhere")


@pytest.mark.parametrize("make", [open_to_others, in_place_of_it_a_file, in_place_of_it_a_link])
def test_a_folder_that_is_not_the_users_alone_is_not_used(
    verified: VerifiedFiles, large: Path, make: Callable[[Path], None]
) -> None:
    assert verified.cache.folder is not None
    make(verified.cache.folder)

    for _ in range(2):
        assert reads(verified, large, sha256_file(large))


@pytest.mark.root
def test_the_folder_of_another_user_is_not_used(verified: VerifiedFiles, large: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("giving a folder away needs root")
    assert verified.cache.folder is not None
    verified.cache.folder.mkdir(parents=True, mode=0o700)
    os.chown(verified.cache.folder, 65534, 65534)

    for _ in range(2):
        assert reads(verified, large, sha256_file(large))


def test_where_it_lies() -> None:
    assert UserCache.from_env({"HOME": "/home/a"}).folder == Path("/home/a/.cache/qwen3-pipeline")
    in_cache = UserCache.from_env({"HOME": "/home/a", "XDG_CACHE_HOME": "/scratch/a"})
    assert in_cache.folder == Path("/scratch/a/qwen3-pipeline")
    assert UserCache.from_env({"XDG_CACHE_HOME": "relative"}).folder is None
    assert UserCache.from_env({}).folder is None


def test_the_oldest_marks_go(
    verified: VerifiedFiles, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MOST_MARKS", 4)
    assert verified.cache.folder is not None
    verified.cache.folder.mkdir(parents=True, mode=0o700)
    for number in range(9):
        old = verified.cache.folder / f"old-{number}"
        old.touch()
        os.utime(old, (number, number))
    sha256 = sha256_file(large)

    assert reads(verified, large, sha256)
    assert not reads(verified, large, sha256)
    left = sorted(
        path.name for path in verified.cache.folder.iterdir() if path.name.startswith("old")
    )
    assert left == [f"old-{number}" for number in range(4, 9)]


def test_a_sealed_directory_is_read_once_and_wholly_where_that_is_asked_for(
    verified: VerifiedFiles, large: Path
) -> None:
    root = large.parent
    write_manifest(
        root, Manifest(stage="download", digest="0" * 16, spec={}, files=describe_files(root))
    )

    assert bytes_read(lambda: verify(root, verified)) > SIZE_BYTES
    assert bytes_read(lambda: verify(root, verified)) < SMALL_BYTES
    assert bytes_read(lambda: verify(root)) > SIZE_BYTES, "as store verify does"
    edit_unseen(large)
    with pytest.raises(IntegrityError, match="weights: content differs"):
        verify(root, verified)
