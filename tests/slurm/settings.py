"""A loopback cluster's parts, kept in a file while the cluster is up, and its slurm.conf."""

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

CLUSTER = "loop"
CONFIG = """\
ClusterName={cluster}
SlurmctldHost={host}({address})
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
# Lost nodes are noticed soon; jobs that ended stay visible for Snakemake, which asks seldom.
SlurmdTimeout={slurmd_timeout_s}
MessageTimeout=5
TCPTimeout=1
ReturnToService=2
MinJobAge=300
KillWait={kill_wait_s}
JobRequeue=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=5,bf_interval=5
SlurmdParameters=config_overrides
SlurmctldParameters=preempt_send_user_signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
EnforcePartLimits=ALL
GresTypes=gpu
{accounting}
{nodes}
PartitionName=gpu Nodes={names} Default=YES State=UP MaxTime=1-00:00:00 DefaultTime=60 PriorityTier=1 \
PreemptMode=REQUEUE GraceTime={grace_s}
PartitionName=cpu Nodes={names} State=UP MaxTime=7-00:00:00 DefaultTime=60 PriorityTier=1 PreemptMode=OFF
PartitionName=urgent Nodes={names} State=UP MaxTime=1-00:00:00 DefaultTime=60 PriorityTier=10 PreemptMode=OFF
"""
NO_ACCOUNTING = """\
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none"""
ACCOUNTING = """\
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={address}
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
AccountingStorageEnforce=associations,qos
AccountingStorageTRES=gres/gpu"""


@dataclass(frozen=True)
class Settings:
    """What `up` can be asked for."""

    nodes: int = 2
    gpus: int = 4  # of each node; SLURM takes any device file for one
    cpus: int = 8
    memory_mb: int = 16_000
    namespaces: bool = False
    accounting: bool = False
    slurmd_timeout_s: int = 10  # a node that is silent for so long is down
    kill_wait_s: int = 30  # between SIGTERM and SIGKILL, at a job's time limit
    grace_s: int = 20  # the same for a job in `gpu` that one in `urgent` preempts


@dataclass(frozen=True)
class Node:
    """A node: its name in SLURM, and where its slurmd listens."""

    name: str
    address: str
    port: int


@dataclass(frozen=True)
class Plan:
    """A cluster that is up, or being made: everything that a later command needs to know."""

    settings: Settings
    folder: Path
    nodes: tuple[Node, ...]
    address: str  # of the control daemons
    control_port: int
    database_port: int
    accounting_port: int
    owner: tuple[int, str] | None  # pid and start time of the tests that it belongs to
    netns_was_mounted: bool  # `ip netns add` mounts /run/netns, and does not undo it

    @property
    def config(self) -> Path:
        return self.folder / "slurm.conf"

    @property
    def control_daemons(self) -> tuple[str, ...]:
        """Names of the daemons that are no node's, in the order in which they start."""
        database = ("mariadbd", "slurmdbd") if self.settings.accounting else ()
        return ("munged", *database, "slurmctld")

    def to_json(self) -> str:
        """The text that `from_json` reads."""
        return json.dumps(asdict(self) | {"folder": str(self.folder)}, indent=1)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """What `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        fields["settings"] = Settings(**fields["settings"])
        fields["folder"] = Path(fields["folder"])
        fields["nodes"] = tuple(Node(**node) for node in fields["nodes"])
        fields["owner"] = fields["owner"] and tuple(fields["owner"])
        return Plan(**fields)


def write_config(plan: Plan) -> None:
    """Write slurm.conf and what belongs beside it, and make the folders that it names."""
    settings, folder, host = plan.settings, plan.folder, socket.gethostname()
    lines = [
        f"NodeName={node.name} NodeHostname={node.name if settings.namespaces else host} "
        f"NodeAddr={node.address}"
        f" Port={node.port} CPUs={settings.cpus} RealMemory={settings.memory_mb}"
        + (f" Gres=gpu:{settings.gpus}" if settings.gpus else "")
        for node in plan.nodes
    ]
    names = ",".join(node.name for node in plan.nodes)
    accounting = ACCOUNTING if settings.accounting else NO_ACCOUNTING
    plan.config.write_text(
        CONFIG.format(
            cluster=CLUSTER,
            host=host,
            address=plan.address,
            port=plan.control_port,
            folder=folder,
            slurmd_timeout_s=settings.slurmd_timeout_s,
            kill_wait_s=settings.kill_wait_s,
            grace_s=settings.grace_s,
            accounting=accounting.format(
                address=plan.address, port=plan.accounting_port, folder=folder
            ),
            nodes="\n".join(lines),
            names=names,
        )
    )
    # slurmd wants device files, and drains its node for a mere count: "gres/gpu count reported
    # lower".
    for number in range(settings.gpus):
        (folder / f"gpu{number}").symlink_to("/dev/null")
    gpus = (
        f"NodeName={names} Name=gpu File={folder}/gpu[0-{settings.gpus - 1}]\n"
        if settings.gpus
        else ""
    )
    (folder / "gres.conf").write_text(gpus)
    (folder / "plugstack.conf").write_text("")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "state").mkdir()
    for node in plan.nodes:
        (folder / "spool" / node.name).mkdir(parents=True)


def owner_of_now() -> tuple[int, str]:
    """This process, told from a later one with the same number."""
    return os.getpid(), _start_time(os.getpid())


def is_alive(owner: tuple[int, str]) -> bool:
    """Whether the process that `owner_of_now` named still runs."""
    try:
        return _start_time(owner[0]) == owner[1]
    except OSError:
        return False


def _start_time(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
