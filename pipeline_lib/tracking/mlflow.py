"""MLflow: a database in a file beside the run unless MLFLOW_TRACKING_URI names another."""

import importlib
import time
from collections.abc import Mapping
from typing import Any

from pipeline_lib.tracking.settings import flat
from pipeline_lib.tracking.tracker import Report, Run

IDENTITY_TAG = "pipeline.run"
DATABASE = "mlflow.db"
PARAM_CHARS = 500
BATCH_PARAMS = 100


class MlFlow:
    """A run of MLflow, found again by the identity of ours."""

    def __init__(self, run: Run, environ: Mapping[str, str]) -> None:
        """Open it, or the one that an earlier attempt has begun."""
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
            self._log_settings(run.settings)
        self._last_step = self._last_steps()

    @staticmethod
    def joins(_environ: Mapping[str, str]) -> bool:
        """Its database holds the run."""
        return True

    def _log_settings(self, settings: dict[str, Any]) -> None:
        params = [self._entities.Param(name, str(value)[:PARAM_CHARS]) for name, value in flat(settings)]
        for start in range(0, len(params), BATCH_PARAMS):
            self._client.log_batch(self._id, params=params[start : start + BATCH_PARAMS])
        self._client.log_dict(self._id, settings, "config.json")

    def _last_steps(self) -> dict[str, int]:
        """The last step of every metric that it has: a process that is killed does not remember what it gave last."""
        names = self._client.get_run(self._id).data.metrics
        return {name: max(one.step for one in self._client.get_metric_history(self._id, name)) for name in names}

    def log(self, step: int, values: dict[str, float]) -> None:
        """Show `values` at `step`."""
        self._log(step, {name: value for name, value in values.items() if step > self._last_step.get(name, -1)})

    def _log(self, step: int, values: dict[str, float]) -> None:
        metric, now_ms = self._entities.Metric, round(time.time() * 1000)
        self._client.log_batch(self._id, [metric(name, value, now_ms, step) for name, value in values.items()])

    def flush(self) -> None:
        """Nothing is kept back."""

    def report(self, step: int, report: Report) -> None:
        """Its numbers as metrics at `step`, unless they stand there; the page as an artifact."""
        known = self._client.get_run(self._id).data.metrics
        self._log(step, {name: value for name, value in report.numbers.items() if known.get(name) != value})
        self._client.log_artifact(self._id, str(report.page))

    def finish(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)
