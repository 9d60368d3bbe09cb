import errno
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from pipeline_lib.core import files
from pipeline_lib.core.errors import DiskFull
from pipeline_lib.core.files import take_out_of_future
from pipeline_lib.core.store import Manifest, describe_files, verify, write_manifest
from tests.processes import FORK, finish, lines_of, running

KILLS = 60


def fill_and_seal(staged: Path, fill: bytes) -> None:
    for index in range(4):
        (staged / f"part-{index}.bin").write_bytes(fill * 20_000)
    manifest = Manifest(stage="t", digest=fill.hex(), spec={}, files=describe_files(staged))
    write_manifest(staged, manifest)


def publish_for_ever(folder: Path, acknowledged: Path) -> None:
    for number in range(len(lines_of(acknowledged)), 1_000_000):
        final = folder / f"step-{number:06d}"
        files.sweep(final.parent, final.name)
        staged = files.stage_dir(final)
        fill_and_seal(staged, number.to_bytes(4))
        if not files.publish_dir(staged, final):
            verify(final)
            shutil.rmtree(staged)
        with acknowledged.open("a") as file:
            file.write(f"{final.name}\n")


def test_a_killed_publisher_leaves_a_whole_directory_or_none(tmp_path: Path) -> None:
    folder, acknowledged = tmp_path / "store", tmp_path / "acknowledged"
    chance = random.Random(0)
    kills = cut_short = 0
    # On a busy machine most kills come before the first file: then there are more, each a little
    # later.
    while kills < KILLS or (
        kills < 10 * KILLS and (len(list(folder.glob("step-*"))) <= 10 or cut_short <= 5)
    ):
        kills += 1
        with running(publish_for_ever, folder, acknowledged) as child:
            sleep(chance.uniform(0.0, 0.05 * (1 + kills // KILLS)))
            os.kill(child.pid or 0, signal.SIGKILL)
        cut_short += len(list(folder.glob(f"{files.STAGE_PREFIX}*")))
        published = sorted(folder.glob("step-*"))
        for final in published[-3:]:
            verify(final)

    published = sorted(folder.glob("step-*"))
    for final in published:
        verify(final)
    assert set(lines_of(acknowledged)) <= {final.name for final in published}
    assert len(published) > 10, "the kills came too early to show anything"
    assert cut_short > 5, "no kill came in the middle of a publication"


def test_sweeping_removes_what_a_killed_publisher_left_and_nothing_else(tmp_path: Path) -> None:
    final, other = tmp_path / "aaaa", tmp_path / "bbbb"
    for name in (final, other):
        (files.stage_dir(name) / "half").write_text("x")
    (tmp_path / f"{files.TRASH_PREFIX}{final.name}-0").mkdir()
    final.mkdir()

    files.sweep(final.parent, final.name)

    kept = {path.name.rpartition("-")[0] or path.name for path in tmp_path.iterdir()}
    assert kept == {"aaaa", f"{files.STAGE_PREFIX}bbbb"}


def publish_once(final: Path, fill: bytes, barrier: Barrier, won: Path) -> None:
    staged = files.stage_dir(final)
    fill_and_seal(staged, fill)
    barrier.wait()
    if files.publish_dir(staged, final):
        with won.open("a") as file:
            file.write(f"{fill.hex()}\n")


def test_of_several_publishers_one_wins_and_nothing_is_mixed(tmp_path: Path) -> None:
    for round_ in range(10):
        final, won = tmp_path / f"final-{round_}", tmp_path / f"won-{round_}"
        barrier = FORK.Barrier(3)
        racers = [
            FORK.Process(target=publish_once, args=(final, bytes([65 + i]), barrier, won))
            for i in range(3)
        ]
        for racer in racers:
            racer.start()
        finish(list(racers))

        assert lines_of(won) == [verify(final).digest]


def test_publishing_onto_an_empty_directory_fills_it(tmp_path: Path) -> None:
    """Snakemake and file managers make empty parents; they are no content."""
    final = tmp_path / "final"
    final.mkdir()
    staged = files.stage_dir(final)
    (staged / "file").write_text("x")

    assert files.publish_dir(staged, final)
    assert files.list_files(final) == ["file"]


def test_a_removed_directory_is_gone_with_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "victim" / "deep").mkdir(parents=True)
    (tmp_path / "victim" / "deep" / "file").write_text("x")

    files.remove_dir(tmp_path / "victim")
    files.remove_dir(tmp_path / "victim")

    assert list(tmp_path.iterdir()) == []


def rewrite_for_ever(path: Path) -> None:
    while True:
        for word in ("old", "new"):
            files.write_text(path, word * 50_000)


def test_a_reader_never_sees_half_of_a_rewritten_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write_text(path, "old" * 50_000)
    seen = set()
    with running(rewrite_for_ever, path):
        for _ in range(400):
            seen.add(path.read_text())
            sleep(0.001)

    assert seen == {"old" * 50_000, "new" * 50_000}


def test_a_failed_write_leaves_the_old_file_and_no_debris(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    files.write_json(path, {"a": 1})

    with pytest.raises(ValueError, match="JSON"):
        files.write_json(path, {"a": float("nan")})
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "\ud800")

    assert [entry.name for entry in tmp_path.iterdir()] == ["file.json"]
    assert files.read_json(path) == {"a": 1}


def test_rows_read_back_as_they_were_written(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a line\u2028that is one, \x85 too\n"},
        {"text": "\u4f60\u597d", "n": [1, 2.5, None]},
    ]

    files.write_jsonl(tmp_path / "rows.jsonl", rows)

    assert files.read_jsonl(tmp_path / "rows.jsonl") == rows


def test_equal_values_have_one_canonical_text() -> None:
    assert files.canonical_json({"b": [1, 2.0], "a": "\u4f60"}) == '{"a":"\u4f60","b":[1,2.0]}'
    with pytest.raises(ValueError, match="JSON"):
        files.canonical_json(float("inf"))


@pytest.mark.root
def test_a_full_disk_is_named_and_the_old_file_stays(small_disk: Path) -> None:
    path = small_disk / "file"
    files.write_text(path, "old")

    with pytest.raises(DiskFull) as raised:
        files.write_text(path, "x" * 2_000_000)

    assert str(raised.value).startswith(f"{path}: the disk is full")
    assert str(raised.value).endswith("run snakemake again")
    assert path.read_text() == "old"
    assert files.list_files(small_disk) == ["file"]


@pytest.mark.root
def test_missing_space_is_noticed_before_anything_is_written(small_disk: Path) -> None:
    where = small_disk / "not" / "there" / "yet"
    files.require_space(where, 500_000, "a checkpoint")

    with pytest.raises(DiskFull, match=r"a checkpoint needs 1,000.0 MB, and \d\.\d MB are free"):
        files.require_space(where, 1_000_000_000, "a checkpoint")

    assert not (small_disk / "not").exists()


@pytest.fixture
def read_only_folder() -> Iterator[Path]:
    """A folder that other users can reach and read."""
    root = Path(tempfile.mkdtemp())
    (root / "file").write_text("old")
    root.chmod(0o555)
    yield root
    root.chmod(0o755)
    shutil.rmtree(root)


NOBODY = 65534


def write_as_nobody(folder: Path) -> None:
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    with pytest.raises(PermissionError):
        files.write_text(folder / "file", "new")
    with pytest.raises(PermissionError):
        files.stage_dir(folder / "final")


def test_in_a_folder_that_cannot_be_written_nothing_changes(read_only_folder: Path) -> None:
    with running(write_as_nobody, read_only_folder) as child:
        finish([child])

    assert files.list_files(read_only_folder) == ["file"]
    assert (read_only_folder / "file").read_text() == "old"


def test_files_from_the_future_are_taken_to_now_and_others_keep_their_times(tmp_path: Path) -> None:
    past, future = tmp_path / "past", tmp_path / "future"
    day_s = 86400.0
    for path, offset_s in ((past, -day_s), (future, day_s)):
        path.touch()
        os.utime(path, (time.time() + offset_s, time.time() + offset_s))
    before = past.stat().st_mtime_ns

    take_out_of_future([past, tmp_path / "missing", future])

    output = tmp_path / "output"
    output.touch()
    assert past.stat().st_mtime_ns == before
    assert time.time() - 60 < future.stat().st_mtime <= output.stat().st_mtime
    assert sorted(path.name for path in tmp_path.iterdir()) == ["future", "output", "past"]


def test_in_a_folder_of_another_user_times_stay_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    future = tmp_path / "future"
    future.touch()
    os.utime(future, (time.time() + 86400, time.time() + 86400))
    before = future.stat().st_mtime_ns

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(files, "NamedTemporaryFile", refused)
    monkeypatch.setattr(os, "utime", refused)
    take_out_of_future([future])
    assert future.stat().st_mtime_ns == before
