"""Where the ranks run and which program starts them."""

import importlib.util
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.files import write_json
from pipeline_lib.core.text import how_to_install
from pipeline_lib.launch.environment import LOOPBACK
from pipeline_lib.plan.content import Ranks, known
from pipeline_lib.slurm.cluster import why_not_started
from pipeline_lib.slurm.job import SlurmJob, can_start_tasks, node_address, node_names

# Who starts the ranks, and on which machines: what the config leaves open is decided here, once for an attempt.


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
    def of(cluster: Ranks, environ: Mapping[str, str], source: str) -> "Place":
        """Place what the plan says of the `cluster`. Raises ConfigError, naming `source`, and what SLURM raises."""
        launcher, nodes = known(cluster.launcher), known(cluster.nodes)
        has_srun = can_start_tasks(environ)
        if launcher == "auto":
            launcher = "srun" if has_srun else "torchrun"
        if problem := why_not_started(launcher, nodes, has_srun):
            raise ConfigError(source, [problem])
        job = SlurmJob.of(environ) if has_srun else None
        ranks_per_node = known(cluster.ranks) // nodes
        placed = (launcher, nodes, ranks_per_node, known(cluster.cpus_per_rank), known(cluster.device))
        if job is None:
            return Place(*placed, hosts=(socket.gethostname(),))
        hosts = node_names(job.fields["NodeList"])
        if len(hosts) < nodes:
            raise ConfigError(source, [f"cluster.nodes: {nodes}, and SLURM job {job.id} has {len(hosts)}: {hosts}"])
        # The batch host is the first node, and the port that this process chooses is free there.
        first = job.fields["BatchHost"] if job.fields.get("BatchHost") in hosts else hosts[0]
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


# The command lines of the launchers that are programs of their own: accelerate, deepspeed and srun.

RANK_MODULE = ("pipeline_lib", "rank")
AGENT_MODULE = ("pipeline_lib", "agent")
ACCELERATE_CONFIG = "accelerate.json"
# Of an outer sbatch or srun, for tasks other than ours: srun takes some for options, which contradict those given.
OF_OTHER_TASKS = (
    *("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU"),
    *("SLURM_CPUS_PER_GPU", "SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE"),
)


def launcher_command(
    place: Place, environ: dict[str, str], run_dir: Path, start_timeout_s: int, rank_arguments: list[str]
) -> list[str]:
    """What starts the ranks at `place`; `environ` is theirs, and may be narrowed. Raises ConfigError."""
    if place.launcher == "accelerate":
        _write_accelerate_config(place, environ, run_dir)
    if place.uses_srun:
        return [*_srun(place, environ, run_dir, start_timeout_s), *rank_arguments]
    if place.launcher == "accelerate":
        return [*accelerate_command(environ, run_dir), *rank_arguments]
    return [*_deepspeed(place, environ, run_dir), *rank_arguments]


def _write_accelerate_config(place: Place, environ: Mapping[str, str], run_dir: Path) -> None:
    """Write a config file of ours: the user's own one, made for other work, is not read.

    MULTI_GPU is accelerate's word for torch's elastic agent, which serves ranks on the CPU as well.
    """
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if place.ranks > 1 else "NO",
        "num_processes": place.ranks,
        "num_machines": place.nodes,
        "machine_rank": 0,
        "gpu_ids": "all",
        "main_process_port": int(environ["MASTER_PORT"]),
        "mixed_precision": "no",
        "use_cpu": place.device == "cpu",
        "debug": False,
    }
    if place.nodes > 1:
        settings |= {"main_process_ip": environ["MASTER_ADDR"], "rdzv_backend": "static", "same_network": True}
    write_json(run_dir / ACCELERATE_CONFIG, settings)


def accelerate_command(environ: Mapping[str, str], run_dir: Path, machine_rank: str = "0") -> list[str]:
    """`accelerate launch` with the config that was written to `run_dir`."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(run_dir / ACCELERATE_CONFIG)]
    command += ["--machine_rank", machine_rank]
    return [*command, "--num_cpu_threads_per_process", environ["OMP_NUM_THREADS"], "-m", *RANK_MODULE]


def _deepspeed(place: Place, environ: dict[str, str], run_dir: Path) -> list[str]:
    """`deepspeed`, without a host file: /job/hostfile, which it would read, was made for other work.

    It renumbers the GPUs from 0 when told a number of them, so the visible ones are narrowed instead.
    """
    if importlib.util.find_spec("deepspeed") is None:
        problem = f"cluster.launcher: deepspeed is not installed: {how_to_install('deepspeed')}"
        raise ConfigError(str(run_dir), [problem])
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(run_dir / "no-hostfile")]
    command += ["--master_port", environ["MASTER_PORT"], "--log_level", "error", "--no_local_rank"]
    if visible := environ.get("CUDA_VISIBLE_DEVICES"):
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[: place.ranks])
    else:
        command += ["--num_gpus", str(place.ranks)]
    return [*command, "--module", *RANK_MODULE]


def _srun(place: Place, environ: dict[str, str], run_dir: Path, start_timeout_s: int) -> list[str]:
    """Tasks on the nodes of the job that runs already: the ranks, or an agent on each node that starts its ranks.

    A task that fails ends the others. Output is not labelled: it is that of rank 0, for people.
    """
    for name in OF_OTHER_TASKS:
        environ.pop(name, None)
    if place.launcher == "srun":
        tasks, cpus, program = place.ranks_per_node, place.cpus_per_rank, [*RANK_MODULE]
    else:
        tasks, cpus = 1, place.cpus_per_rank * place.ranks_per_node
        program = [*AGENT_MODULE, "--launcher", place.launcher, "--nodes", str(place.nodes)]
        program += ["--ranks-per-node", str(place.ranks_per_node), "--timeout-s", str(start_timeout_s)]
        program += ["--run-dir", str(run_dir), "--"]
    command = ["srun", "--nodes", str(place.nodes), "--ntasks", str(place.nodes * tasks)]
    command += ["--ntasks-per-node", str(tasks), "--cpus-per-task", str(cpus), "--distribution", "block"]
    command += ["--nodelist", ",".join(place.hosts)]
    command += ["--kill-on-bad-exit=1", "--overlap", "--input", "none", "--export", "ALL"]
    command += ["--gres", f"gpu:{place.ranks_per_node}"] if place.device == "cuda" else []
    return [*command, sys.executable, "-m", *program]
