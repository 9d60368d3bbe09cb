"""MLflow: a database in a file beside the run unless MLFLOW_TRACKING_URI names another."""

import importlib
import time
from collections.abc import Mapping
from typing import Any

from pipeline_lib.tracking.tracker import Run

IDENTITY_TAG = "pipeline.run"
DATABASE = "mlflow.db"


class MlFlow:
    """A run of MLflow, found again by the identity of ours."""

    def __init__(self, run: Run, environ: Mapping[str, str]) -> None:
        """Open it, or the one that an earlier attempt has begun."""
        mlflow: Any = importlib.import_module("mlflow")
        place = environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.folder / DATABASE}"
        self._client: Any = mlflow.MlflowClient(tracking_uri=place)
        self._entities: Any = importlib.import_module("mlflow.entities")
        found = self._client.get_experiment_by_name(run.project)
        artifacts = (run.folder / "artifacts").as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(run.project, artifacts)
        earlier = self._client.search_runs([experiment], f"tags.`{IDENTITY_TAG}` = '{run.identity}'")
        if earlier:
            self._id = earlier[0].info.run_id
        else:
            tags = {IDENTITY_TAG: run.identity}
            self._id = self._client.create_run(experiment, tags=tags, run_name=run.experiment).info.run_id
            for name, value in run.settings.items():
                self._client.log_param(self._id, name, str(value)[:500])

    def log(self, step: int, values: dict[str, float]) -> None:
        """Show `values` at `step`."""
        metric, now_ms = self._entities.Metric, round(time.time() * 1000)
        self._client.log_batch(self._id, [metric(name, value, now_ms, step) for name, value in values.items()])

    def flush(self) -> None:
        """Nothing is kept back."""

    def finish(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)
