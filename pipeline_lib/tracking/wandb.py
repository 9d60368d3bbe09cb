"""Weights & Biases: offline unless WANDB_MODE says otherwise; `wandb sync` sends it later."""

import importlib
from collections.abc import Mapping
from typing import Any

from pipeline_lib.tracking.tracker import Run


class WeightsAndBiases:
    """A run of wandb, whose identity is that of ours, so that attempts join it."""

    def __init__(self, run: Run, environ: Mapping[str, str]) -> None:
        """Open it."""
        wandb: Any = importlib.import_module("wandb")
        self._run: Any = wandb.init(
            project=run.project,
            name=run.experiment,
            id=run.identity,
            resume="allow",
            dir=str(run.folder),
            config=run.settings,
            mode=environ.get("WANDB_MODE", "offline"),
            settings=wandb.Settings(silent=True, disable_git=True, save_code=False, console="off"),
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Show `values` at `step`."""
        self._run.log(values, step=step)

    def flush(self) -> None:
        """Left to wandb's own process, which writes as it receives."""

    def finish(self) -> None:
        """Close the run."""
        self._run.finish()
