"""Describe what a job asks for and what the cluster has, and check that the request can be met."""

import ast
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from pipeline_lib.config.schema import Cluster
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.units import count
from pipeline_lib.slurm.job import can_start_tasks, has_no_answer, seconds_of
from pipeline_lib.slurm.site import OF_THE_JOB, VARIABLES, Site

# The request of one job.


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


# A request as resources of a rule, in the names of Snakemake's SLURM plugin. None leaves a resource out.

EXTRA = "slurm_extra"
_OUR_OPTIONS = ("--signal", "--open-mode")
OF_STAGE = (
    *("mem_mb", "runtime", "cpus_per_task", "gres", "slurm_account", "slurm_partition", "qos", "constraint"),
    "slurm_extra",
)
OF_TRAINING = (*OF_STAGE, "nodes", "mpi", "tasks_per_node", "tasks", "tasks_per_gpu")


def training_resources(request: JobRequest, site: Site, given: Sequence[str] = ()) -> dict[str, Any]:
    """Return the resources of a job with one task per rank, whose batch step starts the tasks.

    Any value of `mpi` keeps the plugin's job step from taking the place of the tasks. A true value makes the plugin ask
    for several tasks, and it refuses a single one. `--signal` reaches job steps only: the ranks, but not the Snakemake
    in the job. `given` are further options of the user.
    """
    own = ("--open-mode=append", f"--signal=USR1@{request.warning_s}")
    several_each, several = request.tasks_per_node > 1, request.tasks > 1
    return {
        **_job(request, site, True, (*given, *own)),
        "nodes": request.nodes,
        "mpi": "srun" if several else "",
        "tasks_per_node": request.tasks_per_node if several_each else None,
        "tasks": request.nodes if several and not several_each else None,
        "tasks_per_gpu": 0 if request.gpus_per_node else None,
    }


def stage_resources(request: JobRequest, site: Site, given: Sequence[str] = ()) -> dict[str, Any]:
    """Return the resources of a job with one task, on a node with GPUs if it asks for one; `given` as above."""
    return _job(request, site, request.gpus_per_node > 0, given)


def _job(request: JobRequest, site: Site, is_training: bool, further: Sequence[str]) -> dict[str, Any]:
    """Return the resources of a job; options that the plugin has no resource for go into `slurm_extra`, ours last."""
    options = site.job_options(is_training)
    named = [f"--{name}={options[name]}" for name in ("reservation", "exclude") if options[name] is not None]
    return {
        "mem_mb": request.memory_mb,
        "runtime": request.runtime_minutes,
        "cpus_per_task": request.cpus_per_task,
        "gres": site.gres(request.gpus_per_node),
        "slurm_account": options["account"],
        "slurm_partition": options["partition"],
        "qos": options["qos"],
        "constraint": options["constraint"],
        "slurm_extra": shlex.join([*named, *site.further_options(is_training), *further]) or None,
    }


def given_options(resources: Mapping[str, Any], rule: str) -> tuple[str, ...]:
    """Return the options in `slurm_extra` of the `resources` that the user gave for `rule` on the command line.

    Raises ConfigError for those that would take the warning from a training, or its log, and if a quote is not closed.
    """
    if EXTRA not in resources:
        return ()
    given = str(resources[EXTRA].raw)
    with suppress(ValueError, SyntaxError):  # in quotes of its own, or as they come
        given = str(ast.literal_eval(given))
    try:
        options = tuple(shlex.split(given))
    except ValueError as error:
        raise ConfigError(f"{EXTRA} of {rule}", [f"{given}: {error}; write it as a shell would read it"]) from error
    if ours := [option for option in options if option.partition("=")[0] in _OUR_OPTIONS]:
        raise ConfigError(f"{EXTRA} of {rule}", [f"{option}: {OF_THE_JOB}; leave it out" for option in ours])
    return options


# What the cluster has, according to `sinfo`, and whether it can ever meet a request: checked before submission.

_FORMAT = "%P|%a|%l|%D|%c|%m|%G"
# Without --exact, unlike nodes share a line that has their minimum. Without --noconvert, 1024 nodes are `1K`.
_SINFO = ("sinfo", "--all", "--exact", "--noconvert", "--noheader", "--format", _FORMAT)
_CALL_S = 20.0


@dataclass(frozen=True)
class NodeGroup:
    """Equal nodes of one partition. `limit_minutes` is None if its jobs have no time limit."""

    partition: str
    is_default: bool
    is_up: bool
    limit_minutes: int | None
    nodes: int
    cpus: int
    memory_mb: int
    gpus: int


def read_groups() -> list[NodeGroup]:
    """Return the nodes of all partitions, by groups of equal ones. Raises ConfigError if sinfo gives no answer."""
    done = None
    try:
        done = subprocess.run(_SINFO, capture_output=True, text=True, timeout=_CALL_S)
        reason = f"sinfo: {done.stderr.strip() or done.stdout.strip()}"
    except FileNotFoundError:
        reason = "there is no sinfo on PATH; run this on a login node of the cluster"
    except subprocess.TimeoutExpired:
        reason = f"sinfo did not answer within {_CALL_S:.0f} s; is the control daemon up?"
    if done is None or done.returncode:
        raise ConfigError("SLURM", [f"{reason}; without a cluster, leave out `--profile slurm`"])
    return [parse_group(line) for line in done.stdout.splitlines() if line.count("|") >= 6]


def parse_group(line: str) -> NodeGroup:
    """Parse one line that sinfo prints in the format `_FORMAT`."""
    partition, is_up, limit, nodes, cpus, memory_mb, gres = line.strip().split("|", 6)
    limit_s = seconds_of(limit)  # None for `infinite`
    return NodeGroup(
        partition=partition.removesuffix("*"),
        is_default=partition.endswith("*"),
        is_up=is_up == "up",
        limit_minutes=None if limit_s is None else int(limit_s) // 60,
        nodes=_number(nodes),
        cpus=_number(cpus),
        memory_mb=_number(memory_mb),
        gpus=sum(int(found) for found in re.findall(r"gpu(?::[^:,(]*[^\d:,(][^:,(]*)?:(\d+)", gres)),
    )


def _number(text: str) -> int:
    """Return the number that `text` begins with: `64+` means 64 and more."""
    return int(re.match(r"\d+", text)[0])  # type: ignore[index]


def groups_of(partition: str | None, groups: list[NodeGroup]) -> list[NodeGroup]:
    """Return the nodes of `partition`, which may list several as `a,b`; None stands for SLURM's default partition."""
    if partition is None:
        return [group for group in groups if group.is_default] or groups
    return [group for group in groups if group.partition in partition.split(",")]


def limit_of(groups: list[NodeGroup]) -> int | None:
    """Return the longest time limit of these nodes in minutes; None if one has no limit."""
    limits = [group.limit_minutes for group in groups]
    return None if None in limits else max((limit for limit in limits if limit is not None), default=None)


def fitted(request: JobRequest, groups: list[NodeGroup]) -> JobRequest:
    """Return `request` with time, memory and CPUs capped to what `groups` have, for generous defaults."""
    if not groups:
        return request
    return replace(
        request,
        runtime_minutes=min(request.runtime_minutes, limit_of(groups) or request.runtime_minutes),
        memory_mb=min(request.memory_mb, max(group.memory_mb for group in groups)),
        cpus_per_task=min(request.cpus_per_task, max(group.cpus for group in groups)),
    )


def wrong_partitions(site: Site, groups: list[NodeGroup]) -> Iterator[str]:
    """Yield a problem for each partition of the site file that does not exist or takes no jobs."""
    known = sorted({group.partition for group in groups})
    for key in ("partition", "cpu_partition"):
        for wanted in (getattr(site, key) or "").split(","):
            if wanted and wanted not in known:
                near = get_close_matches(wanted, known, 1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                yield f"partition {wanted!r} does not exist{hint}; partitions: {', '.join(known)}; set {where_set(key)}"
            elif wanted and not any(group.is_up for group in groups_of(wanted, groups)):
                yield f"partition {wanted!r} is down and takes no jobs; wait, or name another as {where_set(key)}"


def too_much(request: JobRequest, site: Site, groups: list[NodeGroup]) -> Iterator[str]:
    """Yield a problem if the partition's nodes have too little, are too few, or do not allow the run time."""
    own = groups_of(site.partition, groups)
    where = f"partition {site.partition or own[0].partition}"
    cpus = request.tasks_per_node * request.cpus_per_task
    if request.gpus_per_node > (most := max(group.gpus for group in own)):
        wanted = count(request.gpus_per_node, "GPUs")
        yield f"cluster.gpus_per_node: {wanted}, and the nodes of {where} have at most {most}"
    elif cpus > (most := max(group.cpus for group in own)):
        yield (
            f"cluster.cpus_per_rank: {count(request.tasks_per_node, 'ranks')} x {request.cpus_per_task} need "
            f"{count(cpus, 'CPUs')}, and the nodes of {where} have at most {most}"
        )
    elif request.memory_mb > (most := max(group.memory_mb for group in own)):
        yield (
            f"cluster.memory_gb: the job needs {request.memory_mb / 1000:.0f} GB of host memory on each node, and the "
            f"nodes of {where} have at most {most / 1000:.0f} GB"
        )
    else:
        large = [one for one in own if one.gpus >= request.gpus_per_node and one.cpus >= cpus]
        nodes = sum(group.nodes for group in large if group.memory_mb >= request.memory_mb)
        if nodes < request.nodes:
            yield f"cluster.nodes: {count(request.nodes, 'nodes')} of this size, and {where} has {nodes}"
    limit = limit_of(own)
    if limit is not None and request.runtime_minutes > limit:
        yield f"cluster.runtime_minutes: {request.runtime_minutes} minutes, and {where} allows {limit}"


def where_set(key: str) -> str:
    """Describe where a key of the site file is set, for messages."""
    variable = f", or {VARIABLES[key]}" if key in VARIABLES else ""
    return f"`{key}` in the site file{variable}"


# Whether the training can be started at all, by SLURM or on this machine: checked once, before any stage runs.

_PROBE_S = 30.0
_COUNT_S = 120.0  # importing torch from a slow disk, and finding a driver
_COUNT = "import torch; print(torch.cuda.device_count())"
_AS_A_JOB = "as a SLURM job: snakemake --profile slurm"
_SRUN = "cluster.launcher: srun works only in a SLURM job"
_WITHOUT_SRUN = "or set it to auto, which starts the ranks without srun where there is no job"
# The key of the site file that sbatch complains about, by a word of its message.
_BLAMED = (
    *(("account", "account"), ("qos", "qos"), ("feature", "constraint"), ("partition", "partition")),
    *(("reservation", "reservation"), ("node name", "exclude"), ("node list", "exclude")),
)


def refuse_jobs(
    site: Site, request: JobRequest, groups: list[NodeGroup], others: Iterable[str] = (), given: Sequence[str] = ()
) -> None:
    """Raise ConfigError, naming what to change, if SLURM would refuse the jobs or could never start them.

    `others` are problems of jobs other than the training's. They are computed only when they are needed. `given` are
    further options of the training job.
    """
    problems = list(wrong_partitions(site, groups)) or [*too_much(request, site, groups), *others]
    if not problems and (refusal := _refusal(site, request, given)):
        problems = [refusal]
    if problems:
        raise ConfigError("the cluster", problems)


def refuse_here(cluster: Cluster, is_job: bool) -> None:
    """Raise ConfigError if the training cannot be started here: it needs several nodes, or GPUs that are missing.

    Within a job (`is_job`), GPUs are not counted: the training starts tasks on the job's nodes.
    """
    problem, wanted = why_not_started(cluster.launcher, cluster.nodes, is_job), cluster.gpus_per_node
    if problem is None and wanted and not is_job and (visible := _visible_gpus()) is not None and visible < wanted:
        lower = f"lower it{'' if visible else ' to 0 to train on the CPU'}"
        problem = f"cluster.gpus_per_node: {count(wanted, 'GPUs')} configured, and this machine has {visible}; {lower},"
        problem += f" or train {_AS_A_JOB}"
    if problem:
        raise ConfigError("the training", [problem])


def why_not_started(launcher: str, nodes: int, is_job: bool, has_hosts: bool = False) -> str | None:
    """Return why `launcher` cannot start ranks on `nodes` nodes, within a job, on hosts or neither; None if it can."""
    if nodes > 1 and not is_job and not has_hosts:
        return (
            f"cluster.nodes: {nodes} nodes train {_AS_A_JOB}; or on machines that ssh reaches, listed as `hosts` in the"
            " site file or as PIPELINE_HOSTS=NAME,NAME (docs/two-machines.md); or set it to 1"
        )
    if launcher == "srun" and not is_job:
        return f"{_SRUN}, and this is not one: train {_AS_A_JOB}; {_WITHOUT_SRUN}"
    return None


def warning_of_srun(cluster: Cluster, environ: Mapping[str, str]) -> str | None:
    """Return a warning if `cluster` wants srun and no job can be submitted from this machine; else None."""
    has_slurm = shutil.which("sbatch", path=environ.get("PATH")) is not None
    if cluster.launcher != "srun" or has_slurm or can_start_tasks(environ):
        return None
    return f"{_SRUN}, and there is no sbatch on PATH: on a login node train {_AS_A_JOB}; {_WITHOUT_SRUN}"


@cache
def _visible_gpus() -> int | None:
    """Return how many GPUs torch sees, as the ranks will; None if torch gives no answer.

    It runs in a process of its own: importing torch takes seconds, and it would stay in memory.
    """
    try:
        done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=_COUNT_S)
    except subprocess.TimeoutExpired:
        return None
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdecimal() else None


def sbatch_options(site: Site, request: JobRequest, given: Sequence[str] = ()) -> list[str]:
    """Return the options of the training job, as the executor plugin passes them; `given` are the user's."""
    options = {
        **site.job_options(is_training=True),
        "nodes": request.nodes,
        "ntasks": request.tasks,
        "cpus-per-task": request.cpus_per_task,
        "mem": request.memory_mb,
        "gres": site.gres(request.gpus_per_node),
        "time": request.runtime_minutes,
    }
    named = [f"--{name}={value}" for name, value in options.items() if value not in (None, "")]
    return [*named, *site.further_options(is_training=True), *given]


def _refusal(site: Site, request: JobRequest, given: Sequence[str]) -> str | None:
    """Return why SLURM would refuse such a job, with the key to change; None if it accepts or does not answer."""
    options = sbatch_options(site, request, given)
    command = ["sbatch", "--test-only", *options, "--wrap", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0 or has_no_answer(done.stderr):
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["sbatch refused the job without a message"]
    reason = re.sub(r"^(sbatch: error: |allocation failure: )+", "", lines[-1])
    blamed = next((key for word, key in _BLAMED if word in reason.lower()), None)
    hint = f"; set {where_set(blamed)}" if blamed else f" (asked for: {' '.join(options)})"
    return f"SLURM would refuse the job: {reason}{hint}"
