"""A store for each test, and no SLURM but what a test puts there."""

from pathlib import Path

import pytest

from tests.upkeep.stores import Shop


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    empty = tmp_path / "no-slurm"
    empty.mkdir()
    for name in ("git", "cat"):
        (empty / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(empty))
    monkeypatch.setenv("PIPELINE_STORE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    return Shop(tmp_path)
