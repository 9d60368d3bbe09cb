"""Who starts the ranks, and on which machines: what the config leaves open is decided here, once for an attempt."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline_lib.base.errors import ConfigError
from pipeline_lib.slurm.job import SlurmJob, can_start_tasks, node_address, node_names
from pipeline_lib.slurm.preflight import why_not_started
from pipeline_lib.train.launch.environment import LOOPBACK


@dataclass(frozen=True)
class Place:
    """Where an attempt runs. `job` is the SLURM job whose nodes `hosts` are; `master` is where rank 0 is reached."""

    launcher: str
    nodes: int
    ranks_per_node: int
    cpus_per_rank: int
    device: str
    job: SlurmJob | None = None
    hosts: tuple[str, ...] = ()
    master: str = LOOPBACK

    @staticmethod
    def of(cluster: Mapping[str, Any], environ: Mapping[str, str], source: str) -> "Place":
        """Place what the plan says of the `cluster`. Raises ConfigError, naming `source`, and what SLURM raises."""
        launcher, nodes = cluster["launcher"], cluster["nodes"]
        has_srun = can_start_tasks(environ)
        if launcher == "auto":
            launcher = "srun" if has_srun else "torchrun"
        if problem := why_not_started(launcher, nodes, has_srun):
            raise ConfigError(source, [problem])
        job = SlurmJob.of(environ) if has_srun else None
        ranks_per_node = cluster["ranks"] // nodes
        placed = (launcher, nodes, ranks_per_node, cluster["cpus_per_rank"], cluster["device"])
        if job is None:
            return Place(*placed, hosts=(socket.gethostname(),))
        hosts = node_names(job.node_list)
        if len(hosts) < nodes:
            raise ConfigError(source, [f"cluster.nodes: {nodes}, and SLURM job {job.id} has {len(hosts)}: {hosts}"])
        # The batch host is the first node, and the port that this process chooses is free there.
        first = job.batch_host if job.batch_host in hosts else hosts[0]
        hosts = (first, *(name for name in hosts if name != first))[:nodes]
        return Place(*placed, job=job, hosts=hosts, master=node_address(first) if nodes > 1 else LOOPBACK)

    @property
    def ranks(self) -> int:
        """World size."""
        return self.nodes * self.ranks_per_node

    @property
    def uses_srun(self) -> bool:
        """Whether what is started on the nodes are tasks of the job; DeepSpeed's launcher starts ranks by itself."""
        return self.job is not None and self.launcher != "deepspeed"

    def __str__(self) -> str:
        """`srun, on n1 and n2 in SLURM job 7`."""
        if self.job is None:
            return self.launcher
        shown = " and ".join(self.hosts) if self.nodes < 3 else f"{self.nodes} nodes from {self.hosts[0]} on"
        return f"{self.launcher}, on {shown} in SLURM job {self.job.id}"
