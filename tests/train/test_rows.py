"""The metrics rows in checkpoints: each has all, though a save writes only the latest."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.train import Guards
from pipeline_lib.core.errors import IntegrityError
from pipeline_lib.core.store import Manifest, verify, write_manifest
from pipeline_lib.train import metrics as rows_module
from pipeline_lib.train.guards import Window
from pipeline_lib.train.metrics import ROWS_OF_A_FILE, MetricsRows, Row
from pipeline_lib.train.rank import RankJob
from pipeline_lib.train.validation import Validations
from tests.ranks import run_ranks
from tests.train.conftest import Arena
from tests.train.helpers import losses, read_rows, rows, train, train_until_killed
from tests.train.poison import INF_GRADIENT, NAN_LOSS, Course, Poison, train_poisoned

SHORT = 4  # rows of a file, where a few steps are to fill some


@pytest.fixture
def short_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "ROWS_OF_A_FILE", SHORT)


def row(step: int) -> Row:
    return {"step": step, "loss": 1 / step, "supervised_tokens": 7}


def sealed(rows: MetricsRows, folder: Path) -> Path:
    """A checkpoint of nothing but `rows`."""
    folder.mkdir(parents=True)
    files = rows.saved().write(folder)
    write_manifest(folder, Manifest(stage="checkpoint", digest="d", spec={}, files=files))
    verify(folder)
    return folder


def test_a_save_writes_the_latest_rows_and_links_the_others(tmp_path: Path) -> None:
    run = MetricsRows(tmp_path / "metrics")
    for step in range(1, 3 * ROWS_OF_A_FILE + 6):
        run.add(row(step))
    first, _, second = [sealed(run, tmp_path / name) for name in ("first", "between", "second")]
    assert (
        read_rows(second) == run.all() == [row(step) for step in range(1, 3 * ROWS_OF_A_FILE + 6)]
    )
    *full, latest = sorted((second / "metrics").iterdir())
    assert len(full) == 3
    assert all(path.samefile(first / "metrics" / path.name) for path in full)
    assert latest.stat().st_nlink == 1
    assert len(latest.read_text().splitlines()) == 5


def damage(path: Path) -> None:
    """Flip a bit in place, in every file that is this one."""
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.write(bytes([content[0] ^ 1]))


def test_a_damaged_file_spoils_no_neighbouring_checkpoint(
    tmp_path: Path, short_files: None
) -> None:
    run, resumed = MetricsRows(tmp_path / "metrics"), MetricsRows(tmp_path / "resumed")
    for step in range(1, SHORT + 2):
        run.add(row(step))
    first, second, third = [sealed(run, tmp_path / name) for name in ("first", "second", "third")]
    resumed.restore(second)
    after = sealed(resumed, tmp_path / "after")

    damage(second / "metrics" / "from-00000001.jsonl")

    with pytest.raises(IntegrityError):
        verify(second)
    for whole in (first, third, after):
        verify(whole)


def test_a_damaged_file_is_read_from_its_copy(tmp_path: Path, short_files: None) -> None:
    run = MetricsRows(tmp_path / "metrics")
    for step in range(1, 3 * SHORT):
        run.add(row(step))
    known, (first, second, *_) = run.all(), sorted((tmp_path / "metrics" / "a").iterdir())
    damage(first)
    second.unlink()

    assert run.all() == known
    run.undo_after(SHORT + 1)
    assert [each["step"] for each in run.all() if "verdict" not in each] == list(
        range(1, SHORT + 2)
    )

    damage(tmp_path / "metrics" / "b" / first.name)
    with pytest.raises(IntegrityError, match=f"{first}: .* missing or damaged"):
        run.all()
    with pytest.raises(IntegrityError, match=f"{first}: .* missing or damaged"):
        run.undo_after(1)


@pytest.mark.parametrize("count", [0, 1, SHORT - 1, SHORT, SHORT + 1, 3 * SHORT])
def test_rows_come_back_from_a_checkpoint(tmp_path: Path, short_files: None, count: int) -> None:
    run, other = MetricsRows(tmp_path / "metrics"), MetricsRows(tmp_path / "other")
    for step in range(1, count + 1):
        run.add(row(step))
    for step in range(1, 30):
        other.add({**row(step), "loss": 0.5})  # of an attempt that came farther
    other.restore(sealed(run, tmp_path / "checkpoint"))
    assert other.all() == run.all()
    for each in (run, other):
        each.add(row(count + 1))
    assert read_rows(sealed(other, tmp_path / "next")) == run.all()


@pytest.mark.parametrize("last_kept", range(3 * SHORT + 2))
def test_what_is_undone_is_marked_and_older_checkpoints_keep_their_rows(
    tmp_path: Path, short_files: None, last_kept: int
) -> None:
    run = MetricsRows(tmp_path / "metrics")
    for step in range(1, 3 * SHORT + 2):
        run.add({**row(step), "verdict": "skip"} if step == 6 else row(step))
    before, known = sealed(run, tmp_path / "before"), run.all()
    run.undo_after(last_kept)
    expected = [
        {**each, "verdict": "undone"} if each["step"] > last_kept and each["step"] != 6 else each
        for each in known
    ]
    assert run.all() == read_rows(sealed(run, tmp_path / "after")) == expected
    verify(before)
    assert read_rows(before) == known


def with_short_files(environ: Mapping[str, str], job: RankJob, step: int | None = None) -> None:
    """Train, to the end or until killed at the beginning of `step`."""
    rows_module.ROWS_OF_A_FILE = SHORT  # in a process of its own
    if step is None:
        train(environ, job)
    else:
        train_until_killed(environ, job, step)


@pytest.mark.parametrize("killed_at", [4, 11])
def test_a_resumed_run_has_every_row_once(
    arena: Arena, whole: Callable[..., Path], tmp_path: Path, killed_at: int
) -> None:
    settings: dict[str, Any] = {
        "save_every_steps": 3,
        "epochs": 2,
        "keep_last": 9,
        "validate_every_steps": 2,
    }
    run_ranks(with_short_files, 2, arena.job(2, tmp_path / "killed", **settings), killed_at)
    job = arena.job(2, tmp_path / "resumed", **settings)
    run_ranks(with_short_files, 2, job)
    assert [found["step"] for found in rows(job.out)] == list(range(1, 13))
    expected = losses(whole(2, epochs=2))
    assert losses(job.out) == expected
    for step in (3, 6, 9, 12):
        saved = job.run_dir / "checkpoints" / f"step-{step:08d}"
        assert [found["loss"] for found in read_rows(saved)] == expected[:step]


def poisoned_with_short_files(environ: Mapping[str, str], job: RankJob, poison: Poison) -> Course:
    rows_module.ROWS_OF_A_FILE = SHORT
    return train_poisoned(environ, job, poison)


def test_going_back_marks_rows_of_full_files(arena: Arena, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_every_steps": 6, "epochs": 2, "keep_last": 9}
    settings["guards"] = {"max_skips": 1, "rollback_every_steps": 6}
    poison = Poison({10: NAN_LOSS, 11: INF_GRADIENT})
    run_ranks(poisoned_with_short_files, 2, arena.job(2, tmp_path / "out", **settings), poison)
    assert [found["step"] for found in rows(tmp_path / "out")] == list(range(1, 13))
    marked = {
        found["step"]: found["verdict"] for found in rows(tmp_path / "out") if "verdict" in found
    }
    assert marked == {7: "undone", 8: "undone", 9: "undone", 10: "skip", 11: "roll_back"}


def test_what_guards_and_validation_know_is_the_same_from_a_checkpoint_as_from_all_rows() -> None:
    found = [
        {**row(step), **({"validation_loss": 2.0 / step} if step % 5 == 0 else {})}
        for step in range(1, 300)
    ]
    found[250] |= {"verdict": "skip"}
    found[298] |= {"verdict": "overflow"}
    window, course = Window(Guards()), Validations()
    for each in found:
        window.add(each)
        course.add(each)
    assert vars(Window.from_json(Guards(), json.loads(json.dumps(window.to_json())))) == vars(
        window
    )
    assert Validations.from_json(json.loads(json.dumps(course.to_json()))) == course
    assert Validations.from_json(json.loads(json.dumps(Validations().to_json()))) == Validations()
