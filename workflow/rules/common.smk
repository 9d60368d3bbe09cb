# What the other rules ask: the experiments, and what pipeline_lib/workflow answers for them.
import os
import shlex
import sys
from functools import wraps
from pathlib import Path

LIBRARY = Path(str(workflow.current_basedir)).parents[1]
sys.path.insert(0, str(LIBRARY))

from pipeline_lib.config.dag import FROZEN_VARIABLE
from pipeline_lib.config.stages import STAGES, onwards
from pipeline_lib.core.errors import ERROR, PipelineError
from pipeline_lib.core.language import _, language_of, speaking
from pipeline_lib.core.store import Store
from pipeline_lib.core.text import redact
from pipeline_lib.report.outcomes import LOGS
from pipeline_lib.slurm.site import Site
from pipeline_lib.workflow.invocation import Invocation, open_dag, rule_of
from pipeline_lib.workflow.requests import Requests, SbatchOptions
from pipeline_lib.workflow.shell import shell_prefix

LANGUAGE = language_of(os.environ)


def tell(text):
    print(redact(text), file=sys.stderr)


def exit_with(error):
    """An exception would reach the user with Snakemake's own frames around the message."""
    with speaking(LANGUAGE):
        tell(f"{_(ERROR)}{error}")
    sys.exit(error.exit_code)


def or_exit(function):
    """The function, whose errors end snakemake with their message and exit code."""

    @wraps(function)
    def called(*arguments, **named):
        try:
            with speaking(LANGUAGE):
                return function(*arguments, **named)
        except PipelineError as error:
            exit_with(error)
        except OSError as error:
            exit_with(STORE.blamed(error))

    return called


STORE = Store.from_env(os.environ)
SITE = or_exit(Site.load)(os.environ)
# A workflow that uses this one as `module:` may give it a config; every other config is a file.
GIVEN = config if workflow.modifier.skip_configfile else None
EXPERIMENT = or_exit(open_dag)(workflow, STORE, os.environ, tell, GIVEN)
INVOCATION = Invocation(workflow, EXPERIMENT, SITE, os.environ, tell)
OPTIONS = or_exit(SbatchOptions)(workflow.resource_settings)
REQUESTS = Requests(INVOCATION, OPTIONS, os.environ)
begin = or_exit(INVOCATION.begin)

shell.prefix(
    shell_prefix(
        LIBRARY,
        sys.executable,
        None if workflow.is_main_process else SITE,
    )
)


# Functions of inputs. Each lets snakemake begin first.


def inputs_of_all(needed):
    """What `needed` says of all experiments."""

    def inputs(wildcards):
        begin()
        return needed(EXPERIMENT)

    return inputs


@or_exit
def stage_inputs(wildcards):
    return INVOCATION.stage_inputs(wildcards.digest)


@or_exit
def train_inputs(wildcards):
    """Asked wherever a training is in the way to a target, also under `-n`."""
    options = OPTIONS.of("train_stage")
    INVOCATION.refuse_training(
        wildcards.digest, "train_stage", REQUESTS.of_training, options
    )
    return INVOCATION.stage_inputs(wildcards.digest)


@or_exit
def inputs_to_rung(wildcards):
    """The same of a training to a rung of successive halving."""
    options = OPTIONS.of("rung_stage")
    INVOCATION.refuse_training(
        wildcards.digest, "rung_stage", REQUESTS.of_training, options
    )
    return INVOCATION.stage_inputs(wildcards.digest, is_to_rung=True)


def plan_of_training(wildcards):
    return EXPERIMENT.plan_pointer(wildcards.digest)


# Parameters.


def stage_title(wildcards):
    return EXPERIMENT.title(wildcards.digest)


def stage_spec(wildcards):
    return STORE.spec_path(wildcards.digest)


def stage_where(wildcards):
    return EXPERIMENT.unhashed_arguments(wildcards.digest)


def report_labels(wildcards):
    """What `snakemake --report` calls a page."""
    return {"experiment": EXPERIMENT.config_of(wildcards.digest).experiment}


def requeue_flag(wildcards):
    """A job that the profile submitted may queue itself again; of one that its user runs, that is for the user."""
    return "--requeue" if workflow.remote_exec else ""


def following(wildcards):
    """What the job of a training goes on with, so that it does not queue again."""
    specs = INVOCATION.following(wildcards.digest)
    return (
        ["--then", *(STORE.spec_path(spec.digest) for spec in specs)] if specs else []
    )


def gpus_of(kind):
    """How many GPUs of this machine a stage takes."""

    def gpus(wildcards):
        taken = REQUESTS.gpus(kind, wildcards.digest)
        return f"--gpus {taken}" if taken else ""

    return gpus


def plans_here():
    """Whether the plan stage runs where snakemake runs."""
    return INVOCATION.is_here or not SITE.short_stages_as_jobs


# Threads and resources.


def tokenize_threads(wildcards):
    return REQUESTS.tokenize_threads()


def training_threads(wildcards):
    return REQUESTS.training_threads(wildcards.digest)


def threads_of(kind):
    """Those of a job of that kind, which takes GPUs where there are some."""

    def threads(wildcards):
        return REQUESTS.threads(kind, wildcards.digest)

    return threads


# Stages that follow one another stay jobs of their own, without `group:`. Snakemake 9.27 and SLURM plugin 2.8 request the
# sum of what the members ask for before any of them has run, whatever a partition allows; a member that fails removes the
# outputs of all, those of other experiments too; and the job's comment has no digest, by which jobs of an earlier
# snakemake are found.
def stage_job(stage):
    return job_of(rule_of(stage), STAGES[stage].job)


def job_of(rule, kind):
    """All resources of a job with one task."""
    resources = REQUESTS.job(rule, kind)
    return {name: or_exit(function) for name, function in resources.items()}


def training_job(rule):
    """All resources of a job with a task for each rank."""
    resources = REQUESTS.training_job(rule)
    return {name: or_exit(function) for name, function in resources.items()}
