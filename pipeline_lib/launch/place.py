"""Where the ranks run and which program starts them."""

import base64
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from pipeline_lib.core.errors import PipelineError
from pipeline_lib.core.files import write_json
from pipeline_lib.launch.allocation import HERE, Allocation
from pipeline_lib.launch.environment import is_sent
from pipeline_lib.plan.document import Ranks, known
from pipeline_lib.slurm.site import Site


@dataclass(frozen=True)
class Place:
    """Where an attempt runs: which launcher starts how many ranks on each node of the allocation."""

    launcher: str
    nodes: int
    ranks_per_node: int
    cpus_per_rank: int
    device: str
    allocation: Allocation = HERE

    @staticmethod
    def of(cluster: Ranks, allocation: Allocation) -> "Place":
        """Return the place of the plan's `cluster` on the allocation; `auto` is srun in a SLURM job, else torchrun."""
        launcher, nodes = known(cluster.launcher), known(cluster.nodes)
        if launcher == "auto":
            launcher = "srun" if allocation.job else "torchrun"
        return Place(
            launcher,
            nodes,
            known(cluster.ranks) // nodes,
            known(cluster.cpus_per_rank),
            known(cluster.device),
            allocation,
        )

    @property
    def ranks(self) -> int:
        """World size."""
        return self.nodes * self.ranks_per_node

    @property
    def uses_srun(self) -> bool:
        """Whether srun starts tasks of the job on the nodes."""
        return self.allocation.job is not None

    def __str__(self) -> str:
        """Return words such as `srun, on n1 and n2 in SLURM job 7`; the launcher alone on this machine."""
        if self.allocation.is_this_machine:
            return self.launcher
        hosts = self.allocation.hosts
        shown = " and ".join(hosts) if self.nodes < 3 else f"{self.nodes} nodes from {hosts[0]} on"
        return f"{self.launcher}, on {shown}{self.allocation}"


NODE_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")  # each starts the ranks of one node


# What the agent of a host is told to start, as settings: the host's own code makes a command of them. Only these two
# programs can be named: the ranks of a training, and the doctor's measurements.


@dataclass(frozen=True)
class RankArguments:
    """The arguments of `python -m pipeline_lib rank`. All paths are absolute, and the same on all hosts."""

    NAME: ClassVar[str] = "rank"

    spec: str
    plan: str
    out: str
    attempt: int
    lock_token: str
    resume_from: str | None

    @property
    def mark(self) -> Path:
        """The argument that tells these processes from others: the folder that they write to."""
        return Path(self.out)

    def to_list(self) -> list[str]:
        """Return what follows `python -m pipeline_lib`."""
        arguments = [self.NAME, "--spec", self.spec, "--plan", self.plan, "--out", self.out]
        arguments += ["--attempt", str(self.attempt), "--lock-token", self.lock_token]
        return [*arguments, "--resume-from", self.resume_from] if self.resume_from else arguments


@dataclass(frozen=True)
class ProbeArguments:
    """The arguments of `python -m pipeline_lib probe node`: `token` names a file in the folder `store`."""

    store: str
    token: str
    device: str

    NAME: ClassVar[str] = "probe"

    @property
    def mark(self) -> Path:
        """The argument that tells these processes from others."""
        return Path(self.token)

    def to_list(self) -> list[str]:
        """Return what follows `python -m pipeline_lib`."""
        return [self.NAME, "node", "--store", self.store, "--token", self.token, "--device", self.device]


Program = RankArguments | ProbeArguments


@dataclass(frozen=True)
class HostOrder:
    """The order to start the ranks of one host. `interface` is the network interface that leads to the other hosts.

    `run_dir` is the folder where ranks report how they ended.
    """

    launcher: str
    nodes: int
    ranks_per_node: int
    start_timeout_s: int
    run_dir: Path
    program: Program
    environ: dict[str, str]
    node_rank: int
    host: str
    interface: str

    @property
    def ranks(self) -> int:
        """World size."""
        return self.nodes * self.ranks_per_node

    def command(self) -> list[str]:
        """Return the command line that starts the ranks of this host, with this host's Python."""
        node = node_program(self.launcher, self.nodes, self.ranks_per_node, self.start_timeout_s, self.run_dir)
        return [sys.executable, "-m", *node, *self.program.to_list()]

    @staticmethod
    def common(
        place: Place, environ: Mapping[str, str], start_timeout_s: int, run_dir: Path, program: Program
    ) -> dict[str, Any]:
        """Return the fields that are the same for all hosts, as JSON values.

        The ranks get from `environ` the settings of libraries and where rank 0 is, and the variables of the site file.
        """
        site, group = Site.load(environ).environment, place.allocation.group
        # What joined hosts are sent can be read in the network, so nothing else of the site file goes there.
        private = () if group is not None and group.has_joined else site.keys()
        sent = {name: value for name, value in {**environ, **site}.items() if is_sent(name) or name in private}
        return {
            "launcher": place.launcher,
            "nodes": place.nodes,
            "ranks_per_node": place.ranks_per_node,
            "start_timeout_s": start_timeout_s,
            "run_dir": str(run_dir),
            "program": {"name": program.NAME, **asdict(program)},
            "environ": sent,
        }

    @staticmethod
    def from_json(message: Mapping[str, Any], accepts: Callable[[str], bool]) -> "HostOrder":
        """Read an order, with the variables whose names `accepts` allows. Raises PipelineError if it is malformed."""
        try:
            fields = {name: message[name] for name in HostOrder.__dataclass_fields__}
            fields["environ"] = {name: str(value) for name, value in fields["environ"].items() if accepts(name)}
            program = _read_program(fields["program"])
            made = HostOrder(**{**fields, "program": program, "run_dir": Path(fields["run_dir"])})
        except (KeyError, TypeError, AttributeError) as error:
            raise PipelineError(f"the order to start ranks has a wrong form: {error!r}") from error
        if made.launcher not in NODE_LAUNCHERS:
            raise PipelineError(f"the order to start ranks names the launcher {made.launcher!r}")
        return made


def _read_program(fields: Mapping[str, Any]) -> Program:
    """Return the program that an order names. Raises PipelineError, or KeyError or TypeError for wrong fields."""
    name, arguments = fields["name"], {key: value for key, value in fields.items() if key != "name"}
    if name == RankArguments.NAME:
        return RankArguments(**arguments)
    if name == ProbeArguments.NAME:
        return ProbeArguments(**arguments)
    raise PipelineError(f"the order to start ranks names the program {name!r}")


# The command lines of the launchers that are programs of their own: accelerate, deepspeed and srun.

MODULE = "pipeline_lib"
ACCELERATE_CONFIG = "accelerate.json"
# Of an outer sbatch or srun, for tasks other than ours: srun takes some for options, which contradict those given.
OF_OTHER_TASKS = (
    *("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU"),
    *("SLURM_CPUS_PER_GPU", "SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE"),
)


def launcher_command(
    place: Place, environ: dict[str, str], run_dir: Path, start_timeout_s: int, program: list[str]
) -> list[str]:
    """Return the command that starts `program` as the ranks at `place`, and write the config that accelerate needs.

    `environ` is that of the ranks; for srun, variables of other tasks are removed from it.
    """
    if place.launcher == "accelerate":
        write_accelerate_config(place, environ, run_dir)
    if place.uses_srun:
        return [*_srun(place, environ, run_dir, start_timeout_s), *program]
    if place.launcher == "accelerate":
        return [*accelerate_command(environ, run_dir), *program]
    return [*deepspeed_command(environ, place.nodes, place.ranks_per_node), *program]


def node_program(launcher: str, nodes: int, ranks_per_node: int, start_timeout_s: int, run_dir: Path) -> list[str]:
    """Return the arguments after `python -m` that start the ranks of one node; the program of the ranks follows."""
    program = [MODULE, "node", "--launcher", launcher, "--nodes", str(nodes), "--ranks-per-node", str(ranks_per_node)]
    return [*program, "--timeout-s", str(start_timeout_s), "--run-dir", str(run_dir), "--"]


def write_accelerate_config(place: Place, environ: Mapping[str, str], run_dir: Path) -> None:
    """Write a config file of ours, so that the user's own one, made for other work, is not read.

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
    """Return `accelerate launch` with the config that was written to `run_dir`; the program of the ranks follows."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(run_dir / ACCELERATE_CONFIG)]
    command += ["--machine_rank", machine_rank]
    return [*command, "--num_cpu_threads_per_process", environ["OMP_NUM_THREADS"], "-m", MODULE]


def deepspeed_command(environ: Mapping[str, str], nodes: int, ranks_per_node: int, node_rank: str = "0") -> list[str]:
    """Return the command of DeepSpeed's launcher for one node's ranks; the program of the ranks follows.

    `deepspeed`, which starts it on each node over ssh, is not used: it reads /job/hostfile, which was made for other
    work, and numbers the GPUs from 0 whichever are visible.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    gpus: list[Any] = visible.split(",")[:ranks_per_node] if visible else list(range(ranks_per_node))
    world = json.dumps({f"node-{number}": gpus for number in range(nodes)})
    command = [sys.executable, "-m", "deepspeed.launcher.launch", "--log_level", "error", "--no_local_rank"]
    command += ["--world_info", base64.urlsafe_b64encode(world.encode()).decode(), "--node_rank", node_rank]
    command += ["--master_addr", environ["MASTER_ADDR"], "--master_port", environ["MASTER_PORT"]]
    return [*command, "--module", MODULE]


def _srun(place: Place, environ: dict[str, str], run_dir: Path, start_timeout_s: int) -> list[str]:
    """Return the srun command of tasks in the running job: the ranks, or a program on each node that starts them.

    A task that fails ends the others. Output is not labelled: it is that of rank 0, for people. Variables of other
    tasks are removed from `environ`.
    """
    for name in OF_OTHER_TASKS:
        environ.pop(name, None)
    if place.launcher == "srun":
        tasks, cpus, program = place.ranks_per_node, place.cpus_per_rank, [MODULE]
    else:
        tasks, cpus = 1, place.cpus_per_rank * place.ranks_per_node
        program = node_program(place.launcher, place.nodes, place.ranks_per_node, start_timeout_s, run_dir)
    command = ["srun", "--nodes", str(place.nodes), "--ntasks", str(place.nodes * tasks)]
    command += ["--ntasks-per-node", str(tasks), "--cpus-per-task", str(cpus), "--distribution", "block"]
    command += ["--nodelist", ",".join(place.allocation.hosts)]
    command += ["--kill-on-bad-exit=1", "--overlap", "--input", "none", "--export", "ALL"]
    command += ["--gres", f"gpu:{place.ranks_per_node}"] if place.device == "cuda" else []
    return [*command, sys.executable, "-m", *program]
