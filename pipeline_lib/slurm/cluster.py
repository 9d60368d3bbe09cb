"""What the cluster has, what a job asks for, and whether the request can be met."""

import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from pipeline_lib.config.schema import Cluster
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.slurm.job import has_no_answer, seconds_of
from pipeline_lib.slurm.site import VARIABLES, Site

# What one job asks SLURM for.


@dataclass(frozen=True)
class Request:
    """Of one job: nodes, and on each of them tasks, GPUs and host memory. The warning comes before the time limit."""

    nodes: int
    tasks_per_node: int
    cpus_per_task: int
    gpus_per_node: int
    memory_mb: int
    runtime_minutes: int
    warning_s: int

    @property
    def tasks(self) -> int:
        """One for each rank."""
        return self.nodes * self.tasks_per_node


# A request in the words of Snakemake's SLURM plugin: the resources of a rule. None leaves one out.

OF_STAGE = ("mem_mb", "runtime", "cpus_per_task", "gres", "slurm_account", "slurm_partition", "qos", "constraint")
OF_TRAINING = (*OF_STAGE, "nodes", "mpi", "tasks_per_node", "tasks", "tasks_per_gpu", "slurm_extra")


def training_resources(request: Request, site: Site) -> dict[str, Any]:
    """Of a job with a task for each rank, whose batch step starts them.

    Any value of `mpi` keeps the plugin's job step from taking the tasks' place; a true one makes it ask for several
    tasks, and it refuses a single one. `--signal` reaches steps alone: the ranks, and not the Snakemake in the job.
    """
    several_each, several = request.tasks_per_node > 1, request.tasks > 1
    return {
        **_job(request, site, is_training=True),
        "nodes": request.nodes,
        "mpi": "srun" if several else "",
        "tasks_per_node": request.tasks_per_node if several_each else None,
        "tasks": request.nodes if several and not several_each else None,
        "tasks_per_gpu": 0 if request.gpus_per_node else None,
        "slurm_extra": f"--open-mode=append --signal=USR1@{request.warning_s}",
    }


def stage_resources(request: Request, site: Site) -> dict[str, Any]:
    """Of a job with one task, on a node with GPUs if it asks for one."""
    return _job(request, site, is_training=request.gpus_per_node > 0)


def _job(request: Request, site: Site, is_training: bool) -> dict[str, Any]:
    return {
        "mem_mb": request.memory_mb,
        "runtime": request.runtime_minutes,
        "cpus_per_task": request.cpus_per_task,
        "gres": f"gpu:{request.gpus_per_node}" if request.gpus_per_node else None,
        "slurm_account": site.account,
        "slurm_partition": site.partition_of(is_training),
        "qos": site.qos,
        "constraint": site.constraint if is_training else None,
    }


# What the cluster has, as `sinfo` tells it, and whether a request can ever be met there: asked before submission.

_FORMAT = "%P|%a|%l|%D|%c|%m|%G"
# Without --exact unlike nodes are one line, with the least that any of them has; else 1024 nodes are `1K`.
_SINFO = ("sinfo", "--all", "--exact", "--noconvert", "--noheader", "--format", _FORMAT)
_CALL_S = 20.0


@dataclass(frozen=True)
class Group:
    """Equal nodes of one partition. `limit_minutes` is None where jobs may take any time."""

    partition: str
    is_default: bool
    is_up: bool
    limit_minutes: int | None
    nodes: int
    cpus: int
    memory_mb: int
    gpus: int


def read_groups() -> list[Group]:
    """All partitions of the cluster. Raises ConfigError if there is none within reach."""
    try:
        done = subprocess.run(_SINFO, capture_output=True, text=True, timeout=_CALL_S)
    except FileNotFoundError as error:
        raise _unreachable("there is no sinfo on PATH; run this on a login node of the cluster") from error
    except subprocess.TimeoutExpired as error:
        raise _unreachable(f"sinfo did not answer within {_CALL_S:.0f} s; is the control daemon up?") from error
    if done.returncode:
        raise _unreachable(f"sinfo: {done.stderr.strip() or done.stdout.strip()}")
    return [parse_group(line) for line in done.stdout.splitlines() if line.count("|") >= 6]


def _unreachable(reason: str) -> ConfigError:
    return ConfigError("SLURM", [f"{reason}; without a cluster, leave out `--profile slurm`"])


def parse_group(line: str) -> Group:
    """One line of sinfo in our format."""
    partition, is_up, limit, nodes, cpus, memory_mb, gres = line.strip().split("|", 6)
    return Group(
        partition=partition.removesuffix("*"),
        is_default=partition.endswith("*"),
        is_up=is_up == "up",
        limit_minutes=minutes_of(limit),
        nodes=_number(nodes),
        cpus=_number(cpus),
        memory_mb=_number(memory_mb),
        gpus=sum(int(found) for found in re.findall(r"gpu(?::[^:,(]*[^\d:,(][^:,(]*)?:(\d+)", gres)),
    )


def minutes_of(limit: str) -> int | None:
    """A time limit in whole minutes; None for `infinite`."""
    limit_s = seconds_of(limit)
    return None if limit_s is None else int(limit_s) // 60


def _number(text: str) -> int:
    """The number that `text` begins with: `64+` means 64 and more."""
    return int(re.match(r"\d+", text)[0])  # type: ignore[index]


def groups_of(partition: str | None, groups: list[Group]) -> list[Group]:
    """The nodes that a job may get there; `a,b` are several partitions, and where none is named SLURM has a default."""
    if partition is None:
        return [group for group in groups if group.is_default] or groups
    return [group for group in groups if group.partition in partition.split(",")]


def limit_of(groups: list[Group]) -> int | None:
    """The longest time that a job may take on some of these, in minutes; None where it may take any."""
    limits = [group.limit_minutes for group in groups]
    return None if None in limits else max((limit for limit in limits if limit is not None), default=None)


def fitted(request: Request, groups: list[Group]) -> Request:
    """The request with no more time, memory and CPUs than there are: for what is generous, and was not asked for."""
    if not groups:
        return request
    return replace(
        request,
        runtime_minutes=min(request.runtime_minutes, limit_of(groups) or request.runtime_minutes),
        memory_mb=min(request.memory_mb, max(group.memory_mb for group in groups)),
        cpus_per_task=min(request.cpus_per_task, max(group.cpus for group in groups)),
    )


def wrong_partitions(site: Site, groups: list[Group]) -> Iterator[str]:
    """A problem for each partition of the site file that is not there, or takes no jobs."""
    known = sorted({group.partition for group in groups})
    for key in ("partition", "cpu_partition"):
        for wanted in (getattr(site, key) or "").split(","):
            if wanted and wanted not in known:
                near = get_close_matches(wanted, known, 1)
                hint = f" (did you mean {near[0]}?)" if near else ""
                yield f"there is no partition {wanted!r}, but {', '.join(known)}{hint}; set {where_set(key)}"
            elif wanted and not any(group.is_up for group in groups_of(wanted, groups)):
                yield f"partition {wanted!r} is down and takes no jobs; set another as {where_set(key)}, or wait"


def too_much(request: Request, site: Site, groups: list[Group]) -> Iterator[str]:
    """A problem if no nodes there have what each of them is to have, or too few, or none for so long."""
    own = groups_of(site.partition, groups)
    where = f"partition {site.partition or own[0].partition}"
    cpus = request.tasks_per_node * request.cpus_per_task
    if request.gpus_per_node > (most := max(group.gpus for group in own)):
        yield f"cluster.gpus_per_node: {request.gpus_per_node} GPUs, and the nodes of {where} have at most {most}"
    elif cpus > (most := max(group.cpus for group in own)):
        yield (
            f"cluster.cpus_per_rank: {request.tasks_per_node} ranks x {request.cpus_per_task} are {cpus} CPUs, and the "
            f"nodes of {where} have at most {most}"
        )
    elif request.memory_mb > (most := max(group.memory_mb for group in own)):
        yield (
            f"cluster.memory_gb: a node is to have {request.memory_mb / 1000:.0f} GB of host memory, and those of "
            f"{where} have at most {most / 1000:.0f} GB"
        )
    else:
        nodes = sum(group.nodes for group in own if _has(group, request, cpus))
        if nodes < request.nodes:
            yield f"cluster.nodes: {request.nodes} such nodes, and {where} has {nodes}"
    limit = limit_of(own)
    if limit is not None and request.runtime_minutes > limit:
        yield f"cluster.runtime_minutes: {request.runtime_minutes} minutes, and {where} allows {limit}"


def where_set(key: str) -> str:
    """How a key of the site file is set, for messages."""
    return f"`{key}` in the site file, or {VARIABLES[key]}"


def _has(group: Group, request: Request, cpus: int) -> bool:
    return group.gpus >= request.gpus_per_node and group.cpus >= cpus and group.memory_mb >= request.memory_mb


# Whether the training can be started at all, by SLURM or on this machine: asked once, before anything is made.

_PROBE_S = 30.0
_COUNT_S = 120.0  # torch is read from a slow disk, and finds a driver
_COUNT = "import torch; print(torch.cuda.device_count())"
_AS_A_JOB = "as a SLURM job: snakemake --profile slurm"
# What of the site file sbatch complains of, by its words.
_BLAMED = (("account", "account"), ("qos", "qos"), ("feature", "constraint"), ("partition", "partition"))


def refuse_jobs(site: Site, request: Request, groups: list[Group], others: Iterable[str] = ()) -> None:
    """Raise ConfigError, naming what to change, if jobs would be refused, or wait for what the cluster never has.

    `others` are problems of jobs beside the training's, found when they are asked for.
    """
    problems = list(wrong_partitions(site, groups)) or [*too_much(request, site, groups), *others]
    if not problems and (refusal := _refusal(site, request)):
        problems = [refusal]
    if problems:
        raise ConfigError("the cluster", problems)


def refuse_here(cluster: Cluster, is_job: bool) -> None:
    """Raise ConfigError for a training that cannot be started here: on several nodes, or on GPUs that are not there.

    Within a job (`is_job`) it starts tasks on the job's nodes, whatever the first of them shows.
    """
    problem = why_not_started(cluster.launcher, cluster.nodes, is_job)
    if problem is None and cluster.gpus_per_node and not is_job:
        problem = _too_few(cluster.gpus_per_node, _visible_gpus())
    if problem:
        raise ConfigError("the training", [problem])


def why_not_started(launcher: str, nodes: int, is_job: bool) -> str | None:
    """Why `launcher` cannot start ranks on so many nodes, within a job or not; None if it can."""
    if nodes > 1 and not is_job:
        return f"cluster.nodes: {nodes} nodes train {_AS_A_JOB}; or set it to 1"
    if nodes > 1 and launcher == "deepspeed":
        return f"cluster.launcher: deepspeed starts the ranks of one node, not of {nodes}; use torchrun or srun"
    if launcher == "srun" and not is_job:
        return "cluster.launcher: srun starts tasks within a SLURM job, and this is none; submit it, or use torchrun"
    return None


def _too_few(wanted: int, shown: int | None) -> str | None:
    if shown is None or shown >= wanted:
        return None
    lower = f"lower it{'' if shown else ' to 0 to train on the CPU'}"
    return f"cluster.gpus_per_node: {wanted} are wanted and this machine shows {shown}; {lower}, or train {_AS_A_JOB}"


@cache
def _visible_gpus() -> int | None:
    """As the ranks will count them; None where torch gives no answer. Apart, since torch takes seconds and stays."""
    try:
        done = subprocess.run([sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=_COUNT_S)
    except subprocess.TimeoutExpired:
        return None
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdecimal() else None


def sbatch_options(site: Site, request: Request) -> list[str]:
    """The training job's, as the executor plugin gives them."""
    options = [*site.sbatch_options(is_training=True), f"--nodes={request.nodes}", f"--ntasks={request.tasks}"]
    options += [f"--cpus-per-task={request.cpus_per_task}", f"--mem={request.memory_mb}"]
    options += [f"--gres=gpu:{request.gpus_per_node}"] if request.gpus_per_node else []
    return [*options, f"--time={request.runtime_minutes}"]


def _refusal(site: Site, request: Request) -> str | None:
    """What SLURM itself says of such a job, with the key to change; None if it would take it, or does not answer."""
    command = ["sbatch", "--test-only", *sbatch_options(site, request), "--wrap", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0 or has_no_answer(done.stderr):
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["sbatch refused the job without a word"]
    reason = re.sub(r"^(sbatch: error: |allocation failure: )+", "", lines[-1])
    blamed = next((key for word, key in _BLAMED if word in reason.lower()), None)
    hint = f"; set {where_set(blamed)}" if blamed else f" (asked for: {' '.join(command[2:-2])})"
    return f"SLURM would refuse the job: {reason}{hint}"
