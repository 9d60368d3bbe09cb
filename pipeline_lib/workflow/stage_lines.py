"""What people see of snakemake in `qwen3 run`: a line for each stage as it begins, and warnings.

Its own hundred lines about hosts, reasons and resources are in its log.
"""

import logging
from collections.abc import Callable
from typing import TextIO

from snakemake.common import NOTHING_TO_BE_DONE_MSG
from snakemake_interface_logger_plugins.common import LogEvent

from pipeline_lib.config.stages import STAGES

_TO_TERMINAL = "DefaultStreamHandler"  # Snakemake's name for the handler that people see
# Targets, which compute nothing and have no title; `plan` shows the plan.
_UNTITLED = {"all", "total", *STAGES} - {"plan"}


class StageLines(logging.Handler):
    """Prints `[3/8] demo: train` where a stage begins, or would under `-n`; and warnings."""

    def __init__(self, stream: TextIO, conclude: Callable[[], None]) -> None:
        """Write to `stream`; call `conclude` where there is nothing to be done."""
        super().__init__(logging.INFO)
        self._stream = stream
        self._conclude = conclude
        self._begun = 0
        self._total = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Print what people need of a record of Snakemake's."""
        event = getattr(record, "event", None)
        if event == LogEvent.RUN_INFO:
            jobs: dict[str, int] = getattr(record, "stats", {})
            self._total = sum(jobs[rule] for rule in jobs.keys() - _UNTITLED)
        elif event == LogEvent.JOB_INFO and getattr(record, "rule_msg", None):
            self._begun += 1
            self._print(f"[{self._begun}/{self._total}] {record.__dict__['rule_msg']}")
        elif event is None and record.levelno == logging.WARNING:
            self._print(record.getMessage())
        elif record.getMessage() == NOTHING_TO_BE_DONE_MSG:
            self._print("all stages are done: nothing was computed")
            self._conclude()

    def _print(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def show_stage_lines(logger: logging.Logger, stream: TextIO, conclude: Callable[[], None]) -> None:
    """Let Snakemake's `logger` write stage lines to `stream` in place of all that it writes."""
    for handler in list(logger.handlers):
        if handler.name == _TO_TERMINAL:
            logger.removeHandler(handler)
    logger.addHandler(StageLines(stream, conclude))
