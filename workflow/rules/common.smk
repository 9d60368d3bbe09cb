# The compiled experiments behind the rules, and the functions that answer for them.
import os
import shlex
import sys
from functools import cache
from pathlib import Path

sys.path.insert(0, workflow.basedir)

from pipeline_lib.config.warnings import warnings_of
from pipeline_lib.config.dag import FROZEN_VARIABLE, RESULTS, Dag
from pipeline_lib.config.stages import OPENS_WEIGHTS, STAGES, onwards
from pipeline_lib.core.errors import ConfigError, PipelineError
from pipeline_lib.core.text import redact
from pipeline_lib.core.files import unwritable
from pipeline_lib.core.signals import STOP_SIGNALS
from pipeline_lib.core.stage import say
from pipeline_lib.core.store import Store
from pipeline_lib.launch.allocation import refuse_now, warning_of_gpus_here
from pipeline_lib.launch.local_gpus import visible_gpus
from pipeline_lib.plan.known import learn_architecture
from pipeline_lib.plan.preflight import refuse_too_large, refuse_wrong
from pipeline_lib.plan.stages import TOKENIZE_CPUS
from pipeline_lib.plan.warnings import lengths_of_runs, little_memory, long_evaluations
from pipeline_lib.report.outcomes import LOGS
from pipeline_lib.slurm.can_start import refuse_jobs
from pipeline_lib.slurm.cluster import fitted, groups_of, read_groups
from pipeline_lib.slurm.job import wait_for_jobs
from pipeline_lib.slurm.request import (
    EXTRA,
    OF_STAGE,
    OF_TRAINING,
    given_options,
    stage_resources,
    training_resources,
)
from pipeline_lib.slurm.site import Site
from pipeline_lib.slurm.sizing import (
    foreseen,
    most_cpus_of,
    refuse_long_evaluation,
    sealed_bytes,
    sealed_plan,
    stage_request,
    too_long_evaluation,
    training_request,
)

STORE = Store.from_env(os.environ)


def exit_with(error):
    """An exception would reach the user with Snakemake's own frames around the message."""
    print(redact(f"error: {error}"), file=sys.stderr)
    sys.exit(error.exit_code)


def tell(text):
    print(redact(text), file=sys.stderr)


@cache
def warn(text):
    """Once, however often it is found."""
    print(redact(f"warning: {text}"), file=sys.stderr)


@cache
def warn_of_evaluation(digest):
    for warning in long_evaluations([EXPERIMENT.config_of(digest)], STORE):
        warn(warning)


@cache
def tell_length(digest):
    """How many optimizer steps a training has, under `-n`: otherwise the plan says it."""
    config = EXPERIMENT.config_of(digest)
    source = f"experiment {config.experiment!r}"
    lengths, warnings = lengths_of_runs([config], STORE, source)
    for warning in (*warnings, *little_memory([config], STORE)):
        warn(warning)
    for text in lengths:
        print(f"{config.experiment}: {text}", file=sys.stderr)


def refuse_unwritable_folders():
    """Those of this folder that Snakemake itself writes to, and would end with a traceback of, and those of results."""
    folders = [Path(".snakemake"), LOGS, *sorted(LOGS.glob("*/"))]
    folders += [RESULTS / one.name for one in EXPERIMENT.experiments]
    problems = list(dict.fromkeys(filter(None, map(unwritable, folders))))
    if problems:
        remedy = "; make it a folder that can be written, or run snakemake in another"
        raise ConfigError("this folder", [problem + remedy for problem in problems])


try:
    SITE = Site.load(os.environ)
    if workflow.is_main_process or FROZEN_VARIABLE not in os.environ:
        EXPERIMENT = Dag.compile(
            [str(path) for path in workflow.overwrite_configfiles],
            workflow.config_settings.config,
            STORE,
            lambda config: refuse_wrong(config, STORE),
            lambda config: learn_architecture(config, STORE, tell),
        )
        refuse_unwritable_folders()
        for warning in warnings_of([one.config for one in EXPERIMENT.experiments]):
            warn(warning)
        os.environ[FROZEN_VARIABLE] = str(EXPERIMENT.frozen_path)
    else:
        EXPERIMENT = Dag.thaw(Path(os.environ[FROZEN_VARIABLE]), STORE)
except PipelineError as error:
    exit_with(error)
except OSError as error:
    exit_with(STORE.blamed(error))


def take_options(settings):
    """The options of sbatch that the user gave on the command line, by rule, and for all rules by "".

    Left where they are, those of a rule would take the place of the ones that the rule sets itself.
    """
    taken = {"": given_options(settings.default_resources or {}, "all rules")}
    for name, resources in dict(settings.overwrite_resources).items():
        taken[name] = given_options(resources, name)
        left = {key: value for key, value in resources.items() if key != EXTRA}
        settings.overwrite_resources[name] = type(resources)(left)
    return taken


try:
    OPTIONS = take_options(workflow.resource_settings)
except PipelineError as error:
    exit_with(error)

# `python` in the rules is the one that runs Snakemake, and the library the one beside the Snakefile, also where another
# is installed. A stage that fails before `| log_to` fails its rule. A signal to all processes ends neither the shell,
# which waits for the stage, nor what writes its log, also where the terminal is closed, so that a training can say that
# it saves. Stages keep what they compile of Python's modules, which containers like to forbid: it costs seconds each time.
# A job of a cluster begins with what its site wants; Snakemake formats the prefix.
STOPS = " ".join(number.name.removeprefix("SIG") for number in STOP_SIGNALS)
shell_prefix = (
    f"unset PYTHONDONTWRITEBYTECODE; export PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH"
    f" PYTHONPATH={shlex.quote(str(workflow.basedir))}:$PYTHONPATH; set -euo pipefail; trap : {STOPS}; "
    f"log_to() {{ trap '' {STOPS}; exec tee -p \"$1\"; }}; "
)
if not workflow.is_main_process:
    told = f"PYTHONPATH={shlex.quote(str(workflow.basedir))} {shlex.quote(sys.executable)} -m pipeline_lib site"
    variables = f'eval "$({told})"\n' if SITE.variables() else ""
    shell_prefix = variables + SITE.shell_lines() + shell_prefix
shell.prefix(shell_prefix.replace("{", "{{").replace("}", "}}"))


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


def will_run():
    """Not for `-n`, nor for `--summary`, `--dag` and others that execute nothing."""
    return workflow.executor_plugin is not None and not workflow.dryrun


@cache
def begin():
    """Freeze the experiments: each function of inputs asks for it first, since Snakemake knows by then whether it runs
    anything, and has not looked for files yet. One that runs nothing writes nothing; pointers to what is missing are
    then hidden from it.
    """
    if not workflow.is_main_process:
        return
    try:
        if will_run():
            EXPERIMENT.freeze()
            EXPERIMENT.link_results()
            return
        hidden = dict.fromkeys(map(str, EXPERIMENT.dangling_pointers()), False)
    except PipelineError as error:
        exit_with(error)
    except OSError as error:
        exit_with(STORE.blamed(error))
    if hidden:
        workflow.iocache.exists_local.update(hidden)
        workflow.iocache.remaining_wait_time = (
            0  # a listing of the folder would show them
        )


def no_inputs(wildcards):
    begin()
    return []


def inputs_of_all(needed):
    """What `needed` says of all experiments."""

    def inputs(wildcards):
        begin()
        return needed(EXPERIMENT)

    return inputs


def stage_inputs(wildcards, is_to_rung=False):
    begin()
    partitions()
    return EXPERIMENT.pointers_read_by(wildcards.digest, is_to_rung=is_to_rung)


def will_train_here():
    return will_run() and not workflow.touch


@cache
def refuse_unable(cluster):
    """Machines that cannot train, once for all trainings on them; and GPUs that stay idle."""
    if warning := warning_of_gpus_here(cluster):
        warn(warning)
    refuse_now(cluster, STORE, os.environ, tell)


def train_inputs(wildcards, is_to_rung=False):
    """Asked wherever the training is in the way to a target, also under `-n`; what is only planned is never refused."""
    config = EXPERIMENT.config_of(wildcards.digest)
    try:
        if workflow.is_main_process and not EXPERIMENT.is_trained(
            wildcards.digest
        ):  # a job was let through, and what it writes itself counts against the disk
            warn_of_evaluation(wildcards.digest)
            if workflow.dryrun:
                tell_length(wildcards.digest)
            refuse_too_large(config, STORE)
            if groups := partitions():
                evaluation = too_long_evaluation(config, STORE, SITE, groups, warn)
                given = options_of("rung_stage" if is_to_rung else "train_stage")
                refuse_jobs(
                    SITE, training_request_of(wildcards), groups, evaluation, given
                )
            elif will_train_here():
                refuse_unable(config.cluster)
        elif workflow.remote_exec and not workflow.is_main_process:
            refuse_long_evaluation(config, STORE, SITE)
    except PipelineError as error:
        exit_with(error)
    return stage_inputs(wildcards, is_to_rung)


def plan_of_training(wildcards):
    return EXPERIMENT.plan_pointer(wildcards.digest)


def stage_title(wildcards):
    return EXPERIMENT.title(wildcards.digest)


def stage_spec(wildcards):
    return STORE.spec_path(wildcards.digest)


def stage_where(wildcards):
    return EXPERIMENT.unhashed_arguments(wildcards.digest)


def is_here():
    """Whether stages run in this machine's cores, and not as jobs."""
    return workflow.local_exec and workflow.is_main_process


def plans_here():
    """Whether the plan stage runs where snakemake runs."""
    return is_here() or not SITE.short_stages_as_jobs


def tokenize_threads(wildcards):
    """All cores of a local run, where nothing else is ready meanwhile; of a cluster, what the job asks for."""
    return workflow.cores if is_here() else TOKENIZE_CPUS


def requeue_flag(wildcards):
    """A job that the profile submitted may queue itself again; of one that its user runs, that is for the user."""
    return "--requeue" if workflow.remote_exec else ""


@cache
def gpus_of_this_machine():
    return len(visible_gpus(os.environ))


def threads_with_gpus(gpus, cpus):
    """A local stage's share of the cores is its share of the GPUs: as many run at a time as have GPUs of their own."""
    if not gpus or not is_here():
        return cpus
    share = gpus / max(gpus, gpus_of_this_machine())
    return max(1, int(share * workflow.cores))


def threads_of(kind):
    """Those of a job of that kind, which takes GPUs where there are some; no more are used than there are."""

    def threads(wildcards):
        request = requested(kind, wildcards.digest)
        return threads_with_gpus(request.gpus_per_node, request.cpus_per_task)

    return threads


def gpus_of(kind):
    """How many GPUs of this machine a stage takes; a job has those that its scheduler gives it."""

    def gpus(wildcards):
        taken = requested(kind, wildcards.digest).gpus_per_node if is_here() else 0
        return f"--gpus {taken}" if taken else ""

    return gpus


def requested(kind, digest, most_cpus=None):
    """What a job of that kind asks for, and anew when all that it reads is there."""
    read_bytes = bytes_read_by(digest, kind in OPENS_WEIGHTS)
    return _requested(kind, digest, read_bytes, most_cpus)


@cache
def _requested(kind, digest, read_bytes, most_cpus):
    return stage_request(
        kind, EXPERIMENT.config_of(digest), STORE, read_bytes, most_cpus
    )


def bytes_read_by(digest, has_weights):
    return sealed_bytes(EXPERIMENT.pointers_read_by(digest), has_weights)


def training_threads(wildcards):
    """Those of all ranks on a machine; of a job each task has its own."""
    cluster = EXPERIMENT.config_of(wildcards.digest).cluster
    return threads_with_gpus(cluster.gpus_per_node, cluster.cpus_per_node)


def training_request_of(wildcards):
    """What the training asks for; the sealed plan knows more than what is foreseen before."""
    pointer = Path(EXPERIMENT.plan_pointer(wildcards.digest))
    return _training_request(
        wildcards.digest,
        pointer if pointer.exists() else None,
        bytes_read_by(wildcards.digest, has_weights=True),
    )


@cache
def _training_request(digest, plan, read_bytes):
    config, nodes = EXPERIMENT.config_of(digest), groups_of(
        SITE.partition, partitions() or []
    )
    try:
        known = sealed_plan(plan) if plan else foreseen(config, STORE)
    except PipelineError as error:
        exit_with(error)
    return training_request(config, known, nodes, read_bytes)


def asked_by(resources, names):
    """The resources of a rule, each a function of the wildcards as Snakemake wants it."""

    def function_of(name):
        return lambda wildcards: resources(wildcards)[name]

    return {name: function_of(name) for name in names}


def options_of(name):
    """What the user gave for all rules, and for that one."""
    return (*OPTIONS[""], *OPTIONS.get(name, ()))


def training_job(name):
    """All resources of a job with a task for each rank."""
    return asked_by(
        lambda wildcards: training_resources(
            training_request_of(wildcards), SITE, options_of(name)
        ),
        OF_TRAINING,
    )


# Stages that follow one another stay jobs of their own, without `group:`. Snakemake 9.27 and SLURM plugin 2.8 request the
# sum of what the members ask for before any of them has run, whatever a partition allows; a member that fails removes the
# outputs of all, those of other experiments too; and the job's comment has no digest, by which jobs of an earlier
# snakemake are found.
def stage_job(stage):
    """All resources of the job of a stage, whose row says of which kind it is."""
    return job_of(f"{stage}_stage", STAGES[stage].job)


def job_of(name, kind):
    """All resources of a job with one task, which asks for what its kind needs with that config, for what it reads.

    Of files of weights only the kinds that open them count the bytes. Asked again when all that it reads is there.
    """

    def resources(wildcards):
        without_gpus = groups_of(SITE.partition_of(False), partitions() or [])
        asked = requested(kind, wildcards.digest, most_cpus_of(without_gpus))
        partition = SITE.partition_of(is_training=asked.gpus_per_node > 0)
        nodes = groups_of(partition, partitions() or [])
        return stage_resources(fitted(asked, nodes), SITE, options_of(name))

    return asked_by(resources, OF_STAGE)
