"""One tracker's process: it feeds each number of metrics.jsonl once, even after restarts."""

import fcntl
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline_lib.core.files import read_json, remove_dir, write_json
from pipeline_lib.core.processes import die_with_owner
from pipeline_lib.core.rank_use import PEAK_MEMORY, RECENT_READINGS, UTILIZATION, RankUse
from pipeline_lib.core.run_folder import METRICS_NAME, PLAN_NAME
from pipeline_lib.core.run_record import objects
from pipeline_lib.records.plan import read_plan
from pipeline_lib.tracking.feed import FOLDER, kept_report
from pipeline_lib.tracking.settings import numbers_in, settings_of_run
from pipeline_lib.tracking.to_mlflow import MlFlow
from pipeline_lib.tracking.to_swanlab_and_wandb import SwanLab, WeightsAndBiases
from pipeline_lib.tracking.to_tensorboard import TensorBoard
from pipeline_lib.tracking.trackers import TrackedRun, Tracker

POLL_S = 0.5


def follow(path: Path, is_over: Callable[[], bool]) -> Iterator[list[dict[str, Any]]]:
    """Yield batches of the objects appended to `path`, until `is_over` is True and all is read.

    A line counts once its newline is written; lines that are no JSON object are skipped. A file
    that has become shorter is read again from the start.
    """
    position = 0
    while True:
        is_last = is_over()
        rows: list[dict[str, Any]] = []
        size = path.stat().st_size if path.exists() else 0
        position = position if size >= position else 0
        if size > position:
            with path.open("rb") as file:
                file.seek(position)
                text = file.read()
            rows = objects(text)
            position += text.rfind(b"\n") + 1
        if rows:
            yield rows
        if is_last:
            return
        if not rows:
            time.sleep(POLL_S)


# Feeding: a tracker that cannot continue the run of an earlier process receives the whole run
# again, and its earlier files are removed. metrics.jsonl holds the whole run.

TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "swanlab": SwanLab,
    "wandb": WeightsAndBiases,
    "mlflow": MlFlow,
}
STATE_NAME = "fed.json"
MOST_RANKS = 64  # with a curve of their own; MLflow takes a thousand numbers of a step


class Fed:
    """The record of what the tracker has: all before `step`, some names at `step`, the report."""

    def __init__(self, path: Path) -> None:
        """Load the state from the file at `path`, if it exists."""
        self._path = path
        saved: dict[str, Any] = read_json(path) if path.exists() else {"step": 0, "names": []}
        self.step, self._names = int(saved["step"]), set(saved["names"])
        self.report: str | None = saved.get("report")

    def new(self, step: int, values: dict[str, float]) -> dict[str, float]:
        """Return those of `values` that were not fed before, and mark them as fed.

        Steps that are trained again after a kill or a rollback give the same values, and are left
        out.
        """
        if step > self.step:
            self.step = step
            self._names = set()
        elif step < self.step:
            return {}
        unseen = {name: value for name, value in values.items() if name not in self._names}
        self._names |= unseen.keys()
        return unseen

    def save(self) -> None:
        """Write the state for the next attempt."""
        write_json(
            self._path, {"step": self.step, "names": sorted(self._names), "report": self.report}
        )


def feed_tracker(name: str, run_dir: Path, plan_dir: Path, environ: Mapping[str, str]) -> None:
    """Follow the metrics in `run_dir` until standard input ends, then add any report there is.

    An exception from the tracker ends only this process.
    """
    die_with_owner(environ)
    folder = (run_dir / FOLDER / name).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_suffix(".lock")):
        state = folder / STATE_NAME
        # without state, a database may be incomplete
        if not (TRACKERS[name].joins(environ) and state.exists()):
            remove_dir(folder)
            folder.mkdir()
        fed = Fed(state)
        plan = read_plan(plan_dir / PLAN_NAME)
        run = TrackedRun(
            folder=folder,
            identity=run_dir.name[:32],
            experiment=plan.experiment,
            project=plan.tracking.project,
            settings=settings_of_run(plan, plan_dir),
            first_step=fed.step + 1,
        )
        tracker = TRACKERS[name](run, environ)
        warner = Warner(tracker)
        for rows in follow(run_dir / METRICS_NAME, _input_has_ended):
            for row in rows:
                if values := fed.new(row["step"], numbers(row)):
                    tracker.log(row["step"], values)
                    warner.add(row)
            tracker.flush()
            fed.save()
        report = kept_report(run_dir)
        if report is not None and report.digest != fed.report:
            tracker.report(fed.step, report)
            fed.report = report.digest
            fed.save()
        tracker.finish()


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Wait for the end of an earlier attempt's process; the system frees dead ones' locks."""
    with lock.open("wb") as file:
        with suppress(OSError):  # a file system without flock
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """Return a metrics row's numbers, except its step, by names that trackers show: `train/loss`.

    Those of ranks are `train/gpu_utilization_of_ranks/0` and so on; of more than MOST_RANKS only
    the `lowest` and the `highest`.
    """
    own = {name: value for name, value in row.items() if not isinstance(value, dict)}
    own.pop("step", None)
    for name in (UTILIZATION, PEAK_MEMORY):
        values = own.get(name)
        if isinstance(values, list) and values:
            shown = {}
            if len(values) <= MOST_RANKS:
                shown = {str(rank): value for rank, value in enumerate(values)}
            shown["lowest"] = min(values)
            shown["highest"] = max(values)
            own[name] = shown
    return numbers_in(own, "train")


class Warner:
    """The warnings about the ranks of a run in work, each kind told once."""

    def __init__(self, tracker: Tracker) -> None:
        """Tell `tracker`."""
        self._tracker = tracker
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT_READINGS)
        self._told: set[str] = set()

    def add(self, row: dict[str, Any]) -> None:
        """Add a row of the metrics; tell what is new with it."""
        if PEAK_MEMORY not in row:
            return
        self._recent.append(row)
        for kind, text in RankUse.of(self._recent).warnings().items():
            if kind not in self._told:
                self._told.add(kind)
                self._tracker.warn(row["step"], kind, text)


def _input_has_ended() -> bool:
    """Return whether the launcher closed our standard input, which never carries anything."""
    readable, _, _ = select.select([sys.stdin], [], [], 0)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)
