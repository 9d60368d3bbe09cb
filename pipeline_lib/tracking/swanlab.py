"""SwanLab: offline unless SWANLAB_MODE says otherwise; `swanlab sync` sends it later."""

import importlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline_lib.tracking.tracker import Report, Run

OFFLINE = "offline"


class SwanLab:
    """A run of SwanLab, whose identity is that of ours, so that attempts join it in its cloud."""

    def __init__(self, run: Run, environ: Mapping[str, str]) -> None:
        """Open it."""
        swanlab: Any = importlib.import_module("swanlab")
        self._run: Any = swanlab.init(
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
        """Its cloud can; elsewhere every process begins files of its own."""
        return environ.get("SWANLAB_MODE", OFFLINE) in ("cloud", "online")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Show `values` at `step`."""
        self._run.log(values, step=step)

    def flush(self) -> None:
        """Left to SwanLab, which writes as it receives."""

    def report(self, step: int, report: Report) -> None:
        """Its numbers at `step`; the page as a file of the run."""
        self.log(step, report.numbers)
        page = Path(self._run.dir) / "report.html"
        shutil.copyfile(report.page, page)
        self._run.save(str(page), base_path=str(self._run.dir))

    def finish(self) -> None:
        """Close the run."""
        self._run.finish()
