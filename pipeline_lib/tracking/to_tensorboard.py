"""TensorBoard: event files, written by TensorBoard's own writer, which does not need torch."""

import importlib
import json
import shutil
import time
from collections.abc import Mapping
from typing import Any

from pipeline_lib.tracking.trackers import FinishedReport, TrackedRun


class TensorBoard:
    """A TensorBoard event file, beside those of earlier attempts."""

    def __init__(self, run: TrackedRun, _environ: Mapping[str, str]) -> None:
        """Open a new file; the viewer drops steps of earlier files from `run.first_step` on."""
        writer = importlib.import_module("tensorboard.summary.writer.event_file_writer")
        self._events: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
        self._tensors: Any = importlib.import_module("tensorboard.compat.proto.tensor_pb2")
        self._types: Any = importlib.import_module("tensorboard.compat.proto.types_pb2")
        self._folder = run.folder
        self._writer: Any = writer.EventFileWriter(str(run.folder))
        if run.first_step > 1:
            started = self._events.SessionLog(status=self._events.SessionLog.START)
            self._add(run.first_step, session_log=started)
        else:
            self._show_text("config", 0, json.dumps(run.settings, indent=2, ensure_ascii=False))

    @staticmethod
    def joins(_environ: Mapping[str, str]) -> bool:
        """Return True: TensorBoard reads all files of a folder as one run."""
        return True

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log `values` at `step`."""
        shown = []
        for name, value in values.items():
            shown.append(self._summaries.Summary.Value(tag=name, simple_value=value))
        self._add(step, summary=self._summaries.Summary(value=shown))

    def warn(self, step: int, kind: str, text: str) -> None:
        """Show the text at `step`."""
        self._show_text(f"warning/{kind}", step, text)

    def report(self, step: int, report: FinishedReport) -> None:
        """Log the numbers at `step`; copy the page beside the event files and log its path."""
        page = self._folder / "report.html"
        shutil.copyfile(report.page, page)
        self.log(step, report.numbers)
        self._show_text("report", step, str(page))

    def _show_text(self, name: str, step: int, text: str) -> None:
        """Log `text` verbatim: the indentation keeps it from being rendered as Markdown."""
        plugin = self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        indented = "\n".join(f"    {line}" for line in text.splitlines())
        value = self._summaries.Summary.Value(
            tag=name,
            metadata=self._summaries.SummaryMetadata(plugin_data=plugin),
            tensor=self._tensors.TensorProto(
                dtype=self._types.DT_STRING, string_val=[indented.encode()]
            ),
        )
        self._add(step, summary=self._summaries.Summary(value=[value]))

    def _add(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(wall_time=time.time(), step=step, **content))

    def flush(self) -> None:
        """Write buffered events to the file."""
        self._writer.flush()

    def finish(self) -> None:
        """Close the file."""
        self._writer.close()
