"""One job's request, and the same as a rule's resources, in the names of Snakemake's SLURM plugin.

None leaves a resource out.
"""

import ast
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.slurm.site import OF_THE_JOB, Site


@dataclass(frozen=True)
class JobRequest:
    """The resources of one job: nodes and, per node, tasks, GPUs and host memory.

    The job is warned `warning_s` seconds before its time limit.
    """

    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    memory_mb: int
    runtime_minutes: int
    warning_s: int

    @property
    def tasks(self) -> int:
        """The number of tasks, one for each rank."""
        return self.nodes * self.tasks_per_node


EXTRA = "slurm_extra"
_OUR_OPTIONS = ("--signal", "--open-mode")
OF_STAGE = (
    "mem_mb",
    "runtime",
    "cpus_per_task",
    "gres",
    "slurm_account",
    "slurm_partition",
    "qos",
    "constraint",
    "slurm_extra",
)
OF_TRAINING = (*OF_STAGE, "nodes", "mpi", "tasks_per_node", "tasks", "tasks_per_gpu")


def training_resources(
    request: JobRequest, site: Site, given: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the resources of a job with one task per rank, whose batch step starts the tasks.

    Any value of `mpi` keeps the plugin's job step from taking the place of the tasks. A true value
    makes the plugin ask for several tasks, and it refuses a single one. `--signal` reaches job
    steps only: the ranks, but not the Snakemake in the job. `given` are further options of the
    user.
    """
    own = ["--open-mode=append", f"--signal=USR1@{request.warning_s}"]
    resources = _job(request, site, True, [*given, *own])
    resources["nodes"] = request.nodes
    resources["mpi"] = "srun" if request.tasks > 1 else ""
    resources["tasks_per_node"] = None
    resources["tasks"] = None
    if request.tasks_per_node > 1:
        resources["tasks_per_node"] = request.tasks_per_node
    elif request.tasks > 1:
        resources["tasks"] = request.nodes
    resources["tasks_per_gpu"] = 0 if request.gpus_per_node else None
    return resources


def stage_resources(request: JobRequest, site: Site, given: Sequence[str] = ()) -> dict[str, Any]:
    """Return the resources of a job of one task, with GPUs if it asks for one; `given` as above."""
    return _job(request, site, request.gpus_per_node > 0, given)


def _job(
    request: JobRequest, site: Site, is_training: bool, further: Sequence[str]
) -> dict[str, Any]:
    """Return a job's resources; options without a resource go into `slurm_extra`, ours last."""
    options = site.job_options(is_training)
    extra = []
    for name in ("reservation", "exclude"):
        if options[name] is not None:
            extra.append(f"--{name}={options[name]}")
    extra += site.further_options(is_training)
    extra += further
    return {
        "mem_mb": request.memory_mb,
        "runtime": request.runtime_minutes,
        "cpus_per_task": request.cpus_per_task,
        "gres": site.gres(request.gpus_per_node),
        "slurm_account": options["account"],
        "slurm_partition": options["partition"],
        "qos": options["qos"],
        "constraint": options["constraint"],
        "slurm_extra": shlex.join(extra) or None,
    }


def given_options(resources: Mapping[str, Any], rule: str) -> tuple[str, ...]:
    """Return the options in `slurm_extra` of the `resources` that the user gave for `rule`.

    Raises ConfigError for those that would take the warning from a training, or its log, and if a
    quote is not closed.
    """
    if EXTRA not in resources:
        return ()
    given = str(resources[EXTRA].raw)
    with suppress(ValueError, SyntaxError):  # in quotes of its own, or as they come
        given = str(ast.literal_eval(given))
    try:
        options = tuple(shlex.split(given))
    except ValueError as error:
        problem = f"{given}: {error}; write it as a shell would read it"
        raise ConfigError(f"{EXTRA} of {rule}", [problem]) from error
    ours = [option for option in options if option.partition("=")[0] in _OUR_OPTIONS]
    if ours:
        problems = [f"{option}: {OF_THE_JOB}; leave it out" for option in ours]
        raise ConfigError(f"{EXTRA} of {rule}", problems)
    return options
