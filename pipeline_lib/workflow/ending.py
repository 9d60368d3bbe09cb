"""What snakemake does last: what is finished, and after a failure which jobs failed."""

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

from snakemake_interface_logger_plugins.common import LogEvent

from pipeline_lib.config.dag import Dag
from pipeline_lib.core.errors import ERROR, PipelineError
from pipeline_lib.core.language import _
from pipeline_lib.core.stage import Say
from pipeline_lib.report.outcomes import tell_outcomes, tell_results
from pipeline_lib.status.failures import Failure


def conclude(dag: Dag, say: Say, tell: Say) -> None:
    """Link what is finished and say where it is; of a sweep, a table and a page.

    A damaged file or a full disk there fails no run: `tell` gets the error.
    """
    try:
        tell_outcomes(dag, say)
        tell_results(dag, say)
        if len(dag.experiments) > 1:
            # Imported here because drawing takes seconds to load.
            from pipeline_lib.compare.page import write_sweep_page

            if page := write_sweep_page(dag):
                say(_("compared: {page}").format(page=page))
    except (PipelineError, OSError) as error:
        tell(f"{_(ERROR)}{error}")


class JobErrors(logging.Handler):
    """Keeps the errors that Snakemake logs: those of jobs by the job's number, and all others."""

    def __init__(self) -> None:
        """Begin without errors."""
        super().__init__(logging.ERROR)
        self._of_jobs: dict[int, logging.LogRecord] = {}
        self.others: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record: a job's newest, or the message of what is of no job."""
        if getattr(record, "event", None) == LogEvent.JOB_ERROR:
            self._of_jobs[record.__dict__["jobid"]] = record
        else:
            self.others.append(record.getMessage())

    def failures(self, titles: Mapping[str, str], *, is_stopped: bool) -> Iterator[Failure]:
        """Yield the jobs that failed, without those that did not when they were tried again.

        `titles` are those of the stage instances, by digest; `is_stopped` if a signal stopped
        snakemake.
        """
        for record in self._of_jobs.values():
            said = record.__dict__
            outputs = [Path(output) for output in said["output"] or ()]
            if outputs and all(output.exists() for output in outputs):
                continue
            digest = outputs[0].stem if outputs else ""
            yield Failure(
                title=titles.get(digest, said["rule_name"]),
                logs=tuple(Path(log) for log in said["log"]),
                executor_message=said["rule_msg"] or "",
                is_stopped=is_stopped,
            )
