"""MLflow: a database file in the run's folder unless MLFLOW_TRACKING_URI names a server."""

import importlib
import time
from collections.abc import Mapping
from typing import Any

from pipeline_lib.config.section import flat
from pipeline_lib.tracking.trackers import FinishedReport, TrackedRun

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
        self._client: Any = mlflow.MlflowClient(
            tracking_uri=server or f"sqlite:///{run.folder / DATABASE}"
        )
        self._entities: Any = importlib.import_module("mlflow.entities")
        found = self._client.get_experiment_by_name(run.project)
        if found:
            experiment = found.experiment_id
        else:
            artifacts = None if server else (run.folder / "artifacts").as_uri()
            experiment = self._client.create_experiment(run.project, artifacts)
        earlier = self._client.search_runs(
            [experiment], f"tags.`{IDENTITY_TAG}` = '{run.identity}'"
        )
        if earlier:
            ours = earlier[0]
        else:
            tags = {IDENTITY_TAG: run.identity}
            ours = self._client.create_run(experiment, tags=tags, run_name=run.experiment)
        self._id = ours.info.run_id
        if not self._client.get_run(self._id).data.params:
            params = []
            for name, value in flat(run.settings):
                params.append(self._entities.Param(name, str(value)[:PARAM_CHARS]))
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
        new = {}
        for name, value in values.items():
            if step > self._last_step.get(name, -1):
                new[name] = value
        self._log(step, new)

    def _log(self, step: int, values: dict[str, float]) -> None:
        metric = self._entities.Metric
        now_ms = round(time.time() * 1000)
        metrics = [metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics)

    def warn(self, step: int, kind: str, text: str) -> None:
        """Tag the run with the text."""
        self._client.set_tag(self._id, f"warning.{kind}", f"step {step}: {text}")

    def flush(self) -> None:
        """Do nothing: no value is buffered."""

    def report(self, step: int, report: FinishedReport) -> None:
        """Log the numbers as metrics at `step`, if new to MLflow; save the page as an artifact."""
        known = self._client.get_run(self._id).data.metrics
        new = {name: value for name, value in report.numbers.items() if known.get(name) != value}
        self._log(step, new)
        self._client.log_artifact(self._id, str(report.page))

    def finish(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)
