"""Which checkpoints are used, and that none is set aside unless it is damaged."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from pipeline_lib.core.errors import IntegrityError, Interrupted, PipelineError, Unreadable
from pipeline_lib.core.lock import locked
from pipeline_lib.core.run_folder import newest_valid, restore, sealed_steps
from pipeline_lib.core.store import MANIFEST_NAME, Manifest, describe_files, write_manifest
from tests.core.unreadable import each_way, no_permission

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The checkpoints of a run after steps 3 and 6."""
    path = tmp_path / "runs" / "0123456789abcdef" / "checkpoints"
    for step in (3, 6):
        one = path / f"step-{step:08d}"
        (one / "tensors").mkdir(parents=True)
        (one / "tensors" / "weights").write_bytes(bytes([step]) * 1000)
        (one / "state.json").write_text(json.dumps({"step": step}))
        manifest = Manifest(
            stage="checkpoint", digest="0123456789abcdef", spec={}, files=describe_files(one)
        )
        write_manifest(one, manifest)
    return path


def rejects(folder: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest valid checkpoint, and what was set aside with the reasons."""
    found: list[tuple[Path, str]] = []
    return newest_valid(folder, 99, lambda path, reason: found.append((path, reason))), found


def spoil(folder: Path) -> Path:
    path = folder / "step-00000006" / "state.json"
    path.write_text(path.read_text().replace("6", "7"))
    return path


@each_way
@pytest.mark.parametrize("name", [MANIFEST_NAME, "state.json", "tensors/weights"])
def test_a_checkpoint_that_cannot_be_read_stops_the_run_and_stays(
    folder: Path, name: str, unreadable: Callable[[Path], AbstractContextManager[None]]
) -> None:
    before = sorted(folder.rglob("*"))
    with (
        unreadable(folder / "step-00000006" / name),
        pytest.raises(Unreadable, match="cannot be read") as raised,
    ):
        rejects(folder)

    assert str(folder) in str(raised.value)
    assert "delete" not in str(raised.value)
    assert raised.value.exit_code == 74
    assert sorted(folder.rglob("*")) == before
    assert rejects(folder) == (folder / "step-00000006", [])


@pytest.mark.parametrize("name", [".", "step-00000006", "step-00000006/tensors"])
def test_checkpoints_in_a_folder_that_does_not_open_are_not_none(folder: Path, name: str) -> None:
    with no_permission(folder / name), pytest.raises(Unreadable, match="cannot be read"):
        rejects(folder)

    assert [step for step, _ in sealed_steps(folder)] == [3, 6]
    assert sealed_steps(folder / "none") == []


def test_a_damaged_checkpoint_is_brought_back_by_the_command_that_is_told(folder: Path) -> None:
    path = spoil(folder)
    found, [(aside, reason)] = rejects(folder)
    assert found == folder / "step-00000003"
    command = re.search(r"`qwen3 (store restore [^`]+)`", reason)
    assert command, reason

    def run() -> "subprocess.CompletedProcess[str]":
        arguments = [sys.executable, "-m", "pipeline_lib", *command[1].split()]
        return subprocess.run(
            arguments, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "HOME": "/"}
        )

    still_damaged = run()
    assert (still_damaged.returncode, "state.json" in still_damaged.stderr) == (66, True)
    (aside / "state.json").write_text(json.dumps({"step": 6}))
    assert run().returncode == 0
    assert rejects(folder) == (path.parent, [])


def test_nothing_is_brought_back_over_a_step_that_was_saved_again_or_while_the_run_is_locked(
    folder: Path,
) -> None:
    spoil(folder)
    _, [(aside, _)] = rejects(folder)
    (aside / "state.json").write_text(json.dumps({"step": 6}))
    with (
        locked(folder.parent.parent / "locks" / folder.parent.name, print),
        pytest.raises(Interrupted),
    ):
        restore(aside)
    (folder / "step-00000006").mkdir()
    with pytest.raises(PipelineError, match="saved again"):
        restore(aside)
    (folder / "step-00000006").rmdir()

    assert restore(aside) == folder / "step-00000006"


@pytest.mark.parametrize(
    "name",
    ["step-00000003", "rejected-notes", "../rejected-step-00000003", "rejected-step-00000009"],
)
def test_what_was_not_set_aside_is_not_brought_back(folder: Path, name: str) -> None:
    with pytest.raises((PipelineError, IntegrityError), match=r"not a (checkpoint|sealed)"):
        restore((folder / name).resolve())
