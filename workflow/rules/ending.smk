# What snakemake does last: links and tables of what is finished, and after a failure what happened and what to type.
import atexit

import snakemake.logging

from pipeline_lib.config.dag import COMMAND_VARIABLE
from pipeline_lib.status.failures import last_words
from pipeline_lib.workflow.ending import JobErrors, conclude
from pipeline_lib.workflow.stage_lines import show_stage_lines
from pipeline_lib.workflow.stopping import StagesStopped

ERRORS = JobErrors()
STAGES_STOPPED = StagesStopped()
COMMAND = os.environ.get(COMMAND_VARIABLE) or shlex.join(["snakemake", *sys.argv[1:]])
if workflow.is_main_process:
    snakemake.logging.logger.addHandler(ERRORS)


def tell_ending():
    with speaking(LANGUAGE):
        conclude(EXPERIMENT, print, tell)


def explain():
    """Say at the very end what happened: what Snakemake itself prints after `onerror` would hide it."""
    titles = EXPERIMENT.titles()
    failures = list(ERRORS.failures(titles, is_stopped=STAGES_STOPPED.by_signal))
    with speaking(LANGUAGE):
        words = last_words(failures, ERRORS.others, COMMAND)
    sys.stdout.flush()
    atexit.register(print, f"\n{words}", file=sys.stderr)


if workflow.is_main_process and COMMAND_VARIABLE in os.environ:
    show_stage_lines(snakemake.logging.logger, sys.stderr, tell_ending)
