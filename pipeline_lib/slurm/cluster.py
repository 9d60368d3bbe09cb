"""What the cluster has, by `sinfo`, and whether it can meet a request: checked beforehand."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.units import count
from pipeline_lib.slurm.job import seconds_of
from pipeline_lib.slurm.request import JobRequest
from pipeline_lib.slurm.site import VARIABLES, Site

_FORMAT = "%P|%a|%l|%D|%c|%m|%G"
# Without --exact, unlike nodes share a line that has their minimum. Without --noconvert, 1024 nodes
# are `1K`.
_SINFO = ("sinfo", "--all", "--exact", "--noconvert", "--noheader", "--format", _FORMAT)
_GPUS = re.compile(r"gpu(?::[^:,(]*[^\d:,(][^:,(]*)?:(\d+)")  # of one kind: `gpu:h200:8(S:0-1)`
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
    """Return the nodes of all partitions, by groups of equal ones.

    Raises ConfigError if sinfo gives no answer.
    """
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
        gpus=sum(map(int, _GPUS.findall(gres))),
    )


def _number(text: str) -> int:
    """Return the number that `text` begins with: `64+` means 64 and more."""
    return int(re.match(r"\d+", text)[0])  # type: ignore[index]


def groups_of(partition: str | None, groups: list[NodeGroup]) -> list[NodeGroup]:
    """Return the nodes of `partition`, which may be several, `a,b`; None is SLURM's default."""
    if partition is None:
        return [group for group in groups if group.is_default] or groups
    return [group for group in groups if group.partition in partition.split(",")]


def limit_of(groups: list[NodeGroup]) -> int | None:
    """Return the longest time limit of these nodes in minutes; None if one has no limit."""
    longest = None
    for group in groups:
        if group.limit_minutes is None:
            return None
        longest = max(longest or 0, group.limit_minutes)
    return longest


def fitted(request: JobRequest, groups: list[NodeGroup]) -> JobRequest:
    """Return `request` with time, memory and CPUs capped to `groups`, for generous defaults."""
    if not groups:
        return request
    limit = limit_of(groups) or request.runtime_minutes
    return replace(
        request,
        runtime_minutes=min(request.runtime_minutes, limit),
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
                text = f"partition {wanted!r} does not exist{hint}; partitions: {', '.join(known)}"
                yield f"{text}; set {where_set(key)}"
            elif wanted and not any(group.is_up for group in groups_of(wanted, groups)):
                text = f"partition {wanted!r} is down and takes no jobs"
                yield f"{text}; wait, or name another as {where_set(key)}"


def too_much(request: JobRequest, site: Site, groups: list[NodeGroup]) -> Iterator[str]:
    """Yield a problem if the partition's nodes have too little, are too few, or lack the time."""
    own = groups_of(site.partition, groups)
    where = f"partition {site.partition or own[0].partition}"
    yield from _too_large(request, own, where)
    limit = limit_of(own)
    if limit is not None and request.runtime_minutes > limit:
        minutes = f"{request.runtime_minutes} minutes"
        yield f"cluster.runtime_minutes: {minutes}, and {where} allows {limit}"


def _too_large(request: JobRequest, groups: list[NodeGroup], where: str) -> Iterator[str]:
    """Yield what the nodes of `groups` have too little of, or that too few have enough."""
    cpus = request.tasks_per_node * request.cpus_per_task
    most_gpus = max(group.gpus for group in groups)
    most_cpus = max(group.cpus for group in groups)
    most_memory_mb = max(group.memory_mb for group in groups)
    if request.gpus_per_node > most_gpus:
        wanted = count(request.gpus_per_node, "GPUs")
        yield f"cluster.gpus_per_node: {wanted}, and the nodes of {where} have at most {most_gpus}"
        return
    if cpus > most_cpus:
        ranks = count(request.tasks_per_node, "ranks")
        text = f"cluster.cpus_per_rank: {ranks} x {request.cpus_per_task} need"
        yield f"{text} {count(cpus, 'CPUs')}, and the nodes of {where} have at most {most_cpus}"
        return
    if request.memory_mb > most_memory_mb:
        yield (
            f"cluster.memory_gb: the job needs {request.memory_mb / 1000:.0f} GB of host memory on "
            f"each node, and the nodes of {where} have at most {most_memory_mb / 1000:.0f} GB"
        )
        return
    nodes = 0
    for group in groups:
        has_memory = group.memory_mb >= request.memory_mb
        if has_memory and group.gpus >= request.gpus_per_node and group.cpus >= cpus:
            nodes += group.nodes
    if nodes < request.nodes:
        wanted = count(request.nodes, "nodes")
        yield f"cluster.nodes: {wanted} of this size, and {where} has {nodes}"


def where_set(key: str) -> str:
    """Describe where a key of the site file is set, for messages."""
    variable = f", or {VARIABLES[key]}" if key in VARIABLES else ""
    return f"`{key}` in the site file{variable}"
