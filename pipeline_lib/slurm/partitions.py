"""What the cluster has, as `sinfo` tells it, and whether a request can ever be met there: asked before submission."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches

from pipeline_lib.base.errors import ConfigError
from pipeline_lib.slurm.job import seconds_of
from pipeline_lib.slurm.request import Request
from pipeline_lib.slurm.site import VARIABLES, Site

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
