"""Whether the training can be started, by SLURM or here: checked once, before any stage runs."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from pipeline_lib.config.findings import Finding, finding_of
from pipeline_lib.config.schema import Cluster
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.units import count
from pipeline_lib.slurm.cluster import NodeGroup, too_much, where_set, wrong_partitions
from pipeline_lib.slurm.job import can_start_tasks, has_no_answer
from pipeline_lib.slurm.request import JobRequest
from pipeline_lib.slurm.site import Site

_PROBE_S = 30.0
_COUNT_S = 120.0  # importing torch from a slow disk, and finding a driver
_COUNT = "import torch; print(torch.cuda.device_count())"
_AS_A_JOB = "as a SLURM job: snakemake --profile slurm"
_SRUN = "cluster.launcher: srun works only in a SLURM job"
_WITHOUT_SRUN = "or set it to auto, which starts the ranks without srun where there is no job"
# The key of the site file that sbatch complains about, by a word of its message.
_BLAMED = (
    ("account", "account"),
    ("qos", "qos"),
    ("feature", "constraint"),
    ("partition", "partition"),
    ("reservation", "reservation"),
    ("node name", "exclude"),
    ("node list", "exclude"),
)


def refuse_jobs(
    site: Site, request: JobRequest, groups: list[NodeGroup], given: Sequence[str] = ()
) -> None:
    """Raise ConfigError with what to change if SLURM would refuse or could never start the jobs."""
    if problems := why_not_submitted(site, request, groups, given):
        raise ConfigError("the cluster", problems)


def why_not_submitted(
    site: Site, request: JobRequest, groups: list[NodeGroup], given: Sequence[str] = ()
) -> list[str]:
    """Return why SLURM would refuse or could never start the jobs; empty if it could.

    `given` are further options of the training's job. SLURM itself is asked only where nothing else
    is wrong.
    """
    if problems := list(wrong_partitions(site, groups)):
        return problems
    if problems := list(too_much(request, site, groups)):
        return problems
    refusal = _refusal(site, request, given)
    return [refusal] if refusal else []


def refuse_here(cluster: Cluster, is_job: bool) -> None:
    """Raise ConfigError if the training cannot start here, for lack of several nodes or of GPUs.

    Within a job (`is_job`), GPUs are not counted: the training starts tasks on the job's nodes.
    """
    problem = why_not_started(cluster.launcher, cluster.nodes, is_job)
    wanted = cluster.gpus_per_node
    if (
        problem is None
        and wanted
        and not is_job
        and (visible := _visible_gpus()) is not None
        and visible < wanted
    ):
        lower = f"lower it{'' if visible else ' to 0 to train on the CPU'}"
        problem = (
            f"cluster.gpus_per_node: {count(wanted, 'GPUs')} configured, and this machine "
            f"has {visible}; {lower},"
        )
        problem += f" or train {_AS_A_JOB}"
    if problem:
        raise ConfigError("the training", [problem])


def why_not_started(launcher: str, nodes: int, is_job: bool, has_hosts: bool = False) -> str | None:
    """Return why `launcher` cannot start ranks on `nodes` nodes, in a job or on hosts; or None."""
    if nodes > 1 and not is_job and not has_hosts:
        return (
            f"cluster.nodes: {nodes} nodes train {_AS_A_JOB}; or on machines that ssh reaches, "
            "listed as `hosts` in the"
            " site file or as PIPELINE_HOSTS=NAME,NAME (docs/two-machines.md); or set it to 1"
        )
    if launcher == "srun" and not is_job:
        return f"{_SRUN}, and this is not one: train {_AS_A_JOB}; {_WITHOUT_SRUN}"
    return None


def srun_without_jobs(cluster: Cluster, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yield a warning if `cluster` wants srun but no job can be submitted here."""
    has_slurm = shutil.which("sbatch", path=environ.get("PATH")) is not None
    if cluster.launcher != "srun" or has_slurm or can_start_tasks(environ):
        return
    yield finding_of(
        "warning",
        f"{_SRUN}, and there is no sbatch on PATH: on a login node train {_AS_A_JOB}; "
        f"{_WITHOUT_SRUN}",
    )


@cache
def _visible_gpus() -> int | None:
    """Return how many GPUs torch sees, as the ranks will; None if torch gives no answer.

    It runs in a process of its own: importing torch takes seconds, and it would stay in memory.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COUNT], capture_output=True, text=True, timeout=_COUNT_S
        )
    except subprocess.TimeoutExpired:
        return None
    return int(done.stdout) if done.returncode == 0 and done.stdout.strip().isdecimal() else None


def sbatch_options(site: Site, request: JobRequest, given: Sequence[str] = ()) -> list[str]:
    """Return the training job's options, as the executor plugin has them; `given` by the user."""
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
    """Return why SLURM would refuse such a job, with the key to change; None if it does not.

    It is also None if SLURM does not answer.
    """
    options = sbatch_options(site, request, given)
    command = ["sbatch", "--test-only", *options, "--wrap", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode == 0 or has_no_answer(done.stderr):
        return None
    lines = [line for line in done.stderr.splitlines() if line.strip()] or [
        "sbatch refused the job without a message"
    ]
    reason = re.sub(r"^(sbatch: error: |allocation failure: )+", "", lines[-1])
    blamed = next((key for word, key in _BLAMED if word in reason.lower()), None)
    hint = f"; set {where_set(blamed)}" if blamed else f" (asked for: {' '.join(options)})"
    return f"SLURM would refuse the job: {reason}{hint}"
