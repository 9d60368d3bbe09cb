"""SwanLab and Weights & Biases: offline unless SWANLAB_MODE or WANDB_MODE says otherwise.

`swanlab sync` and `wandb sync` upload the run later.
"""

import importlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline_lib.tracking.trackers import FinishedReport, TrackedRun

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
    """A SwanLab run with our run's identity, so later attempts join it in SwanLab's cloud."""

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
    """A wandb run with our run's identity, so later attempts join it on wandb's server."""

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
        """Set the numbers as the run's summary, replaceable later; save the page as a file."""
        self._run.summary.update(report.numbers)
        self._save_page(report, policy="now")
