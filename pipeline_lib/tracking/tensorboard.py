"""TensorBoard: event files, written by its own writer, which needs no torch."""

import importlib
import time
from collections.abc import Mapping
from typing import Any

from pipeline_lib.tracking.tracker import Run


class TensorBoard:
    """An event file beside those of earlier attempts."""

    def __init__(self, run: Run, _environ: Mapping[str, str]) -> None:
        """Open a new file; steps from `run.first_step` on that an earlier one holds are dropped by the viewer."""
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._writer: Any = writer.EventFileWriter(str(run.folder))
        if run.first_step > 1:
            started = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(run.first_step, session_log=started)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Show `values` at `step`."""
        shown = [self._summaries.Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, summary=self._summaries.Summary(value=shown))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))

    def flush(self) -> None:
        """Write what is buffered."""
        self._writer.flush()

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()
