"""The run's config in trackers: its experiment's resolved config, under the keys of the YAML."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline_lib.config.section import read_settings
from pipeline_lib.config.train import Train
from pipeline_lib.core.files import read_json
from pipeline_lib.core.text import redact
from pipeline_lib.records.plan import PlanDocument
from pipeline_lib.records.record import to_json


def settings_of_run(plan: PlanDocument, plan_dir: Path) -> dict[str, Any]:
    """Return the resolved config and, as `plan`, the plan's results; URLs' credentials are masked.

    The config is that of the newest frozen experiment with the sealed directory `plan_dir`. Without
    one it has only the experiment's name and the `train` section, both from the plan.
    """
    config = _frozen_config(plan_dir.absolute(), plan.experiment)
    if config is None:
        train = read_settings(Train, plan.train).model_dump(mode="json")
        config = {"experiment": plan.experiment, "train": train}
    made = {
        "cluster": to_json(plan.cluster),
        "batch": to_json(plan.batch),
        "chosen": {key: value for key, value in vars(plan.chosen).items() if value is not None},
    }
    settings: dict[str, Any] = _redacted({**config, "plan": made})
    return settings


def numbers_in(values: Mapping[str, Any], above: str) -> dict[str, float]:
    """Return the numbers of `values` by the trackers' names: `train/loss`, `eval/tuned/loss`."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            numbers |= numbers_in(value, f"{above}/{name}")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            numbers[f"{above}/{name}"] = float(value)
    return numbers


def _frozen_config(sealed: Path, experiment: str) -> dict[str, Any] | None:
    """Return the newest config of `experiment` that has `sealed` (STORE/STAGE/DIGEST), or None."""
    newest: tuple[float, dict[str, Any] | None] = (0.0, None)
    for path in (sealed.parents[1] / "experiments").glob("*.json"):
        try:
            frozen = read_json(path)
            frozen_at = path.stat().st_mtime
            config = frozen["config"]
            parts = frozen["parts"].values()
            if (
                sealed.name in parts
                and config["experiment"] == experiment
                and frozen_at > newest[0]
            ):
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
