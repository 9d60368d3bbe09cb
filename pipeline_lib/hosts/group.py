"""A training's hosts, each with an agent: check them, find addresses, run the ranks."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from operator import ne
from pathlib import Path
from typing import Any

from pipeline_lib.core.errors import CONTINUES, ConfigError, Interrupted
from pipeline_lib.core.processes import all_alive, snakemake_above
from pipeline_lib.hosts.channel import ChannelClosed
from pipeline_lib.hosts.checks import HostNeeds, problems_of_hosts, token_in, unseen_answers
from pipeline_lib.hosts.facts import HostFacts
from pipeline_lib.hosts.link import HostLink, HostLost

ANSWER_S = 45.0  # a cold file server loads Python slowly
REACH_S = 5.0  # for one host to try all addresses of all others
BEAT_S = 5.0
BEATS_OF_A_TIMEOUT = 4
LAST_WORDS_S = 10.0  # for ranks to report after another host has ended
ORPHAN_S = 1.0
LOOK_S = 0.1

Show = Callable[[str, str], None]  # of a host's name and a line


@dataclass(frozen=True)
class Ended:
    """How ranks ended: the first host that failed, its exit code, and the hosts that were lost."""

    host: str = ""
    exit_code: int = 0
    lost: dict[str, str] = field(default_factory=dict)


class HostGroup:
    """The linked hosts in the order of their node ranks.

    `facts`, `addresses` and `port` are known after `check`.
    """

    def __init__(self, links: Sequence[HostLink], timeout_s: float) -> None:
        """Take over `links`; after `timeout_s` of silence, an agent ends its ranks, as do we."""
        self.links = tuple(links)
        self.timeout_s = timeout_s
        self.facts: dict[str, HostFacts] = {}
        self.addresses: dict[str, str] = {}
        self.interfaces: dict[str, str] = {}
        self.port = 0

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names, in the order of node ranks."""
        return tuple(link.host for link in self.links)

    @property
    def has_joined(self) -> bool:
        """Whether a host joined by itself, over a connection that is signed and not encrypted."""
        return any(link.process is None for link in self.links)

    @contextmanager
    def kept(self) -> Iterator["HostGroup"]:
        """Keep the agents alive by heartbeats during the block, and end them after it."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(min(BEAT_S, self.timeout_s / BEATS_OF_A_TIMEOUT)):
                for link in self.links:
                    link.send("beat")

        pulse = threading.Thread(target=beat, daemon=True)
        pulse.start()
        try:
            yield self
        finally:
            over.set()
            pulse.join()
            closing = [threading.Thread(target=link.close) for link in self.links]
            for thread in closing:
                thread.start()
            for thread in closing:
                thread.join()

    def check(self, folders: Sequence[Path], wanted: HostNeeds, interface: str | None) -> None:
        """Check all hosts, and find the addresses between them.

        Raises ConfigError with all problems.
        """
        with token_in(folders) as token:
            facts, clocks, problems = self._facts([str(folder) for folder in folders], token)
            problems += problems_of_hosts(facts, clocks, wanted)
            for folder in folders:
                wrote = [
                    host
                    for host, found in facts.items()
                    if not found.folders.get(str(folder), "absent")
                ]
                for host in unseen_answers(folder, token, wrote):
                    problems.append(
                        f"{host}: what it writes to {folder} is not seen here: it is another "
                        "folder there"
                    )
        if len(facts) == len(self.links):
            problems += self._reach(facts, interface, token)
        if problems:
            raise ConfigError("the hosts", list(dict.fromkeys(problems)))
        self.facts = facts

    def _facts(
        self, folders: list[str], token: str
    ) -> tuple[dict[str, HostFacts], dict[str, float], list[str]]:
        """Ask all at once.

        Return the facts and the clocks' offsets, in seconds ahead, by host, and what went wrong.
        """
        asked_s = {link.host: time.time() for link in self.links}
        for link in self.links:
            link.send(
                "facts", folders=folders, token=token, host=link.host, timeout_s=self.timeout_s
            )
        facts: dict[str, HostFacts] = {}
        clocks: dict[str, float] = {}
        problems = []
        deadline_s = time.monotonic() + ANSWER_S
        for link in self.links:
            try:
                facts[link.host] = HostFacts.from_json(link.answer("facts", deadline_s))
            except HostLost as error:
                problems.append(str(error))
                continue
            except (TypeError, KeyError, ValueError):
                problems.append(
                    f"{link.host}: its agent is of another version of this project; bring the same "
                    "code"
                )
                continue
            clock_s = facts[link.host].clock_s
            # It was read between the question and the answer, which may be long after: starting
            # Python takes seconds.
            clocks[link.host] = min(0.0, clock_s - asked_s[link.host]) + max(
                0.0, clock_s - time.time()
            )
        return facts, clocks, problems

    def _reach(
        self, facts: Mapping[str, HostFacts], interface: str | None, token: str
    ) -> list[str]:
        """Let all hosts try each other's addresses; keep each one's first that all others reach."""
        candidates, problems = {}, []
        for link in self.links:
            found = facts[link.host].addresses
            if interface is not None and interface not in found:
                problems.append(
                    f"{link.host}: it has no interface {interface}; it has "
                    f"{', '.join(found) or 'none'}"
                )
            chosen = found if interface is None else {interface: found.get(interface, ())}
            every = [address for group in chosen.values() for address in group]
            candidates[link.host] = sorted(every, key=partial(ne, link.host))  # its name first
        if problems:
            return problems
        ports, reached = self._try_all(candidates, token)
        self.port = ports[self.links[0].host]
        if len(candidates) == 1 and not any(candidates.values()):  # a host alone, without a network
            self.addresses = dict.fromkeys(candidates, "127.0.0.1")
            self.interfaces = dict.fromkeys(candidates, "lo")
            return []
        for host, its in candidates.items():
            others = [other for other in self.hosts if other != host]
            common = [
                address
                for address in its
                if all(address in reached[other].get(host, ()) for other in others)
            ]
            if common:
                self.addresses[host] = common[0]
                self.interfaces[host] = next(
                    name for name, group in facts[host].addresses.items() if common[0] in group
                )
                continue
            deaf = [other for other in others if not reached[other].get(host)]
            problems.append(
                f"{host} is not reached from {' and '.join(deaf or others)} at "
                f"{', '.join(its) or 'any address'} (port {ports[host]}): open the TCP ports "
                "between the hosts in their firewalls, or name the interface that connects them "
                "(`interface` in the site file, or PIPELINE_INTERFACE)"
            )
        return problems

    def _try_all(
        self, candidates: Mapping[str, list[str]], token: str
    ) -> tuple[dict[str, int], dict[str, dict[str, list[str]]]]:
        """Return each host's port and the addresses it reached, by host, or raise HostLost."""
        for link in self.links:
            link.send("listen", token=token)
        deadline_s = time.monotonic() + ANSWER_S
        ports = {link.host: int(link.answer("listen", deadline_s)) for link in self.links}
        for link in self.links:
            targets = [
                (host, its, ports[host]) for host, its in candidates.items() if host != link.host
            ]
            link.send("reach", token=token, targets=targets, within_s=REACH_S)
        deadline_s = time.monotonic() + ANSWER_S + REACH_S
        reached = {link.host: dict(link.answer("reach", deadline_s)) for link in self.links}
        return ports, reached

    def run(
        self,
        order: Mapping[str, Any],
        show: Show,
        asked_to_stop: threading.Event,
        stop_in_s: float | None,
    ) -> Ended:
        """Start all hosts' ranks by `order` and await their end; `show` gets each printed line.

        Once `asked_to_stop`, the ranks save and end. When one host has failed or is lost, the
        others get LAST_WORDS_S. Raises Interrupted when the Snakemake that started this process is
        gone; leaving `kept` then ends all ranks.
        """
        owners = snakemake_above()
        owned_s = time.monotonic()
        for rank, link in enumerate(self.links):
            own = {"node_rank": rank, "interface": self.interfaces[link.host], "host": link.host}
            link.send("start", **order, **own)
        running = list(self.links)
        first = Ended()
        lost = dict[str, str]()
        began_s = time.monotonic()
        ending_s = None
        has_asked = False
        while running:
            for link in list(running):
                try:
                    code = self._poll(link, show)
                except HostLost as error:
                    lost[link.host] = error.reason
                    running.remove(link)
                    continue
                if code is not None:
                    running.remove(link)
                    if code and not first.exit_code:
                        first = Ended(link.host, code)
            is_due = stop_in_s is not None and time.monotonic() - began_s > stop_in_s
            if not has_asked and (asked_to_stop.is_set() or is_due):
                has_asked = True
                for link in running:
                    link.send("stop")
            if ending_s is None and (lost or (first.exit_code and not has_asked)):
                ending_s = time.monotonic() + LAST_WORDS_S
            if ending_s is not None and time.monotonic() > ending_s:
                for link in running:
                    link.send("end")
                ending_s = float("inf")
            # A signal that ends snakemake comes here too, perhaps a moment later.
            if asked_to_stop.is_set() or all_alive(owners):
                owned_s = time.monotonic()
            if time.monotonic() - owned_s > ORPHAN_S:
                what = "the snakemake of this training has ended, and its ranks on all hosts too"
                raise Interrupted(f"{what}; {CONTINUES}")
            time.sleep(LOOK_S)
        return Ended(first.host, first.exit_code, lost)

    def _poll(self, link: HostLink, show: Show) -> int | None:
        """Hand on what the host's ranks print; return the launcher's exit code once it has ended.

        Raises HostLost.
        """
        try:
            while (message := link.channel.receive(0)) is not None:
                if "line" in message:
                    show(link.host, str(message["line"]))
                if "ended" in message:
                    return int(message["ended"])
                if "error" in message:
                    raise HostLost(link.host, str(message["error"]))
        except ChannelClosed as error:
            raise HostLost(link.host, link.why_ended(str(error))) from error
        if (silent_s := link.channel.silent_s) > self.timeout_s:
            raise HostLost(
                link.host,
                f"it has not answered for {silent_s:.0f} s: look at its power and its network",
            )
        return None
