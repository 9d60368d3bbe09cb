"""Adapters for TensorBoard, SwanLab, Weights & Biases and MLflow: they take numbers by step, and a report."""

import importlib
import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline_lib.config.section import flat, read_settings
from pipeline_lib.config.train import Train
from pipeline_lib.core.files import read_json
from pipeline_lib.core.text import redact
from pipeline_lib.records.plan import PlanDocument

# The run's config in the trackers: the resolved config of its experiment, under the keys of the YAML.


def settings_of_run(plan: PlanDocument, plan_dir: Path) -> dict[str, Any]:
    """Return the resolved config and, under `plan`, the plan's results; credentials in URLs are masked.

    The config is that of the newest frozen experiment with the sealed directory `plan_dir`. Without one it has only the
    experiment's name and the `train` section, both from the plan.
    """
    config = _frozen_config(plan_dir.absolute(), plan.experiment)
    if config is None:
        train = read_settings(Train, plan.train).model_dump(mode="json") if plan.train is not None else {}
        config = {"experiment": plan.experiment, "train": train}
    made = plan.model_dump(include={"cluster", "batch", "chosen"}, exclude_unset=True)
    settings: dict[str, Any] = _redacted({**config, "plan": made})
    return settings


def numbers_in(values: Mapping[str, Any], above: str) -> dict[str, float]:
    """Return the numbers of `values` under the names that trackers show: `train/loss`, `eval/tuned/loss`."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            numbers |= numbers_in(value, f"{above}/{name}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"{above}/{name}"] = float(value)
    return numbers


def _frozen_config(sealed: Path, experiment: str) -> dict[str, Any] | None:
    """Return the config of the newest `experiment` with `sealed` (STORE/STAGE/DIGEST) among its parts, or None."""
    newest: tuple[float, dict[str, Any] | None] = (0.0, None)
    for path in (sealed.parents[1] / "experiments").glob("*.json"):
        try:
            frozen, frozen_at = read_json(path), path.stat().st_mtime
            config, parts = frozen["config"], frozen["parts"].values()
            if sealed.name in parts and config["experiment"] == experiment and frozen_at > newest[0]:
                newest = frozen_at, config
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # another format, damaged or just removed
    return newest[1]


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _redacted(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    return redact(value) if isinstance(value, str) else value


# The interface of a tracker: it takes numbers by step, and a report at the end.


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it. `folder` is where the tracker keeps its files.

    `first_step` is the first step that the tracker has not received; it is over 1 if the run continues.
    """

    folder: Path
    identity: str
    experiment: str
    project: str
    settings: dict[str, Any]
    first_step: int


@dataclass(frozen=True)
class FinishedReport:
    """The page of a finished experiment, the digest that names it, and the numbers of its evaluation."""

    digest: str
    page: Path
    numbers: dict[str, float]


class Tracker(Protocol):
    """An open run of a tracker."""

    def __init__(self, run: TrackedRun, environ: Mapping[str, str]) -> None:
        """Open the run; if the tracker `joins`, continue the run of an earlier process."""

    @staticmethod
    def joins(environ: Mapping[str, str]) -> bool:
        """Return whether a process can continue an earlier one's run; if not, each writes the whole run."""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log `values` at `step`."""

    def warn(self, step: int, kind: str, text: str) -> None:
        """Show the warning `text`, as of `step`, to people."""

    def flush(self) -> None:
        """Write out what was logged, if the tracker can, so that a kill does not lose it."""

    def report(self, step: int, report: FinishedReport) -> None:
        """Log the numbers of `report` as results of the last step, `step`, and attach its page to the run."""

    def finish(self) -> None:
        """Close the run."""


# TensorBoard: event files, written by TensorBoard's own writer, which does not need torch.


class TensorBoard:
    """A TensorBoard event file, beside those of earlier attempts."""

    def __init__(self, run: TrackedRun, _environ: Mapping[str, str]) -> None:
        """Open a new file; the viewer drops steps of earlier files from `run.first_step` on."""
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._tensors: Any = importlib.import_module("tensorboard.compat.proto.tensor_pb2")
        self._types: Any = importlib.import_module("tensorboard.compat.proto.types_pb2")
        self._folder = run.folder
        self._writer: Any = writer.EventFileWriter(str(run.folder))
        if run.first_step > 1:
            started = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(run.first_step, session_log=started)
        else:
            self._show_text("config", 0, json.dumps(run.settings, indent=2, ensure_ascii=False))

    @staticmethod
    def joins(_environ: Mapping[str, str]) -> bool:
        """Return True: TensorBoard reads all files of a folder as one run."""
        return True

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log `values` at `step`."""
        shown = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=self._summaries.Summary(value=shown))

    def warn(self, step: int, kind: str, text: str) -> None:
        """Show the text at `step`."""
        self._show_text(f"warning/{kind}", step, text)

    def report(self, step: int, report: FinishedReport) -> None:
        """Log the numbers at `step`; copy the page beside the event files and log its path as text."""
        page = self._folder / "report.html"
        shutil.copyfile(report.page, page)
        self.log(step, report.numbers)
        self._show_text("report", step, str(page))

    def _show_text(self, name: str, step: int, text: str) -> None:
        """Log `text` verbatim: the indentation keeps it from being rendered as Markdown."""
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        value = self._summaries.Summary.Value(
            tag=name,
            metadata=self._summaries.SummaryMetadata(plugin_data=plugin),
            tensor=self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[indented.encode()]),
        )
        self._add(step, summary=self._summaries.Summary(value=[value]))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))

    def flush(self) -> None:
        """Write buffered events to the file."""
        self._writer.flush()

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()


# SwanLab and Weights & Biases: offline unless SWANLAB_MODE or WANDB_MODE says otherwise; `swanlab sync` and
# `wandb sync` upload the run later.

OFFLINE = "offline"


class _LoggedRun:
    """What the two trackers have in common: their own process writes values as it receives them."""

    _run: Any

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log `values` at `step`."""
        self._run.log(values, step=step)

    def flush(self) -> None:
        """Do nothing: no value is buffered."""

    def finish(self) -> None:
        """Close the run."""
        self._run.finish()

    def _save_page(self, report: FinishedReport, **options: Any) -> None:
        page = Path(self._run.dir) / "report.html"
        shutil.copyfile(report.page, page)
        self._run.save(str(page), base_path=str(self._run.dir), **options)


class SwanLab(_LoggedRun):
    """A SwanLab run with the identity of our run, so that later attempts join it in SwanLab's cloud."""

    def __init__(self, run: TrackedRun, environ: Mapping[str, str]) -> None:
        """Open the run; in the cloud, resume it if it exists."""
        swanlab: Any = importlib.import_module("swanlab")
        self._run = swanlab.init(
            project=run.project,
            name=run.experiment,
            id=run.identity,
            log_dir=str(run.folder),
            config=run.settings,
            mode=environ.get("SWANLAB_MODE", OFFLINE),
            **({"resume": "allow"} if self.joins(environ) else {}),
        )

    @staticmethod
    def joins(environ: Mapping[str, str]) -> bool:
        """Return whether the cloud is used; otherwise every process starts its own files."""
        return environ.get("SWANLAB_MODE", OFFLINE) in ("cloud", "online")

    def warn(self, step: int, kind: str, text: str) -> None:
        """Log the text at `step`."""
        swanlab: Any = importlib.import_module("swanlab")
        self._run.log({f"warning/{kind}": swanlab.Text(text)}, step=step)

    def report(self, step: int, report: FinishedReport) -> None:
        """Log the numbers at `step`; save the page as a file of the run."""
        self.log(step, report.numbers)
        self._save_page(report)


class WeightsAndBiases(_LoggedRun):
    """A wandb run with the identity of our run, so that later attempts join it on wandb's server."""

    def __init__(self, run: TrackedRun, environ: Mapping[str, str]) -> None:
        """Open the run; resume it if it exists."""
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            project=run.project,
            name=run.experiment,
            id=run.identity,
            resume="allow",
            dir=str(run.folder),
            config=run.settings,
            mode=environ.get("WANDB_MODE", OFFLINE),
            settings=wandb.Settings(silent=True, disable_git=True, save_code=False, console="off"),
        )

    @staticmethod
    def joins(environ: Mapping[str, str]) -> bool:
        """Return whether the server is used; offline, every process starts its own files."""
        return environ.get("WANDB_MODE", OFFLINE) == "online"

    def warn(self, step: int, kind: str, text: str) -> None:
        """Send an alert, which wandb's server shows and mails."""
        self._run.alert(title=kind, text=f"step {step}: {text}", level="WARN")

    def report(self, _step: int, report: FinishedReport) -> None:
        """Set the numbers as the run's summary, which a later report replaces; save the page as a file."""
        self._run.summary.update(report.numbers)
        self._save_page(report, policy="now")


# MLflow: a database file in the run's folder unless MLFLOW_TRACKING_URI names a server.

IDENTITY_TAG = "pipeline.run"
DATABASE = "mlflow.db"
PARAM_CHARS = 500
BATCH_PARAMS = 100


class MlFlow:
    """An MLflow run, found again by a tag with the identity of our run."""

    def __init__(self, run: TrackedRun, environ: Mapping[str, str]) -> None:
        """Open the run, or the one that an earlier attempt created."""
        mlflow: Any = importlib.import_module("mlflow")
        server = environ.get("MLFLOW_TRACKING_URI")
        self._client: Any = mlflow.MlflowClient(tracking_uri=server or f"sqlite:///{run.folder / DATABASE}")
        self._entities: Any = importlib.import_module("mlflow.entities")
        found = self._client.get_experiment_by_name(run.project)
        artifacts = None if server else (run.folder / "artifacts").as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(run.project, artifacts)
        earlier = self._client.search_runs([experiment], f"tags.`{IDENTITY_TAG}` = '{run.identity}'")
        if earlier:
            self._id = earlier[0].info.run_id
        else:
            tags = {IDENTITY_TAG: run.identity}
            self._id = self._client.create_run(experiment, tags=tags, run_name=run.experiment).info.run_id
        if not self._client.get_run(self._id).data.params:
            params = [self._entities.Param(name, str(value)[:PARAM_CHARS]) for name, value in flat(run.settings)]
            for start in range(0, len(params), BATCH_PARAMS):
                self._client.log_batch(self._id, params=params[start : start + BATCH_PARAMS])
            self._client.log_dict(self._id, run.settings, "config.json")
        # The last step of every metric in MLflow: a killed process did not save what it had logged.
        names = self._client.get_run(self._id).data.metrics
        history = self._client.get_metric_history
        self._last_step = {name: max(one.step for one in history(self._id, name)) for name in names}

    @staticmethod
    def joins(_environ: Mapping[str, str]) -> bool:
        """Return True: the database holds the run."""
        return True

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log `values` at `step`, except for metrics that have reached `step` already."""
        self._log(step, {name: value for name, value in values.items() if step > self._last_step.get(name, -1)})

    def _log(self, step: int, values: dict[str, float]) -> None:
        metric, now_ms = self._entities.Metric, round(time.time() * 1000)
        self._client.log_batch(self._id, [metric(name, value, now_ms, step) for name, value in values.items()])

    def warn(self, step: int, kind: str, text: str) -> None:
        """Tag the run with the text."""
        self._client.set_tag(self._id, f"warning.{kind}", f"step {step}: {text}")

    def flush(self) -> None:
        """Do nothing: no value is buffered."""

    def report(self, step: int, report: FinishedReport) -> None:
        """Log the numbers as metrics at `step`, unless MLflow has the same values; save the page as an artifact."""
        known = self._client.get_run(self._id).data.metrics
        self._log(step, {name: value for name, value in report.numbers.items() if known.get(name) != value})
        self._client.log_artifact(self._id, str(report.page))

    def finish(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)
