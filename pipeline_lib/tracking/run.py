"""The process of one tracker: every number of metrics.jsonl, once, also when the run or this process starts again."""

import os
import select
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline_lib.base.fsio import read_json, write_json
from pipeline_lib.base.lifeline import die_with_owner
from pipeline_lib.config.schema import Train, read_settings
from pipeline_lib.tracking.feed import FOLDER
from pipeline_lib.tracking.mlflow import MlFlow
from pipeline_lib.tracking.swanlab import SwanLab
from pipeline_lib.tracking.tail import follow
from pipeline_lib.tracking.tensorboard import TensorBoard
from pipeline_lib.tracking.tracker import Run, Tracker
from pipeline_lib.tracking.wandb import WeightsAndBiases

TRACKERS: dict[str, Callable[[Run, Mapping[str, str]], Tracker]] = {
    "tensorboard": TensorBoard,
    "swanlab": SwanLab,
    "wandb": WeightsAndBiases,
    "mlflow": MlFlow,
}
METRICS_NAME = "metrics.jsonl"
STATE_NAME = "fed.json"


class Fed:
    """What the tracker has been given: all of the steps before `step`, and `names` at `step`."""

    def __init__(self, path: Path) -> None:
        """Continue from the file at `path`, if there is one."""
        self._path = path
        saved: dict[str, Any] = read_json(path) if path.exists() else {"step": 0, "names": []}
        self.step, self._names = int(saved["step"]), set(saved["names"])

    def new(self, step: int, values: dict[str, float]) -> dict[str, float]:
        """Those of `values` that were not given before, which they are from now on.

        Steps that are trained anew after a kill or a roll-back come out as before, and are left out.
        """
        if step > self.step:
            self.step, self._names = step, set()
        unseen = {name: value for name, value in values.items() if step == self.step and name not in self._names}
        self._names |= unseen.keys()
        return unseen

    def save(self) -> None:
        """Remember it for the next attempt."""
        write_json(self._path, {"step": self.step, "names": sorted(self._names)})


def feed_tracker(name: str, run_dir: Path, plan_dir: Path, environ: Mapping[str, str]) -> None:
    """Follow the metrics in `run_dir` until standard input ends. What the tracker raises ends this process alone."""
    die_with_owner(environ)
    folder = (run_dir / FOLDER / name).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    fed = Fed(folder / STATE_NAME)
    plan = read_json(plan_dir / "plan.json")
    run = Run(
        folder=folder,
        identity=run_dir.name[:32],
        experiment=plan["experiment"],
        project=plan["tracking"]["project"],
        settings=settings_of_run(plan),
        first_step=fed.step + 1,
    )
    tracker = TRACKERS[name](run, environ)
    for rows in follow(run_dir / METRICS_NAME, _input_has_ended):
        for row in rows:
            if values := fed.new(row["step"], numbers(row)):
                tracker.log(row["step"], values)
        tracker.flush()
        fed.save()
    tracker.finish()


def settings_of_run(plan: dict[str, Any]) -> dict[str, Any]:
    """What the trackers show as the run's config: all keys of `train`, and what the plan made of them."""
    train = read_settings(Train, plan["train"]).model_dump(mode="json") if "train" in plan else {}
    return {"cluster": plan["cluster"], "batch": plan["batch"], **train, **plan["chosen"]}


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """The numbers of a row of the metrics, as trackers show them: `train/loss`; not its step, which they have."""
    return {
        f"train/{name}": float(value)
        for name, value in row.items()
        if name != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    }


def _input_has_ended() -> bool:
    """Whether the launcher has closed its end of our standard input; nothing is ever written to it."""
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)
