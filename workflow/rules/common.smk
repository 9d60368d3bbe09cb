# The compiled experiment behind the rules, and the functions that answer for it.
import os
import shlex
import sys
from pathlib import Path

sys.path.insert(0, workflow.basedir)

from pipeline_lib.base.errors import PipelineError
from pipeline_lib.base.store import Store
from pipeline_lib.config.dag import FROZEN_VARIABLE, Dag
from pipeline_lib.plan.preflight import refuse_too_large, refuse_wrong

STORE = Store.from_env(os.environ)

# `python` in the rules is the one that runs Snakemake. A stage that fails behind `| tee` fails its rule, and
# `tee -i` outlives a Ctrl-C, so that the training can say that it saves.
# The library is the one beside the Snakefile, also where another is installed.
shell.prefix(
    f"export PATH={shlex.quote(os.path.dirname(sys.executable))}:$PATH"
    f" PYTHONPATH={shlex.quote(str(workflow.basedir))}:$PYTHONPATH; set -euo pipefail; "
)


def exit_with(error):
    """An exception would reach the user with Snakemake's own frames around the message."""
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)


try:
    if workflow.is_main_process or FROZEN_VARIABLE not in os.environ:
        EXPERIMENT = Dag.compile(
            [str(path) for path in workflow.overwrite_configfiles],
            workflow.config_settings.config,
            STORE,
        )
        refuse_wrong(EXPERIMENT.experiment.config, STORE)
        os.environ[FROZEN_VARIABLE] = str(EXPERIMENT.freeze())
        EXPERIMENT.link_results()
    else:
        EXPERIMENT = Dag.thaw(Path(os.environ[FROZEN_VARIABLE]), STORE)
except PipelineError as error:
    exit_with(error)

CLUSTER = EXPERIMENT.experiment.config.cluster


def stage_inputs(wildcards):
    return EXPERIMENT.pointers_read_by(wildcards.digest)


def train_inputs(wildcards):
    """Asked as soon as the training is to run, also under `-n`; what is only planned is never refused here."""
    try:
        if (
            workflow.is_main_process
        ):  # a job was let through, and what it writes itself counts against the disk
            refuse_too_large(EXPERIMENT.experiment.config, STORE)
    except PipelineError as error:
        exit_with(error)
    return stage_inputs(wildcards)


def stage_title(wildcards):
    return EXPERIMENT.title(wildcards.digest)


def stage_spec(wildcards):
    return STORE.spec_path(wildcards.digest)


def tokenize_threads(wildcards):
    """All cores of a local run, where nothing else is ready meanwhile; of a cluster, what any node has."""
    return workflow.cores if workflow.local_exec else 8


onsuccess:
    EXPERIMENT.link_results()
