"""Each tracker, with its own library and offline: its files after a kill, resume and report."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.compile import run_digest
from pipeline_lib.core.files import read_json, write_json, write_text
from pipeline_lib.core.store import Spec, Store
from pipeline_lib.records.record import to_json
from pipeline_lib.tracking.feed import hand_over
from tests.complete import plan_document
from tests.report.fakes import World, realistic_files
from tests.tracking import reading
from tests.tracking.test_tracking import ROOT, write_rows

MODES = ("WANDB_MODE", "SWANLAB_MODE", "MLFLOW_TRACKING_URI")
PAGE = "<!doctype html><title>small</title><p>better than its base"
READERS: dict[str, Callable[[Path], reading.Shown]] = {
    "tensorboard": reading.tensorboard,
    "swanlab": reading.swanlab,
    "wandb": reading.wandb,
    "mlflow": reading.mlflow,
}
CONFIG = {
    "experiment": "small",
    "model": {"source": "modelscope", "name": "Qwen/Qwen3-0.6B"},
    "data": {"train": [{"path": "https://ann:hunter2@host/rows.jsonl"}]},
    "train": {"lr": 1e-4, "method": "lora", "lora": {"rank": 8}},
    "evaluate": {"generations": 3},
}


class Experiment:
    """A finished one in a store, except its training's metrics, and the tracker of those."""

    def __init__(self, root: Path, tracker: str) -> None:
        """Write what a tracker reads of it."""
        self.store, self.tracker = Store(root / "store"), tracker
        self.train = Spec("train", 1, {"lr": 1e-4}, {})
        self.run_dir = self.store.run_dir(run_digest(self.train))
        self.plan_dir = self.store.root / "plan" / "0123456789abcdef"
        self.store.write_specs([self.train])
        tracking = {"to": [self.tracker], "project": "tests"}
        plan = to_json(plan_document(9, experiment="small", tracking=tracking))
        for folder in (self.plan_dir, self.store.sealed(self.train.ref)):
            write_json(folder / "plan.json", plan)
        for name, at, config in (
            ("older", 1000, {**CONFIG, "evaluate": {"generations": 1}}),
            ("newer", 2000, CONFIG),
        ):
            path = self.store.root / "experiments" / f"{name}.json"
            write_json(
                path,
                {
                    "config": config,
                    "parts": {"plan": self.plan_dir.name, "train": self.train.digest},
                },
            )
            os.utime(path, (at, at))
        write_text(self.store.root / "experiments" / "damaged.json", '{"config": {')

    @property
    def folder(self) -> Path:
        return self.run_dir / "tracking" / self.tracker

    def start(self) -> "subprocess.Popen[bytes]":
        """The tracker's process, as the training starts it."""
        command = [sys.executable, "-m", "pipeline_lib", "track", "--to", self.tracker]
        command += ["--run-dir", str(self.run_dir), "--plan", str(self.plan_dir)]
        return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True)

    def train_until_killed(self) -> None:
        """Seven steps reach the tracker, and it is killed in the midst."""
        write_rows(self.run_dir / "metrics.jsonl", range(1, 8))
        process = self.start()
        fed, deadline_s = self.folder / "fed.json", time.monotonic() + 120
        while not (fed.exists() and read_json(fed)["step"] == 7):
            assert process.poll() is None and time.monotonic() < deadline_s
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()

    def report(
        self, loss: float, experiment: str = "small", settings: dict[str, Any] | None = None
    ) -> list[str]:
        """Seal a report of it and hand it over; what was said."""
        spec = Spec(
            "report", 1, {"experiment": experiment, **(settings or {})}, {"train": self.train.ref}
        )
        sealed, said = self.store.sealed(spec.ref), list[str]()
        write_text(sealed / "report.html", f"{PAGE}: {loss}")
        write_json(
            sealed / "summary.json",
            {"eval": {"tuned": {"loss": loss}, "verdict": "better"}, "train": {"x": 1}},
        )
        hand_over(spec, self.store, "report.html", "summary.json", said.append)
        return said


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in MODES:
        monkeypatch.delenv(name, raising=False)
    # settings of whoever runs the tests, and what libraries leave
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def losses(steps: range) -> list[tuple[int, float]]:
    return [(step, 10.0 - step) for step in steps]


@pytest.mark.parametrize("tracker", READERS)
def test_a_killed_run_goes_on_as_one_with_every_number_once_its_config_and_its_report(
    tracker: str, tmp_path: Path
) -> None:
    pytest.importorskip(tracker)
    experiment = Experiment(tmp_path, tracker)
    experiment.train_until_killed()
    # the next attempt begins behind its checkpoint
    write_rows(experiment.run_dir / "metrics.jsonl", range(5, 10))
    # As if the kill had come between the numbers and the note that they were given.
    write_json(experiment.folder / "fed.json", {"step": 4, "names": ["train/loss"]})
    said = experiment.report(loss=2.5)
    assert said == []

    shown = READERS[tracker](experiment.folder)
    assert shown.points["train/loss"] == losses(range(1, 10))
    assert "train/kind" not in shown.points
    assert shown.final["eval/tuned/loss"] == 2.5
    assert "eval/verdict" not in shown.final
    assert shown.page == f"{PAGE}: 2.5"
    wanted = {"model.name": "Qwen/Qwen3-0.6B", "train.lr": "0.0001", "train.lora.rank": "8"}
    wanted |= {"evaluate.generations": "3", "plan.chosen.strategy": "ddp"}
    assert shown.config.items() >= wanted.items()
    assert "https://ann:***@host/rows.jsonl" in shown.config["data.train"]
    files = [path for path in experiment.folder.rglob("*") if path.is_file()]
    assert [path for path in files if b"hunter2" in path.read_bytes()] == []

    experiment.report(loss=2.5)  # the same again adds nothing
    assert READERS[tracker](experiment.folder) == shown


@pytest.mark.parametrize("tracker", READERS)
def test_every_rank_is_shown_and_a_warning_about_them_comes_once(
    tracker: str, tmp_path: Path
) -> None:
    pytest.importorskip(tracker)
    experiment = Experiment(tmp_path, tracker)
    path = experiment.run_dir / "metrics.jsonl"
    for step in range(10, 60, 10):
        reading = {
            "gpu_utilization_of_ranks": [0.95, 0.5],
            "peak_memory_bytes_of_ranks": [7e9, 7e9 + step],
        }
        write_rows(path, range(step, step + 1))
        *before, last = path.read_text().splitlines()
        path.write_text("\n".join([*before, json.dumps({**json.loads(last), **reading})]) + "\n")
    process = experiment.start()
    process.communicate(timeout=120)
    assert process.returncode == 0

    shown = READERS[tracker](experiment.folder)

    utilization = "train/gpu_utilization_of_ranks"
    assert shown.points[f"{utilization}/1"] == [(step, 0.5) for step in range(10, 60, 10)]
    assert shown.points[f"{utilization}/lowest"] == shown.points[f"{utilization}/1"]
    assert len(shown.warnings) == 2, shown.warnings
    text = " ".join(shown.warnings)
    assert "stays under 80% on rank 1 (50%)" in text
    assert "50% on rank 1, 95% on rank 0" in text


def test_what_a_kill_left_half_made_is_made_anew(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path, "tensorboard")
    write_rows(experiment.run_dir / "metrics.jsonl", range(1, 4))
    write_text(experiment.folder / "events.out.tfevents.1.host", "cut sho")
    experiment.report(loss=2.5)

    assert reading.tensorboard(experiment.folder).points["train/loss"] == losses(range(1, 4))
    assert not (experiment.folder / "events.out.tfevents.1.host").exists()


def test_another_evaluation_of_the_same_training_replaces_the_last_numbers(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path, "tensorboard")
    write_rows(experiment.run_dir / "metrics.jsonl", range(1, 4))
    experiment.folder.mkdir(parents=True)
    experiment.report(loss=2.5)
    experiment.report(loss=2.0, settings={"evaluated": "anew"})

    shown = reading.tensorboard(experiment.folder)
    assert shown.points["train/loss"] == losses(range(1, 4))
    assert shown.final["eval/tuned/loss"] == 2.0
    assert shown.page == f"{PAGE}: 2.0"


def test_the_command_of_the_report_rule_hands_the_page_over(tmp_path: Path) -> None:
    world = World(Store(tmp_path / "store"), files=realistic_files())
    world.files["train"]["plan.json"]["tracking"] = {"to": ["tensorboard"], "project": "tests"}
    world.seal_inputs()
    world.store.write_specs(world.experiment.specs.values())
    run_dir = world.store.run_dir(run_digest(world.experiment.specs["train"]))
    write_rows(run_dir / "metrics.jsonl", range(1, 4))
    (run_dir / "tracking" / "tensorboard").mkdir(parents=True)
    spec = world.store.spec_path(world.experiment.ref("report").digest)
    subprocess.run(
        [sys.executable, "-m", "pipeline_lib", "report", "--spec", spec], cwd=ROOT, check=True
    )

    shown = reading.tensorboard(run_dir / "tracking" / "tensorboard")
    sealed = world.folder("report")
    assert shown.page == (sealed / "report.html").read_text()
    tuned = read_json(sealed / "summary.json")["eval"]["tuned"]["loss"]
    [(step, loss)] = shown.points["eval/tuned/loss"]
    assert step == 3
    assert loss == pytest.approx(tuned)


def test_a_report_of_another_name_stays_out_of_the_run(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path, "tensorboard")
    experiment.folder.mkdir(parents=True)

    [line] = experiment.report(loss=2.0, experiment="other")
    assert (
        line == "tracking: the training is shown as that of small, and its report stays that one's"
    )
    assert list(experiment.folder.iterdir()) == []


def test_a_report_without_a_run_to_go_to_is_one_line(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path, "tensorboard")

    assert experiment.report(loss=2.0) == [
        f"tracking: {experiment.run_dir} has no run of tensorboard, so the report goes to none"
    ]
    assert not experiment.run_dir.exists()


@pytest.mark.parametrize("damaged", ["plan.json", "summary.json"])
def test_what_is_damaged_is_said_and_fails_nothing(damaged: str, tmp_path: Path) -> None:
    experiment = Experiment(tmp_path, "tensorboard")
    experiment.folder.mkdir(parents=True)
    if damaged == "plan.json":
        write_text(experiment.store.sealed(experiment.train.ref) / "plan.json", "{")
        [line] = experiment.report(loss=2.0)
    else:
        spec = Spec("report", 1, {"experiment": "small"}, {"train": experiment.train.ref})
        said = list[str]()
        hand_over(spec, experiment.store, "report.html", "summary.json", said.append)
        [line] = said

    assert line.startswith("tracking: the report goes to no tracker (")
