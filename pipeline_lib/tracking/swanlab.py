"""SwanLab: offline unless SWANLAB_MODE says otherwise; `swanlab sync` sends it later."""

import importlib
from collections.abc import Mapping
from typing import Any

from pipeline_lib.tracking.tracker import Run


class SwanLab:
    """A run of SwanLab. Without its cloud it cannot be joined again, so each attempt is one, in one group."""

    def __init__(self, run: Run, environ: Mapping[str, str]) -> None:
        """Open it."""
        swanlab: Any = importlib.import_module("swanlab")
        mode = environ.get("SWANLAB_MODE", "offline")
        joined = {"id": run.identity, "resume": "allow"} if mode in ("cloud", "online") else {}
        self._run: Any = swanlab.init(
            project=run.project,
            name=run.experiment,
            group=run.identity,
            log_dir=str(run.folder),
            config=run.settings,
            mode=mode,
            **joined,
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Show `values` at `step`."""
        self._run.log(values, step=step)

    def flush(self) -> None:
        """Left to SwanLab, which writes as it receives."""

    def finish(self) -> None:
        """Close the run."""
        self._run.finish()
