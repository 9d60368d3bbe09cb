import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline_lib.core import store
from pipeline_lib.core.store import VerifiedFiles
from pipeline_lib.core.user_cache import UserCache


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of one megabyte."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"this root cannot mount: {mounted.stderr.decode().strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is old enough to be marked; else each test would wait."""
    monkeypatch.setattr(store, "SETTLED_NS", 0)


@pytest.fixture
def verified(tmp_path: Path) -> VerifiedFiles:
    """What this user remembers of files: nothing yet."""
    return VerifiedFiles(UserCache(tmp_path / "cache" / "verified"))


def edit_unseen(path: Path) -> None:
    """Change a byte under the same size and mtime, as somebody would who hides a change."""
    times = path.stat()
    with path.open("r+b") as file:
        first = file.read(1)[0]
        file.seek(0)
        file.write(bytes([first ^ 1]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
