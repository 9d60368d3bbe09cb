"""What a whole run is said to cost, from two steps and a plan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline_lib.config.schema import Config
from pipeline_lib.core.run_record import RunRecord
from pipeline_lib.workflow.cost import Cost
from tests.complete import plan_document

SAVED: list[dict[str, Any]] = [
    {"event": "checkpoint.saved", "bytes": 2_000_000_000, "duration_s": 10.0},
    {"event": "run.end"},
]
STEP = {
    "step_s": {"value": 2.0, "low": 1.8, "high": 2.5},
    "run_s": {"value": 2100.0, "low": 1900.0, "high": 2600.0},
}


def cost(
    tmp_path: Path, step_s: float, prediction: dict[str, Any] | None = None, **cluster: Any
) -> dict[str, str]:
    config = {
        "experiment": "demo",
        "model": {"source": "tiny"},
        "data": {"train": [{"source": "pydoc"}]},
        "cluster": cluster,
    }
    plan = replace(plan_document(1000), prediction=None)
    if prediction is not None:
        plan = plan_document(1000, prediction=prediction)
    found = Cost.of(
        Config.model_validate_json(json.dumps(config)), plan, step_s, 30.0, RunRecord(SAVED)
    )
    return dict(found.rows(tmp_path))


@pytest.mark.parametrize(
    ("step_s", "said"),
    [
        (
            3.0,
            "35 min 00 s (31 min 40 s to 51 min 40 s)",
        ),  # the plan may be right: these were first steps
        (1.9, "33 min 20 s (31 min 40 s to 35 min 00 s)"),
        (1.0, "18 min 20 s (18 min 20 s to 35 min 00 s)"),  # faster than the plan's best
    ],
)
def test_first_steps_bound_the_time_and_the_plan_says_what_is_beside_them(
    tmp_path: Path, step_s: float, said: str
) -> None:
    assert cost(tmp_path, step_s, STEP)["time"].startswith(
        f"{said}: from the plan, and from the faster of these two"
    )


def test_without_a_prediction_there_is_only_an_upper_end(tmp_path: Path) -> None:
    found = cost(tmp_path, 3.0, gpus_per_node=8)
    assert found["time"].startswith("at most 51 min 40 s: from the faster of these two steps")
    assert found["GPU-hours"].startswith("6.89 (6.89 to 6.89) on 8 GPUs")


def test_disk_and_jobs(tmp_path: Path) -> None:
    found = cost(
        tmp_path, 3.0, STEP, gpus_per_node=2, gpu="h100", runtime_minutes=20, max_requeues=1
    )
    assert found["GPU-hours"] == "1.17 (1.06 to 1.72) on 2 GPUs"
    assert found["disk for checkpoints"].startswith("6 GB for 3 of 2 GB; ")
    assert (
        found["jobs"]
        == "2 to 3 of cluster.runtime_minutes 20; cluster.max_requeues 1 allows 2, raise it"
    )
    assert found["startup and shutdown"] == "30.0 s of each job"
    assert "is not set" in cost(tmp_path, 3.0)["jobs"]


def test_a_time_limit_that_is_over_before_the_first_step_is_said(tmp_path: Path) -> None:
    config = Config.model_validate_json(
        '{"experiment": "demo", "model": {"source": "tiny"}, "data": {"train": [{"source": '
        '"pydoc"}]},'
        ' "cluster": {"runtime_minutes": 1}}'
    )
    plan = replace(plan_document(10), prediction=None)
    found = Cost.of(config, plan, 1.0, 90.0, RunRecord())
    rows = dict(found.rows(tmp_path))
    assert "is over before the first step: startup and shutdown take 1 min 30 s" in rows["jobs"]
    assert rows["disk for checkpoints"] == "not known: no checkpoint was written"
