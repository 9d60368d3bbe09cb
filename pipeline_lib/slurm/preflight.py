"""Whether the training can be started at all, by SLURM or on this machine: asked once, before anything is made."""

import re
import subprocess
import sys
from collections.abc import Mapping
from functools import cache

from pipeline_lib.base.errors import ConfigError
from pipeline_lib.config.schema import Cluster
from pipeline_lib.slurm.job import can_start_tasks, has_no_answer
from pipeline_lib.slurm.partitions import Group, too_much, where_set, wrong_partitions
from pipeline_lib.slurm.request import Request
from pipeline_lib.slurm.site import Site

_CALL_S = 30.0
_COUNT_S = 120.0  # torch is read from a slow disk, and finds a driver
_COUNT = "import torch; print(torch.cuda.device_count())"
_AS_A_JOB = "as a SLURM job: snakemake --profile slurm"
# What of the site file sbatch complains of, by its words.
_BLAMED = (("account", "account"), ("qos", "qos"), ("feature", "constraint"), ("partition", "partition"))


def refuse_jobs(site: Site, request: Request, groups: list[Group]) -> None:
    """Raise ConfigError, naming what to change, if jobs would be refused, or wait for what the cluster never has."""
    problems = list(wrong_partitions(site, groups)) or list(too_much(request, site, groups))
    if not problems and (refusal := _refusal(site, request)):
        problems = [refusal]
    if problems:
        raise ConfigError("the cluster", problems)


def refuse_here(cluster: Cluster, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for a training that this machine cannot start: on several nodes, or on GPUs that it lacks.

    Within a job of the user's own the training starts tasks on its nodes, whatever the first of them shows.
    """
    if can_start_tasks(environ):
        return
    if cluster.nodes > 1:
        raise ConfigError("the training", [several_nodes(cluster.nodes)])
    shown = _visible_gpus() if cluster.gpus_per_node else None
    if shown is not None and shown < cluster.gpus_per_node:
        lower = f"lower it{'' if shown else ' to 0 to train on the CPU'}"
        found = f"{cluster.gpus_per_node} are wanted and this machine shows {shown}"
        raise ConfigError("the training", [f"cluster.gpus_per_node: {found}; {lower}, or train {_AS_A_JOB}"])


def several_nodes(nodes: int) -> str:
    """Why it is refused."""
    return f"cluster.nodes: {nodes} nodes train {_AS_A_JOB}; or set it to 1"


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
