"""Examination of hosts without scheduler: a training's checks, then the tasks as on SLURM."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline_lib.config.schema import Cluster
from pipeline_lib.core.errors import Interrupted, PipelineError
from pipeline_lib.core.stage import Say
from pipeline_lib.core.store import Store
from pipeline_lib.core.text import redact
from pipeline_lib.core.units import count
from pipeline_lib.doctor.messages import MARK, Inbox
from pipeline_lib.doctor.nodes import ALL_S, ROUND_S, START_S, Findings
from pipeline_lib.hosts.checks import HostNeeds, token_in, unseen_answers
from pipeline_lib.hosts.facts import HostFacts
from pipeline_lib.hosts.group import Ended, HostGroup
from pipeline_lib.hosts.listing import Host
from pipeline_lib.launch.allocation import CHECK_TIMEOUT_S, Allocation, of_hosts
from pipeline_lib.launch.place import HostOrder, ProbeArguments, RankPlacement
from pipeline_lib.slurm.site import Site

KEPT_LINES = 6
_STACK = ("frame #", "<omitting python frames>")  # of torch's C++ below its errors


@dataclass(frozen=True)
class HostsExamination:
    """An examination of `hosts`, as `cluster` describes them, or else of shared GPUs or CPUs.

    Without `cluster`, it has the GPUs that all hosts have.
    """

    hosts: Sequence[Host]
    cluster: Cluster | None
    store: Store
    site: Site
    environ: Mapping[str, str]

    def findings(self, say: Say) -> Findings:
        """Check the hosts, and measure on them and between them.

        Raises ConfigError with all problems, Interrupted.
        """
        wanted = HostNeeds.by(self.cluster or Cluster(cpu_ranks=1))
        with of_hosts(
            self.hosts, wanted, CHECK_TIMEOUT_S, self.store, self.site, say
        ) as allocation:
            if (group := allocation.group) is None:
                raise PipelineError("doctor --hosts: there are no hosts")
            return self._measured(allocation, group, say)

    def _measured(self, allocation: Allocation, group: HostGroup, say: Say) -> Findings:
        place = place_of(self.cluster, group.facts, allocation)
        hosts = count(len(self.hosts), "hosts")
        ranks = count(place.ranks_per_node, "ranks")
        say(f"doctor: measures on {hosts}{allocation} with {ranks} each")
        found = Findings(len(self.hosts))
        inbox = Inbox()
        said = list[str]()

        def take(host: str, line: str) -> None:
            message = inbox.take(line)
            if message and (progress := found.take(message)):
                say(f"doctor: {progress}")
            if not line.startswith((MARK, *_STACK)) and line.strip():
                said.append(f"{host}: {redact(line.strip())}")
                del said[:-KEPT_LINES]

        folder = self.store.root.resolve()
        with token_in([folder]) as token:
            arguments = ProbeArguments(str(folder), token, place.device)
            order = HostOrder.common(place, self._environ(allocation, group), folder, arguments)
            within_s = START_S + ROUND_S * len(self.hosts) + ALL_S
            ended = group.run(order, take, threading.Event(), within_s)
            found.unseen = unseen_answers(folder, token, found.wrote())
        _add_ends(found, ended)
        found.said = said
        if not found.nodes:
            lines = ["the hosts told nothing of themselves:"]
            for host, texts in found.failures.items():
                lines += [f"{host}: {text}" for text in texts]
            raise Interrupted("\n  ".join(lines + said))
        return found

    def _environ(self, allocation: Allocation, group: HostGroup) -> dict[str, str]:
        rendezvous = {"MASTER_ADDR": allocation.address, "MASTER_PORT": str(group.port)}
        return {**self.environ, **rendezvous, "OMP_NUM_THREADS": "1"}


def place_of(
    cluster: Cluster | None, facts: Mapping[str, HostFacts], allocation: Allocation
) -> RankPlacement:
    """Return where the tasks run: as `cluster` says, else on all common GPUs, else one a host."""
    nodes = len(facts)
    wanted = cluster
    if wanted is None:
        common_gpus = min(len(found.gpus) for found in facts.values())
        wanted = Cluster(gpus_per_node=common_gpus, cpu_ranks=1)
    return RankPlacement(
        "spawn", nodes, wanted.ranks_per_node, wanted.cpus_per_rank, wanted.device, allocation
    )


def _add_ends(found: Findings, ended: Ended) -> None:
    """Put lost hosts before what others complain of; name the host whose tasks failed silently."""
    complaints = found.failures
    found.failures = {host: [reason] for host, reason in ended.lost.items()}
    for host, texts in complaints.items():
        found.failures.setdefault(host, []).extend(texts)
    if ended.exit_code and not ended.lost and not found.failures:
        found.fail(ended.host, f"its tasks ended with code {ended.exit_code}")
