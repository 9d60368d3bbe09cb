"""Whether SLURM would take the training job at all: asked once, before anything is submitted."""

import re
import subprocess

from pipeline_lib.base.errors import ConfigError
from pipeline_lib.slurm.job import has_no_answer
from pipeline_lib.slurm.partitions import Group, too_much, where_set, wrong_partitions
from pipeline_lib.slurm.request import Request
from pipeline_lib.slurm.site import Site

_CALL_S = 30.0
# What of the site file sbatch complains of, by its words.
_BLAMED = (("account", "account"), ("qos", "qos"), ("feature", "constraint"), ("partition", "partition"))


def refuse_jobs(site: Site, request: Request, groups: list[Group]) -> None:
    """Raise ConfigError, naming what to change, if jobs would be refused, or wait for what the cluster never has."""
    problems = list(wrong_partitions(site, groups)) or list(too_much(request, site, groups))
    if not problems and (refusal := _refusal(site, request)):
        problems = [refusal]
    if problems:
        raise ConfigError("the cluster", problems)


def refuse_several_nodes(nodes: int) -> None:
    """Raise ConfigError for a training on more than one node that is no SLURM job."""
    if nodes > 1:
        raise ConfigError("the training", [several_nodes(nodes)])


def several_nodes(nodes: int) -> str:
    """Why it is refused."""
    return f"cluster.nodes: {nodes} nodes train as a SLURM job: snakemake --profile slurm; or set it to 1"


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
