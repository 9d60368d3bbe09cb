# What snakemake does last: links and tables of what is finished, and after a failure what happened and what to type.
import atexit
import logging

import snakemake.logging
from snakemake_interface_logger_plugins.common import LogEvent

from pipeline_lib.report.outcomes import tell_outcomes, tell_results
from pipeline_lib.config.dag import COMMAND_VARIABLE
from pipeline_lib.workflow.stage_lines import show_stage_lines
from pipeline_lib.workflow.stopping import StagesStopped
from pipeline_lib.status.failures import Failure, last_words


class Errors(logging.Handler):
    """Keeps the errors that Snakemake logs: those of jobs by the job's number, and the messages of all others."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.of_jobs, self.others = {}, []

    def emit(self, record):
        if getattr(record, "event", None) == LogEvent.JOB_ERROR:
            self.of_jobs[record.jobid] = record
        else:
            self.others.append(record.getMessage())


ERRORS = Errors()
STAGES_STOPPED = StagesStopped()
COMMAND = os.environ.get(COMMAND_VARIABLE) or shlex.join(["snakemake", *sys.argv[1:]])
if workflow.is_main_process:
    snakemake.logging.logger.addHandler(ERRORS)


def conclude():
    """Link what is finished and say where it is; of a sweep, a table and a page.

    A damaged file or a full disk there fails no run.
    """
    try:
        tell_outcomes(EXPERIMENT, print)
        tell_results(EXPERIMENT, print)
        if len(EXPERIMENT.experiments) > 1:
            from pipeline_lib.compare.page import write_sweep_page

            if page := write_sweep_page(EXPERIMENT):
                print(f"compared: {page}")
    except (PipelineError, OSError) as error:
        print(redact(f"error: {error}"), file=sys.stderr)


def failures():
    """The jobs that failed, without those that did not fail when they were tried again."""
    titles = EXPERIMENT.titles()
    for error in ERRORS.of_jobs.values():
        if not error.output or not all(map(os.path.exists, error.output)):
            digest = Path(error.output[0]).stem if error.output else ""
            yield Failure(
                title=titles.get(digest, error.rule_name),
                logs=tuple(map(Path, error.log)),
                executor_message=error.rule_msg or "",
                is_stopped=STAGES_STOPPED.by_signal,
            )


def explain():
    """Say at the very end what happened: what Snakemake itself prints after `onerror` would hide it."""
    words = last_words(list(failures()), ERRORS.others, COMMAND)
    sys.stdout.flush()
    atexit.register(print, f"\n{words}", file=sys.stderr)


if workflow.is_main_process and COMMAND_VARIABLE in os.environ:
    show_stage_lines(snakemake.logging.logger, sys.stderr, conclude)
