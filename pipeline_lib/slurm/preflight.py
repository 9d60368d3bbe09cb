"""Whether the training can be started at all, by SLURM or on this machine: asked once, before anything is made."""

import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache

from pipeline_lib.base.errors import ConfigError
from pipeline_lib.config.schema import Cluster
from pipeline_lib.slurm.job import has_no_answer
from pipeline_lib.slurm.partitions import Group, too_much, where_set, wrong_partitions
from pipeline_lib.slurm.request import Request
from pipeline_lib.slurm.site import Site

_CALL_S = 30.0
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
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CALL_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0 or has_no_answer(done.stderr):
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["sbatch refused the job without a word"]
    reason = re.sub(r"^(sbatch: error: |allocation failure: )+", "", lines[-1])
    blamed = next((key for word, key in _BLAMED if word in reason.lower()), None)
    hint = f"; set {where_set(blamed)}" if blamed else f" (asked for: {' '.join(command[2:-2])})"
    return f"SLURM would refuse the job: {reason}{hint}"
