"""A file taken into the store is read once for its hash, and never taken with other content."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline_lib.core import arrival
from pipeline_lib.core.files import copy_file, try_link
from pipeline_lib.core.store import NOTHING_VERIFIED, SMALL_BYTES, VerifiedFiles
from tests.core.conftest import edit_unseen

SIZE_BYTES = 3 * SMALL_BYTES
Bring = Callable[[Path, Path, str, VerifiedFiles], bool]
pytestmark = pytest.mark.usefixtures("settled")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "model" / "weights"
    path.parent.mkdir()
    path.write_bytes(os.urandom(SIZE_BYTES))
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "store" / "weights"
    path.parent.mkdir()
    return path


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are hashed whole from now on."""
    found: list[Path] = []
    read, copied = VerifiedFiles._read, arrival._copy_hashed

    def note_read(
        self: VerifiedFiles, path: Path, beside: Path
    ) -> tuple[str, os.stat_result | None]:
        found.append(path)
        return read(self, path, beside)

    def note_copied(source: Path, target: Path) -> str:
        found.append(source)
        return copied(source, target)

    monkeypatch.setattr(VerifiedFiles, "_read", note_read)
    monkeypatch.setattr(arrival, "_copy_hashed", note_copied)
    return found


@pytest.mark.parametrize("bring", [arrival.link, arrival.copy])
def test_what_was_hashed_before_is_not_hashed_again(
    source: Path, target: Path, verified: VerifiedFiles, hashed: list[Path], bring: Bring
) -> None:
    sha256 = verified.sha256(source, source.parent)
    assert hashed == [source]

    assert bring(source, target, sha256, verified)

    assert target.read_bytes() == source.read_bytes()
    assert target.samefile(source) == (bring is arrival.link)
    assert verified.has_sha256(target, sha256, target.parent), "and neither does who uses it"
    assert verified.has_sha256(source, sha256, source.parent)
    assert hashed == [source]


@pytest.mark.parametrize("bring", [arrival.link, arrival.copy])
def test_what_was_hashed_elsewhere_is_hashed_once(
    source: Path, target: Path, verified: VerifiedFiles, hashed: list[Path], bring: Bring
) -> None:
    sha256 = NOTHING_VERIFIED.sha256(source, source.parent)
    hashed.clear()

    assert bring(source, target, sha256, verified)

    assert verified.has_sha256(target, sha256, target.parent)
    assert hashed == [source]


@pytest.mark.parametrize("bring", [arrival.link, arrival.copy])
@pytest.mark.parametrize("change", [edit_unseen, lambda path: path.write_bytes(bytes(SIZE_BYTES))])
def test_another_content_is_not_taken(
    source: Path,
    target: Path,
    verified: VerifiedFiles,
    bring: Bring,
    change: Callable[[Path], object],
) -> None:
    sha256 = verified.sha256(source, source.parent)
    change(source)

    assert not bring(source, target, sha256, verified)
    assert not target.exists() or not verified.is_marked(target, sha256)


@pytest.mark.parametrize("bring", [arrival.link, arrival.copy])
def test_an_edit_while_it_is_taken_is_found(
    source: Path,
    target: Path,
    verified: VerifiedFiles,
    bring: Bring,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a link is made, or while a file is copied; a copy of bytes of both is no use.

    These are bytes from before and from after.
    """
    sha256 = verified.sha256(source, source.parent)

    def edited(take: Callable[[Path, Path], object]) -> Callable[[Path, Path], object]:
        def act(source: Path, target: Path) -> object:
            source.write_bytes(bytes(SIZE_BYTES))
            return take(source, target)

        return act

    monkeypatch.setattr(arrival, "copy_file", edited(copy_file))
    monkeypatch.setattr(arrival, "try_link", edited(try_link))

    assert not bring(source, target, sha256, verified)
    assert not verified.is_marked(target, sha256)


def test_an_edit_through_either_name_of_a_link_is_found(
    source: Path, target: Path, verified: VerifiedFiles
) -> None:
    sha256 = verified.sha256(source, source.parent)
    assert arrival.link(source, target, sha256, verified)

    edit_unseen(source)

    assert not verified.has_sha256(target, sha256, target.parent)


def test_a_link_that_another_clone_makes_costs_one_more_hash(
    source: Path, target: Path, verified: VerifiedFiles, hashed: list[Path]
) -> None:
    sha256 = verified.sha256(source, source.parent)
    os.link(source, source.with_name("of another clone"))

    assert arrival.link(source, target, sha256, verified)

    assert verified.has_sha256(target, sha256, target.parent)
    assert hashed == [source, source]


def test_a_link_that_another_clone_makes_at_the_same_time_is_no_error(
    source: Path, target: Path, verified: VerifiedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha256 = verified.sha256(source, source.parent)

    def two(source: Path, target: Path) -> bool:
        os.link(source, source.with_name("of another clone"))
        return try_link(source, target)

    monkeypatch.setattr(arrival, "try_link", two)
    assert arrival.link(source, target, sha256, verified)


def test_what_is_not_remembered_is_right_too(source: Path, target: Path) -> None:
    sha256 = NOTHING_VERIFIED.sha256(source, source.parent)
    for bring in (arrival.link, arrival.copy):
        assert bring(source, target, sha256, NOTHING_VERIFIED)
        assert target.read_bytes() == source.read_bytes()
        target.unlink()


def test_a_file_system_that_shares_no_blocks_gets_a_copy_that_is_hashed_on_the_way(
    source: Path, verified: VerifiedFiles, hashed: list[Path]
) -> None:
    """Another file system than that of the source: /dev/shm is one on Linux."""
    folder = Path("/dev/shm") / f"arrival-{os.getpid()}"  # noqa: S108 - the test is of that file system
    if not folder.parent.is_dir() or folder.parent.stat().st_dev == source.stat().st_dev:
        pytest.skip("no other file system here")
    sha256 = NOTHING_VERIFIED.sha256(source, source.parent)
    hashed.clear()
    folder.mkdir()
    try:
        assert arrival.link(source, folder / "weights", sha256, verified)
        assert (folder / "weights").read_bytes() == source.read_bytes()
        assert verified.has_sha256(folder / "weights", sha256, folder)
        assert hashed == [source]
    finally:
        shutil.rmtree(folder)
