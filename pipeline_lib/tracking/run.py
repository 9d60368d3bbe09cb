"""The process of one tracker: every number of metrics.jsonl, once, also when the run or this process starts again."""

import fcntl
import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline_lib.core.files import read_json, remove_dir, write_json
from pipeline_lib.core.processes import die_with_owner
from pipeline_lib.core.run_folder import METRICS_NAME, PLAN_NAME
from pipeline_lib.tracking.feed import FOLDER, kept_report
from pipeline_lib.tracking.trackers import MlFlow, Run, SwanLab, TensorBoard, Tracker, WeightsAndBiases, settings_of_run

# Follows a file of JSON objects, one a line, that another process appends to.

POLL_S = 0.5


def follow(path: Path, is_over: Callable[[], bool]) -> Iterator[list[dict[str, Any]]]:
    """The objects in `path` as they come, in batches, until `is_over` and all is read.

    A line counts once its end is written; one that a kill cut short is left out. A file that has become shorter
    is read anew.
    """
    position = 0
    while True:
        is_last = is_over()
        rows, position = _read_from(path, position)
        if rows:
            yield rows
        if is_last:
            return
        if not rows:
            time.sleep(POLL_S)


def _read_from(path: Path, position: int) -> tuple[list[dict[str, Any]], int]:
    """Objects of the whole lines behind `position`, in bytes, and where they end."""
    if not path.exists():
        return [], 0
    if path.stat().st_size < position:
        position = 0
    with path.open("rb") as file:
        file.seek(position)
        text = file.read()
    whole = text[: text.rfind(b"\n") + 1]
    return list(_objects(whole)), position + len(whole)


def _objects(text: bytes) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


# The process of one tracker: every number of metrics.jsonl, once, also when the run or this process starts again.
#
# A tracker that cannot go on with a run that another process began is given the whole run anew, and its earlier files
# are removed: metrics.jsonl holds all of it.

TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "swanlab": SwanLab,
    "wandb": WeightsAndBiases,
    "mlflow": MlFlow,
}
STATE_NAME = "fed.json"


class Fed:
    """What the tracker has been given: all of the steps before `step`, `names` at `step`, and the report `report`."""

    def __init__(self, path: Path) -> None:
        """Continue from the file at `path`, if there is one."""
        self._path = path
        saved: dict[str, Any] = read_json(path) if path.exists() else {"step": 0, "names": []}
        self.step, self._names = int(saved["step"]), set(saved["names"])
        self.report: str | None = saved.get("report")

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
        write_json(self._path, {"step": self.step, "names": sorted(self._names), "report": self.report})


def feed_tracker(name: str, run_dir: Path, plan_dir: Path, environ: Mapping[str, str]) -> None:
    """Follow the metrics in `run_dir` until standard input ends, then add the report, if it is made.

    What the tracker raises ends this process alone.
    """
    die_with_owner(environ)
    folder = (run_dir / FOLDER / name).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_suffix(".lock")):
        state = folder / STATE_NAME
        if not (TRACKERS[name].joins(environ) and state.exists()):  # nor does a half-made database help anyone
            remove_dir(folder)
            folder.mkdir()
        fed = Fed(state)
        tracker = TRACKERS[name](_run_of(run_dir, plan_dir, folder, fed.step + 1), environ)
        _give_metrics(tracker, run_dir / METRICS_NAME, fed)
        report = kept_report(run_dir)
        if report is not None and report.digest != fed.report:
            tracker.report(fed.step, report)
            fed.report = report.digest
            fed.save()
        tracker.finish()


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait until the process of an earlier attempt, which may be dying, is gone; the system unlocks for the dead."""
    with lock.open("wb") as file:
        with suppress(OSError):  # a file system without such locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run_of(run_dir: Path, plan_dir: Path, folder: Path, first_step: int) -> Run:
    plan = read_json(plan_dir / PLAN_NAME)
    return Run(
        folder=folder,
        identity=run_dir.name[:32],
        experiment=plan["experiment"],
        project=plan["tracking"]["project"],
        settings=settings_of_run(plan, plan_dir),
        first_step=first_step,
    )


def _give_metrics(tracker: Tracker, metrics: Path, fed: Fed) -> None:
    for rows in follow(metrics, _input_has_ended):
        for row in rows:
            if values := fed.new(row["step"], numbers(row)):
                tracker.log(row["step"], values)
        tracker.flush()
        fed.save()


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
