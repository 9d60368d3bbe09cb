"""Trackers see each number once; one that fails, hangs or is missing changes no training."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.section import flat
from pipeline_lib.core.files import write_json
from pipeline_lib.records.record import to_json
from pipeline_lib.tracking import feed
from pipeline_lib.tracking.feed import trackers
from pipeline_lib.tracking.run import Fed, follow, numbers
from pipeline_lib.tracking.settings import settings_of_run
from tests.complete import plan_document

ROOT = Path(__file__).parents[2]


def write_rows(path: Path, steps: Iterator[int] | range, loss: float = 0.0) -> None:
    """Add a row for each of `steps`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for step in steps:
            file.write(
                json.dumps({"step": step, "loss": 10.0 - step + loss, "kind": "text"}) + "\n"
            )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    write_json(
        tmp_path / "plan" / "plan.json",
        to_json(plan_document(9, experiment="small", tracking={"project": "tests"})),
    )
    return tmp_path / "runs" / "0123456789abcdef"


def has(seen: list[int], count: int) -> bool:
    return len(seen) >= count


def test_a_cut_line_waits_for_its_end_and_one_that_never_ends_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st')
    seen: list[int] = []
    is_over = partial(has, seen, 2)
    for rows in follow(path, is_over):
        seen += [row["step"] for row in rows]
        with path.open("a") as file:
            file.write('ep": 2}\n{"cut\n{"step": 3}\n' if len(seen) == 1 else "")

    assert seen == [1, 2, 3]


def test_a_file_that_became_shorter_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(1, 4))
    seen: list[int] = []
    is_over = partial(has, seen, 4)
    for rows in follow(path, is_over):
        seen += [row["step"] for row in rows]
        if len(seen) == 3:
            path.write_text('{"step": 1}\n')

    assert seen == [1, 2, 3, 1]


def test_only_numbers_are_shown() -> None:
    row = {"step": 3, "loss": 1, "note": "x", "ok": True, "nothing": None, "deep": {"a": 1}}

    assert numbers(row) == {"train/loss": 1.0}


def test_the_numbers_of_ranks_have_a_curve_each_or_their_ends_where_they_are_many() -> None:
    found = numbers({"step": 10, "gpu_utilization_of_ranks": [0.9, 0.7]})
    name = "train/gpu_utilization_of_ranks"
    assert found == {
        f"{name}/0": 0.9,
        f"{name}/1": 0.7,
        f"{name}/lowest": 0.7,
        f"{name}/highest": 0.9,
    }

    found = numbers({"step": 10, "peak_memory_bytes_of_ranks": list(range(1, 513))})
    assert found == {
        "train/peak_memory_bytes_of_ranks/lowest": 1.0,
        "train/peak_memory_bytes_of_ranks/highest": 512.0,
    }


def test_a_step_is_given_once_but_may_bring_more_later(tmp_path: Path) -> None:
    fed = Fed(tmp_path / "fed.json")
    assert fed.new(1, {"loss": 1.0}) == {"loss": 1.0}
    assert fed.new(2, {"loss": 2.0}) == {"loss": 2.0}
    assert fed.new(2, {"loss": 3.0, "validation": 4.0}) == {"validation": 4.0}
    assert fed.new(1, {"other": 1.0}) == {}
    fed.save()

    assert Fed(tmp_path / "fed.json").new(2, {"validation": 5.0}) == {}


@pytest.fixture
def said() -> list[str]:
    return []


def fake_tracker(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let `python -m pipeline_lib track` be `code` in the processes that this test starts."""
    package = folder / "fake" / "pipeline_lib"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(code)
    monkeypatch.chdir(folder / "fake")


def test_a_tracker_that_crashes_is_told_once(
    run_dir: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_tracker(tmp_path, monkeypatch, "raise RuntimeError('no disk; token=hf_abcdefghijklmnop')")
    with trackers({"to": ["tensorboard"]}, run_dir, tmp_path / "plan", said.append):
        deadline_s = time.monotonic() + 20
        while not said and time.monotonic() < deadline_s:
            time.sleep(0.02)

    [line] = said
    assert line.startswith(
        "tracking: tensorboard failed and is left out (RuntimeError: no disk; token=***"
    )
    assert "abcdefgh" not in line


class Failed(Exception):
    """The run's own error."""


@pytest.mark.parametrize("has_failed", [False, True])
def test_a_tracker_that_hangs_is_stopped_and_sooner_where_the_run_failed(
    run_dir: Path,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    has_failed: bool,
) -> None:
    fake_tracker(tmp_path, monkeypatch, "import time; time.sleep(1000)")
    monkeypatch.setattr(feed, "HURRY_S" if has_failed else "FINISH_S", 0.5)
    start_s = time.monotonic()
    with (
        suppress(Failed),
        trackers({"to": ["tensorboard"]}, run_dir, tmp_path / "plan", said.append),
    ):
        if has_failed:
            raise Failed

    assert time.monotonic() - start_s < 10
    [line] = said
    assert line.startswith("tracking: tensorboard did not finish in")


def test_a_tracker_that_cannot_be_started_is_left_out(
    run_dir: Path, said: list[str], tmp_path: Path
) -> None:
    run_dir.mkdir(parents=True)
    (run_dir / "tracking").write_text("a file where a folder is wanted")
    with trackers({"to": ["json"]}, run_dir, tmp_path / "plan", said.append):
        pass

    [line] = said
    assert line.startswith("tracking: json cannot be started, so it is left out (")


def test_what_stops_the_start_of_a_tracker_leaves_no_earlier_one(
    run_dir: Path, said: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_tracker(
        tmp_path, monkeypatch, "import sys; sys.stdin.read(); print('it was asked to finish')"
    )
    started = feed.Child

    def interrupt(name: str, *others: Any) -> feed.Child:
        if name == "csv":
            raise KeyboardInterrupt
        return started(name, *others)

    monkeypatch.setattr(feed, "Child", interrupt)
    with (
        pytest.raises(KeyboardInterrupt),
        trackers({"to": ["json", "csv"]}, run_dir, tmp_path / "plan", said.append),
    ):
        raise AssertionError("never begun")

    assert said == []
    assert "it was asked to finish" in (run_dir / "tracking" / "json.log").read_text()


def test_no_password_of_a_trackers_address_is_in_its_log(run_dir: Path, tmp_path: Path) -> None:
    """A made-up library that tells of the address it was given, and then fails with it."""
    address = "http://ann:hunter2@host/x"
    code = (
        "import os, sys\n\nfrom pipeline_lib.cli.main import main\nfrom pipeline_lib.tracking "
        "import run\n\n"
    )
    code += "def feed_tracker(*_):\n    print('sent to', os.environ['MLFLOW_TRACKING_URI'])\n"
    code += "    sys.stderr.write(os.environ['MLFLOW_TRACKING_URI'])\n"
    code += "    raise RuntimeError('no answer from ' + os.environ['MLFLOW_TRACKING_URI'])\n\n"
    code += "run.feed_tracker = feed_tracker\nmain()\n"
    arguments = ["track", "--to", "mlflow", "--run-dir", str(run_dir), "--plan", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "MLFLOW_TRACKING_URI": address},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )

    assert done.returncode == 1, done.stdout
    assert "hunter2" not in done.stdout
    assert "sent to http://ann:***@host/x\n" in done.stdout
    assert "RuntimeError: no answer from http://ann:***@host/x\n" in done.stdout


def test_without_a_frozen_experiment_trackers_are_told_every_setting_of_the_training(
    tmp_path: Path,
) -> None:
    train = {"method": "lora", "lr": 1e-4, "lora": {"rank": 8}}
    plan = plan_document(9, experiment="small", train=train)
    settings = settings_of_run(plan, tmp_path / "plan" / "x")
    assert settings.keys() == {"experiment", "train", "plan"}
    assert settings["plan"].keys() == {"cluster", "batch", "chosen"}
    assert (settings["experiment"], settings["plan"]["batch"]["steps"]) == ("small", 9)
    found = dict(flat(settings))
    assert (found["train.method"], found["train.lr"], found["train.epochs"]) == ("lora", 1e-4, 1)
    assert (found["train.lora.rank"], found["train.lora.alpha"], found["plan.chosen.strategy"]) == (
        8,
        32,
        "ddp",
    )


def test_a_missing_package_is_one_line(run_dir: Path, said: list[str], tmp_path: Path) -> None:
    with trackers({"to": ["no_such_tracker"]}, run_dir, tmp_path / "plan", said.append):
        pass

    [line] = said
    assert (
        "no_such_tracker is not installed, so it is left out: pip install -e '.[no_such_tracker]'"
        in line
    )
