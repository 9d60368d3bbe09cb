"""What the trackers show as a run's config: the resolved config of its experiment, under the keys of the YAML."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline_lib.base.fsio import read_json
from pipeline_lib.base.redact import redact
from pipeline_lib.config.schema import Train, read_settings


def settings_of_run(plan: dict[str, Any], plan_dir: Path) -> dict[str, Any]:
    """The resolved config and, as `plan`, what the plan made of it; credentials in addresses are masked.

    The config is that of the newest frozen experiment with the sealed directory `plan_dir`. Without one it is what
    the plan knows, all of `train`.
    """
    config = _frozen_config(plan_dir.absolute(), plan["experiment"])
    if config is None:
        train = read_settings(Train, plan["train"]).model_dump(mode="json") if "train" in plan else {}
        config = {"experiment": plan["experiment"], "train": train}
    made = {"cluster": plan["cluster"], "batch": plan["batch"], "chosen": plan["chosen"]}
    settings: dict[str, Any] = _redacted({**config, "plan": made})
    return settings


def flat(settings: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """The keys as the YAML has them in `sweep`, as `train.lr`, each with its value; a list is one value."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _frozen_config(sealed: Path, experiment: str) -> dict[str, Any] | None:
    """The config of the newest experiment of that name with `sealed`, STORE/STAGE/DIGEST, among its parts."""
    newest: tuple[float, dict[str, Any] | None] = (0.0, None)
    for path in (sealed.parents[1] / "experiments").glob("*.json"):
        try:
            frozen, frozen_at = read_json(path), path.stat().st_mtime
            config, parts = frozen["config"], frozen["parts"].values()
            if sealed.name in parts and config["experiment"] == experiment and frozen_at > newest[0]:
                newest = frozen_at, config
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # another one's, damaged or just removed
    return newest[1]


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _redacted(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_redacted(item) for item in value]
    return redact(value) if isinstance(value, str) else value
