# The compiled experiments behind the rules, and the functions that answer for them.
import os
import shlex
import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, workflow.basedir)

from pipeline_lib.base.errors import PipelineError
from pipeline_lib.base.stage import say
from pipeline_lib.base.store import Store
from pipeline_lib.config.dag import FROZEN_VARIABLE, Dag
from pipeline_lib.plan.preflight import refuse_too_large, refuse_wrong
from pipeline_lib.slurm.attach import wait_for_jobs
from pipeline_lib.slurm.partitions import limit_of, read_groups
from pipeline_lib.slurm.preflight import refuse_jobs, refuse_several_nodes
from pipeline_lib.slurm.request import (
    evaluation_request,
    foreseen,
    merge_request,
    sealed_plan,
    training_request,
)
from pipeline_lib.slurm.resources import (
    OF_STAGE,
    OF_TRAINING,
    light_resources,
    stage_resources,
    training_resources,
)
from pipeline_lib.slurm.site import Site

STORE = Store.from_env(os.environ)


def exit_with(error):
    """An exception would reach the user with Snakemake's own frames around the message."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)


try:
    SITE = Site.load(os.environ)
    if workflow.is_main_process or FROZEN_VARIABLE not in os.environ:
        EXPERIMENT = Dag.compile(
            [str(path) for path in workflow.overwrite_configfiles],
            workflow.config_settings.config,
            STORE,
        )
        EXPERIMENT.refuse(lambda config: refuse_wrong(config, STORE))
        os.environ[FROZEN_VARIABLE] = str(EXPERIMENT.freeze())
        EXPERIMENT.link_results()
    else:
        EXPERIMENT = Dag.thaw(Path(os.environ[FROZEN_VARIABLE]), STORE)
except PipelineError as error:
    exit_with(error)

# `python` in the rules is the one that runs Snakemake, and the library the one beside the Snakefile, also where another
# is installed. A stage that fails behind `| tee` fails its rule, and `tee -i` outlives a Ctrl-C, so that the training
# can say that it saves. A job of a cluster begins with what its site wants.
shell.prefix(
    f"{'' if workflow.is_main_process else SITE.shell_lines()}"
    f"export PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH"
    f" PYTHONPATH={shlex.quote(str(workflow.basedir))}:$PYTHONPATH; set -euo pipefail; "
)


def outlive_a_silent_controller():
    """The plugin takes a controller that does not answer for one without a memory of jobs, and turns to sacct; where that
    has nothing to say either, it forgets its jobs and waits for ever. Once known, the memory is what it was.
    """
    import snakemake_executor_plugin_slurm as plugin

    known, ask = plugin.get_min_job_age(), plugin.get_min_job_age
    plugin.get_min_job_age = lambda: ask() or known


@cache
def partitions():
    """Those of SLURM where jobs are about to be submitted to it, once no earlier job makes the same; else None."""
    if not workflow.is_main_process or workflow.local_exec:
        return None
    outlive_a_silent_controller()
    try:
        groups = read_groups()
        wait_for_jobs(EXPERIMENT.titles(), Path.cwd(), say)
        return groups
    except PipelineError as error:
        exit_with(error)


def stage_inputs(wildcards):
    partitions()
    return EXPERIMENT.pointers_read_by(wildcards.digest)


def train_inputs(wildcards):
    """Asked as soon as the training is to run, also under `-n`; what is only planned is never refused here."""
    config = EXPERIMENT.config_of(wildcards.digest)
    try:
        if (
            workflow.is_main_process
        ):  # a job was let through, and what it writes itself counts against the disk
            refuse_too_large(config, STORE)
            if groups := partitions():
                refuse_jobs(SITE, training_request_of(wildcards), groups)
            elif not workflow.dryrun:
                refuse_several_nodes(config.cluster.nodes)
    except PipelineError as error:
        exit_with(error)
    return stage_inputs(wildcards)


def plan_of_training(wildcards):
    return EXPERIMENT.plan_pointer(wildcards.digest)


def stage_title(wildcards):
    return EXPERIMENT.title(wildcards.digest)


def stage_spec(wildcards):
    return STORE.spec_path(wildcards.digest)


def tokenize_threads(wildcards):
    """All cores of a local run, where nothing else is ready meanwhile; of a cluster, what any node has."""
    return workflow.cores if workflow.local_exec else 8


def threads_of_rank(wildcards):
    return EXPERIMENT.config_of(wildcards.digest).cluster.cpus_per_rank


def training_threads(wildcards):
    """Those of all ranks on a machine; of a job each task has its own."""
    return EXPERIMENT.config_of(wildcards.digest).cluster.cpus_per_node


def training_request_of(wildcards):
    """What the training asks for; the sealed plan knows more than what is foreseen before."""
    pointer = Path(EXPERIMENT.plan_pointer(wildcards.digest))
    return _training_request(wildcards.digest, pointer if pointer.exists() else None)


@cache
def _training_request(digest, plan):
    config, groups = EXPERIMENT.config_of(digest), partitions()
    known = sealed_plan(plan) if plan else foreseen(config, STORE)
    return training_request(config, known, limit_of(SITE, groups) if groups else None)


def asked_by(resources, names):
    """The resources of a rule, each a function of the wildcards as Snakemake wants it."""

    def function_of(name):
        return lambda wildcards: resources(wildcards)[name]

    return {name: function_of(name) for name in names}


def training_job():
    """All resources of a job with a task for each rank."""
    return asked_by(
        lambda wildcards: training_resources(training_request_of(wildcards), SITE),
        OF_TRAINING,
    )


def job_of(request):
    """All resources of a job with one task, which asks for what `request` says of its config."""

    @cache
    def resources(digest):
        return stage_resources(request(EXPERIMENT.config_of(digest), STORE), SITE)

    return asked_by(lambda wildcards: resources(wildcards.digest), OF_STAGE)


def light_job(mem_mb, runtime):
    """The same of a job that needs no GPU, whatever the experiment."""
    return light_resources(mem_mb, runtime, SITE)
