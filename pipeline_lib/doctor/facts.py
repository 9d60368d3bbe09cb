"""Facts: what was found out, by section and name; a section that could not be measured holds the reason instead."""

from collections.abc import Callable
from typing import Any

from pipeline_lib.base.errors import PipelineError
from pipeline_lib.base.redact import redact

Section = dict[str, Any]
Facts = dict[str, Section]
UNMEASURED = "could not be measured because"


class Unmeasured(PipelineError):
    """A probe has no answer; its text is the reason."""


def measured(probe: Callable[[], Section]) -> Section:
    """What `probe` finds, or why it finds nothing."""
    try:
        return probe()
    except (Unmeasured, OSError, ValueError) as error:
        return {UNMEASURED: redact(str(error)) or type(error).__name__}
