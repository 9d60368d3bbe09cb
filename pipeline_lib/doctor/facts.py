"""Facts: measured values by section and name; an unmeasured section has the reason instead."""

from collections.abc import Callable
from typing import Any

from pipeline_lib.core.errors import PipelineError
from pipeline_lib.core.text import redact

Section = dict[str, Any]
Facts = dict[str, Section]
UNMEASURED = "could not be measured because"


class Unmeasured(PipelineError):
    """A probe's failure to measure, with the reason as its text."""


def measured(probe: Callable[[], Section]) -> Section:
    """Return the result of `probe`, or the reason why it failed under the key UNMEASURED."""
    try:
        return probe()
    except (Unmeasured, OSError, ValueError) as error:
        return {UNMEASURED: redact(str(error)) or type(error).__name__}
