"""A request in the words of Snakemake's SLURM plugin: the resources of a rule. None leaves one out."""

from typing import Any

from pipeline_lib.slurm.request import Request
from pipeline_lib.slurm.site import Site

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
