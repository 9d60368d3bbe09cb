"""The nodes that a training runs on: this machine, a SLURM job's, ssh hosts, or hosts that joined.

Whoever starts ranks asks the allocation for hosts, address, port and time left, and does not know
where they came from.
"""

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.config.findings import Finding
from pipeline_lib.config.schema import Cluster
from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import Store
from pipeline_lib.core.units import count
from pipeline_lib.hosts.checks import HostNeeds
from pipeline_lib.hosts.facts import gpus_here
from pipeline_lib.hosts.first_host import Joined, JoiningPort
from pipeline_lib.hosts.group import HostGroup
from pipeline_lib.hosts.join_settings import joining_hosts, read_secret
from pipeline_lib.hosts.link import HostLink, connect
from pipeline_lib.hosts.listing import SOURCE, Host, hosts_of
from pipeline_lib.launch.environment import LOOPBACK
from pipeline_lib.slurm.can_start import refuse_here, why_not_started
from pipeline_lib.slurm.job import SlurmJob, can_start_tasks, node_address, node_names
from pipeline_lib.slurm.site import Site

CHECK_TIMEOUT_S = 60.0  # for an agent that only answers checks


@dataclass(frozen=True)
class Allocation:
    """The nodes of a training.

    `hosts` are their names, that of rank 0 first; the others reach it at `address`.
    """

    hosts: tuple[str, ...] = ()
    address: str = LOOPBACK
    job: SlurmJob | None = None
    group: HostGroup | None = None

    @property
    def is_this_machine(self) -> bool:
        """Whether it is this machine alone."""
        return self.job is None and self.group is None

    @property
    def port(self) -> int | None:
        """A free port of rank 0's node; None if that is this machine, where any free one works."""
        return self.group.port if self.group else None

    @property
    def left_s(self) -> float | None:
        """The seconds until the nodes are taken away; None without a limit."""
        return self.job.left_s if self.job else None

    def __str__(self) -> str:
        """Return ` in SLURM job 7`, or the first host's address, ` (eth0, 10.0.0.1)`, or ''."""
        if self.job is not None:
            return f" in SLURM job {self.job.id}"
        if self.group is not None:
            return f" ({self.group.interfaces[self.hosts[0]]}, {self.address})"
        return ""


HERE = Allocation((socket.gethostname(),))


@dataclass(frozen=True)
class NodeRequest:
    """What a training asks for: nodes, each as `wanted`.

    An agent that hears nothing for `timeout_s` ends its ranks.
    """

    nodes: int
    launcher: str
    wanted: HostNeeds
    timeout_s: float
    start_timeout_s: float


@contextmanager
def allocated(
    request: NodeRequest, store: Store, environ: Mapping[str, str], say: Say
) -> Iterator[Allocation]:
    """Check the nodes of a training and keep them during the block.

    Raises ConfigError, HostLost and SLURM's errors.
    """
    nodes = request.nodes
    wanted = request.wanted
    source = "the training"
    is_job = can_start_tasks(environ)
    site = Site.load(environ)
    hosts = () if nodes == 1 or is_job else hosts_of(site)
    join = None if nodes == 1 or is_job or hosts else joining_hosts(environ)
    if problem := why_not_started(request.launcher, nodes, is_job, bool(hosts or join)):
        raise ConfigError(source, [problem])
    if join:
        with JoiningPort(join.port, read_secret(environ)) as listener:
            joined = listener.accept(nodes - 1, request.start_timeout_s, say)
        links = [connect(socket.gethostname(), ()), *_links_of(joined)]
        with of_links(links, wanted, request.timeout_s, store, site.interface) as allocation:
            yield allocation
    elif hosts:
        if len(hosts) < nodes:
            raise ConfigError(
                SOURCE,
                [f"cluster.nodes is {nodes}, and they are {len(hosts)}: name more, or lower it"],
            )
        with of_hosts(hosts[:nodes], wanted, request.timeout_s, store, site, say) as allocation:
            yield allocation
    else:
        job = SlurmJob.of(environ) if is_job else None
        yield HERE if job is None else of_job(job, nodes, source)


def _links_of(joined: Sequence[Joined]) -> Iterator[HostLink]:
    """Yield the links of joined hosts, named by address, and by node rank if two share one."""
    addresses = [one.address for one in joined]
    for one in joined:
        is_alone = addresses.count(one.address) == 1
        name = one.address if is_alone else f"{one.address} (node {one.node_rank})"
        yield HostLink(name, one.channel)


@contextmanager
def of_hosts(
    hosts: Sequence[Host], wanted: HostNeeds, timeout_s: float, store: Store, site: Site, say: Say
) -> Iterator[Allocation]:
    """Connect to `hosts`, check them, and keep them during the block. Raises as `of_links`."""
    if problems := [
        f"{host.name} has {host.slots} slots in the hostfile, and cluster.gpus_per_node is "
        f"{wanted.gpus_per_node}"
        for host in hosts
        if host.slots is not None and wanted.gpus_per_node > host.slots
    ]:
        raise ConfigError(SOURCE, problems)
    say(f"hosts: checking {', '.join(host.name for host in hosts)}")
    links = [connect(host.name, site.setup) for host in hosts]
    with of_links(links, wanted, timeout_s, store, site.interface) as allocation:
        yield allocation


@contextmanager
def of_links(
    links: Sequence[HostLink],
    wanted: HostNeeds,
    timeout_s: float,
    store: Store,
    interface: str | None,
) -> Iterator[Allocation]:
    """Check linked hosts and keep them during the block.

    Raises ConfigError with all problems, and HostLost.
    """
    runs = store.run_dir("x").parent
    with HostGroup(links, timeout_s).kept() as group:
        group.check([Path(folder).resolve() for folder in (store.root, runs)], wanted, interface)
        yield Allocation(group.hosts, group.addresses[group.hosts[0]], group=group)


def of_job(job: SlurmJob, nodes: int, source: str) -> Allocation:
    """Return the first `nodes` nodes of `job`, for `source`. Raises ConfigError if it has fewer."""
    hosts = node_names(job.fields["NodeList"])
    if len(hosts) < nodes:
        raise ConfigError(
            source, [f"cluster.nodes: {nodes}, and SLURM job {job.id} has {len(hosts)}: {hosts}"]
        )
    # The batch host is the first node, and the port that this process chooses is free there.
    first = job.fields["BatchHost"] if job.fields.get("BatchHost") in hosts else hosts[0]
    hosts = (first, *(name for name in hosts if name != first))[:nodes]
    return Allocation(hosts, node_address(first) if nodes > 1 else LOOPBACK, job)


def idle_gpus(cluster: Cluster) -> Iterator[Finding]:
    """Yield a warning if this machine has GPUs that `cluster` leaves idle or does not name.

    Not where the config says that it trains on CPUs.
    """
    says_cpus = not cluster.gpus_per_node and cluster.model_fields_set & {
        "gpus_per_node",
        "cpu_ranks",
    }
    if says_cpus or cluster.gpu is not None:
        return
    found = gpus_here()
    if not found:
        return
    name = found[0].name
    numbers = {"gpus": len(found)}
    has = f"this machine has {count(len(found), 'GPUs')} ({name})"
    if cluster.gpus_per_node:
        sentence = f"is not set, so the plan does not know the GPUs; {has}: set gpu: {name}"
        yield Finding("warning", "cluster.gpu", sentence, numbers)
    else:
        sentence = (
            f"{has}, and the training takes its CPUs: set cluster: {{gpus_per_node: {len(found)}, "
            f"gpu: {name}}}, or gpus_per_node: 0 if that is meant"
        )
        yield Finding("warning", "cluster.gpus_per_node", sentence, numbers)


def refuse_now(cluster: Cluster, store: Store, environ: Mapping[str, str], say: Say) -> None:
    """Check all hosts of a training before its data is prepared.

    Raises ConfigError if it cannot be started.
    """
    is_job = can_start_tasks(environ)
    if cluster.nodes == 1 or is_job:
        refuse_here(cluster, is_job)
        return
    if not hosts_of(Site.load(environ)) and joining_hosts(environ):
        read_secret(environ)  # the hosts join when the training begins, and are checked then
        return
    request = NodeRequest(
        cluster.nodes, cluster.launcher, HostNeeds.by(cluster), CHECK_TIMEOUT_S, CHECK_TIMEOUT_S
    )
    with allocated(request, store, environ, say) as found:
        addresses = found.group.addresses.items() if found.group else ()
        say(f"hosts: {', '.join(f'{host} ({address})' for host, address in addresses)} are ready")
