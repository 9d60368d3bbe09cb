"""Where the ranks run and which program starts them."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from pipeline_lib.core.errors import PipelineError
from pipeline_lib.launch.allocation import HERE, Allocation
from pipeline_lib.launch.environment import is_sent
from pipeline_lib.launch.spawn import MODULE
from pipeline_lib.records.plan import PlannedCluster
from pipeline_lib.slurm.site import Site


@dataclass(frozen=True)
class RankPlacement:
    """Where an attempt runs: which launcher starts how many ranks on each allocated node."""

    launcher: str
    nodes: int
    ranks_per_node: int
    cpus_per_rank: int
    device: str
    allocation: Allocation = HERE

    @staticmethod
    def of(cluster: PlannedCluster, allocation: Allocation) -> "RankPlacement":
        """Return where the plan's `cluster` runs; `auto` is srun in a SLURM job, else spawn."""
        launcher = cluster.launcher
        nodes = cluster.nodes
        if launcher == "auto":
            launcher = "srun" if allocation.job else "spawn"
        return RankPlacement(
            launcher,
            nodes,
            cluster.ranks // nodes,
            cluster.cpus_per_rank,
            cluster.device,
            allocation,
        )

    @property
    def ranks(self) -> int:
        """World size."""
        return self.nodes * self.ranks_per_node

    def __str__(self) -> str:
        """Return words such as `srun, on n1 and n2 in SLURM job 7`.

        On this machine, these are the launcher alone.
        """
        if self.allocation.is_this_machine:
            return self.launcher
        hosts = self.allocation.hosts
        shown = " and ".join(hosts) if self.nodes < 3 else f"{self.nodes} nodes from {hosts[0]} on"
        return f"{self.launcher}, on {shown}{self.allocation}"


# What the agent of a host is told to start, as settings: the host's own code makes a command of
# them. Only these two programs can be named: the ranks of a training, and the doctor's
# measurements.


@dataclass(frozen=True)
class RankArguments:
    """The arguments of `python -m pipeline_lib rank`.

    All paths are absolute, and the same on all hosts.
    """

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
    """The arguments of `python -m pipeline_lib probe node`: `token` names a file in `store`."""

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
        return [
            self.NAME,
            "node",
            "--store",
            self.store,
            "--token",
            self.token,
            "--device",
            self.device,
        ]


Program = RankArguments | ProbeArguments


@dataclass(frozen=True)
class HostOrder:
    """The order to start the ranks of one host.

    `interface` is the network interface that leads to the other hosts. `run_dir` is the folder
    where ranks report how they ended.
    """

    nodes: int
    ranks_per_node: int
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
        return [
            sys.executable,
            "-m",
            *node_program(self.nodes, self.ranks_per_node),
            *self.program.to_list(),
        ]

    @staticmethod
    def common(
        place: RankPlacement, environ: Mapping[str, str], run_dir: Path, program: Program
    ) -> dict[str, Any]:
        """Return the fields that are the same for all hosts, as JSON values.

        The ranks get from `environ` the settings of libraries and where rank 0 is, and the
        variables of the site file.
        """
        site = Site.load(environ).environment
        group = place.allocation.group
        # What joined hosts are sent can be read in the network, so nothing else of the site file
        # goes there.
        private = () if group is not None and group.has_joined else site.keys()
        known = {**environ, **site}
        sent = {name: known[name] for name in known if is_sent(name) or name in private}
        return {
            "nodes": place.nodes,
            "ranks_per_node": place.ranks_per_node,
            "run_dir": str(run_dir),
            "program": {"name": program.NAME, **asdict(program)},
            "environ": sent,
        }

    @staticmethod
    def from_json(message: Mapping[str, Any], accepts: Callable[[str], bool]) -> "HostOrder":
        """Read an order, with the variables whose names `accepts` allows.

        Raises PipelineError if it is malformed.
        """
        try:
            fields = {name: message[name] for name in HostOrder.__dataclass_fields__}
            fields["environ"] = {
                name: str(value) for name, value in fields["environ"].items() if accepts(name)
            }
            program = _read_program(fields["program"])
            return HostOrder(**{**fields, "program": program, "run_dir": Path(fields["run_dir"])})
        except (KeyError, TypeError, AttributeError) as error:
            raise PipelineError(f"the order to start ranks has a wrong form: {error!r}") from error


def _read_program(fields: Mapping[str, Any]) -> Program:
    """Return the program that an order names.

    Raises PipelineError, or KeyError or TypeError for wrong fields.
    """
    name = fields["name"]
    arguments = {key: value for key, value in fields.items() if key != "name"}
    if name == RankArguments.NAME:
        return RankArguments(**arguments)
    if name == ProbeArguments.NAME:
        return ProbeArguments(**arguments)
    raise PipelineError(f"the order to start ranks names the program {name!r}")


# Of an outer sbatch or srun, for tasks other than ours: srun takes some for options, which
# contradict those given.
OF_OTHER_TASKS = (
    "SLURM_CPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
    "SLURM_GPUS_PER_TASK",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_CPUS_PER_GPU",
    "SLURM_CPU_BIND",
    "SLURM_CPU_BIND_LIST",
    "SLURM_CPU_BIND_TYPE",
    "SLURM_CPU_BIND_VERBOSE",
)


def node_program(nodes: int, ranks_per_node: int) -> list[str]:
    """Return the arguments after `python -m` that start one node's ranks, before their program."""
    return [MODULE, "node", "--nodes", str(nodes), "--ranks-per-node", str(ranks_per_node), "--"]


def srun_command(place: RankPlacement, environ: dict[str, str], program: list[str]) -> list[str]:
    """Return the srun command of tasks in the job: ranks of `program`, or a starter on each node.

    A task that fails ends the others. Output is not labelled: it is that of rank 0, for people.
    Variables of other tasks are removed from `environ`, which is that of the ranks.
    """
    if place.launcher == "srun":
        tasks = place.ranks_per_node
        cpus = place.cpus_per_rank
        started = [MODULE]
    else:
        tasks = 1
        cpus = place.cpus_per_rank * place.ranks_per_node
        started = node_program(place.nodes, place.ranks_per_node)
    return [*_srun(place, tasks, cpus, environ), sys.executable, "-m", *started, *program]


def srun_beside(place: RankPlacement, environ: dict[str, str], program: list[str]) -> list[str]:
    """Return the srun command of one task of `program`, with all that the ranks have on a node.

    `place` is that one node, and `environ` as in `srun_command`.
    """
    cpus = place.cpus_per_rank * place.ranks_per_node
    return [*_srun(place, 1, cpus, environ), sys.executable, "-m", MODULE, *program]


def _srun(place: RankPlacement, tasks: int, cpus: int, environ: dict[str, str]) -> list[str]:
    """Return srun with its options, for `tasks` on each node with `cpus` each."""
    for name in OF_OTHER_TASKS:
        environ.pop(name, None)
    command = ["srun", "--nodes", str(place.nodes), "--ntasks", str(place.nodes * tasks)]
    command += [
        "--ntasks-per-node",
        str(tasks),
        "--cpus-per-task",
        str(cpus),
        "--distribution",
        "block",
    ]
    command += ["--nodelist", ",".join(place.allocation.hosts)]
    command += ["--kill-on-bad-exit=1", "--overlap", "--input", "none", "--export", "ALL"]
    if place.device == "cuda":
        command += ["--gres", f"gpu:{place.ranks_per_node}"]
    return command
