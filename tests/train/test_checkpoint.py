"""Checkpoints are whole or absent, chosen by their bytes, and kept in number."""

import json
import os
import pickletools
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline_lib.base import fsio
from pipeline_lib.base.errors import DiskFull
from pipeline_lib.train import checkpoint
from pipeline_lib.train.dist import World, process_group
from tests.ranks import run_ranks


def save(environ: Mapping[str, str], folder: Path, steps: list[int], size: int) -> None:
    """Save a checkpoint at each of `steps`, whose tensor holds the number of the step."""
    world = World.from_env(environ, "cpu")
    with process_group(world, 30):
        for step in steps:
            tensors = {"weights.a": torch.full((size,), float(step)), "weights.b": torch.arange(6.0).reshape(2, 3)}
            checkpoint.save_checkpoint(folder, world, step, tensors, {"attempt": 1}, [{"step": step}])


def save_on_a_full_disk(environ: Mapping[str, str], folder: Path) -> str:
    """What a save says for which there is no room, and what it leaves behind."""
    try:
        save(environ, folder, [2], 1_000_000)
    except DiskFull as error:
        return str(error)
    raise AssertionError("was to fail")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "checkpoints"
    run_ranks(save, 2, path, [3, 6, 9], 8)
    return path


def rejected(folder: Path, max_step: int = 99) -> tuple[Path | None, list[str]]:
    """The newest valid checkpoint and the names of those that were set aside."""
    names: list[str] = []
    found = checkpoint.newest_valid(folder, max_step, lambda path, reason: names.append(path.name))
    return found, names


def test_the_newest_up_to_a_step_is_found_and_loads(folder: Path) -> None:
    assert rejected(folder) == (folder / "step-00000009", [])
    found, _ = rejected(folder, max_step=8)
    assert found == folder / "step-00000006"
    tensors = {"weights.a": torch.zeros(8), "weights.b": torch.zeros(2, 3)}
    checkpoint.load_tensors(found / "tensors", tensors)
    assert tensors["weights.a"].tolist() == [6.0] * 8
    assert tensors["weights.b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert checkpoint.read_state(found) == {"step": 6, "world_size": 2, "attempt": 1}


@pytest.mark.parametrize("victim", ["tensors/*.safetensors", "random-00001.safetensors", "state.json", "metrics.jsonl"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_to_any_file_is_seen_and_the_one_before_is_used(folder: Path, victim: str, damage: str) -> None:
    path = sorted((folder / "step-00000009").glob(victim))[0]
    content = path.read_bytes()
    if damage == "flip":
        path.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    elif damage == "truncate":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    assert rejected(folder) == (folder / "step-00000006", ["rejected-step-00000009"])
    assert rejected(folder) == (folder / "step-00000006", [])


def test_a_directory_without_a_manifest_does_not_exist(folder: Path) -> None:
    (folder / "step-00000009" / "manifest.json").unlink()
    assert rejected(folder) == (folder / "step-00000006", [])


@pytest.mark.parametrize("name", ["step-12", "step-00000012.bak", "xstep-00000012", "step-0000001x"])
def test_other_names_are_not_mistaken_for_steps(folder: Path, name: str) -> None:
    (folder / "step-00000009").rename(folder / name)
    assert rejected(folder) == (folder / "step-00000006", [])


def test_retention_keeps_the_newest(folder: Path) -> None:
    checkpoint.retain(folder, 2, step=9)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000006", "step-00000009"]


def test_retention_does_not_count_what_a_longer_run_left(folder: Path) -> None:
    """A run that is told to stop earlier, after a longer one, keeps what it saves."""
    checkpoint.retain(folder, 1, step=3)
    assert len(list(folder.iterdir())) == 3
    checkpoint.retain(folder, 1, step=6)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000006", "step-00000009"]


def test_debris_of_killed_saves_is_swept(folder: Path) -> None:
    (folder / ".stage-step-00000012-abc").mkdir()
    (folder / ".trash-step-00000003-abc").mkdir()
    fsio.sweep(folder, "step-")
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003", "step-00000006", "step-00000009"]


def test_nothing_in_a_checkpoint_is_a_pickle(folder: Path) -> None:
    for path in (path for path in folder.rglob("*") if path.is_file()):
        assert path.suffix in (".safetensors", ".json", ".jsonl")
        with pytest.raises(ValueError, match=r"opcode|exhausted|pickle"):
            list(pickletools.genops(path.read_bytes()))


def test_every_row_so_far_travels_with_the_checkpoint(folder: Path) -> None:
    assert json.loads((folder / "step-00000006" / "metrics.jsonl").read_text()) == {"step": 6}


@pytest.mark.root
def test_a_full_disk_is_told_on_every_rank_and_leaves_the_one_before(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    disk = tmp_path / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)], check=True)
    try:
        run_ranks(save, 2, disk / "checkpoints", [1], 8)
        said: dict[int, Any] = run_ranks(save_on_a_full_disk, 2, disk / "checkpoints")
        assert all("the disk is full" in text for text in said.values())
        assert [path.name for path in (disk / "checkpoints").iterdir()] == ["step-00000001"]
        assert rejected(disk / "checkpoints") == (disk / "checkpoints" / "step-00000001", [])
    finally:
        subprocess.run(["umount", str(disk)], check=True)
