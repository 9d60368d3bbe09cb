"""Weights & Biases: offline unless WANDB_MODE says otherwise; `wandb sync` sends it later."""

import importlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline_lib.tracking.tracker import Report, Run

OFFLINE = "offline"


class WeightsAndBiases:
    """A run of wandb, whose identity is that of ours, so that attempts join it where wandb's server can."""

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
            mode=environ.get("WANDB_MODE", OFFLINE),
            settings=wandb.Settings(silent=True, disable_git=True, save_code=False, console="off"),
        )

    @staticmethod
    def joins(environ: Mapping[str, str]) -> bool:
        """Its server can; offline every process begins files of its own."""
        return environ.get("WANDB_MODE", OFFLINE) == "online"

    def log(self, step: int, values: dict[str, float]) -> None:
        """Show `values` at `step`."""
        self._run.log(values, step=step)

    def flush(self) -> None:
        """Left to wandb's own process, which writes as it receives."""

    def report(self, step: int, report: Report) -> None:
        """Its numbers as the run's summary, which another report replaces; the page as a file of the run."""
        self._run.summary.update(report.numbers)
        page = Path(self._run.dir) / "report.html"
        shutil.copyfile(report.page, page)
        self._run.save(str(page), base_path=self._run.dir, policy="now")

    def finish(self) -> None:
        """Close the run."""
        self._run.finish()
