"""A training's hosts, each with an agent: check them, find addresses, run the ranks."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
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


@dataclass
class Ended:
    """How ranks ended: the first host that failed, its exit code, and the hosts that were lost."""

    host: str = ""
    exit_code: int = 0
    lost: dict[str, str] = field(default_factory=dict)


def _send_all(links: Iterable[HostLink], order: str) -> None:
    for link in links:
        link.send(order)


def _reached_by_all(addresses: Sequence[str], reached: Iterable[Sequence[str]]) -> str | None:
    """Return the first of a host's `addresses` that every other host reached, if there is one."""
    for address in addresses:
        if all(address in of_one for of_one in reached):
            return address
    return None


def _not_reached(
    host: str, addresses: Sequence[str], port: int, reached_from: Mapping[str, Sequence[str]]
) -> str:
    """Return the problem of a host without an address that all others reach."""
    deaf = [other for other, reached in reached_from.items() if not reached]
    return (
        f"{host} is not reached from {' and '.join(deaf or reached_from)} at "
        f"{', '.join(addresses) or 'any address'} (port {port}): open the TCP ports between the "
        "hosts in their firewalls, or name the interface that connects them (`interface` in the "
        "site file, or PIPELINE_INTERFACE)"
    )


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
                key = str(folder)
                wrote = [host for host, its in facts.items() if its.folders.get(key) == ""]
                for host in unseen_answers(folder, token, wrote):
                    text = f"{host}: what it writes to {folder} is not seen here"
                    problems.append(f"{text}: it is another folder there")
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
                text = f"{link.host}: its agent is of another version of this project"
                problems.append(f"{text}; bring the same code")
                continue
            clock_s = facts[link.host].clock_s
            # It was read between the question and the answer, which may be long after: starting
            # Python takes seconds.
            behind_s = min(0.0, clock_s - asked_s[link.host])
            ahead_s = max(0.0, clock_s - time.time())
            clocks[link.host] = behind_s + ahead_s
        return facts, clocks, problems

    def _reach(
        self, facts: Mapping[str, HostFacts], interface: str | None, token: str
    ) -> list[str]:
        """Let all hosts try each other's addresses; keep each one's first that all others reach."""
        candidates = {}
        problems = []
        for link in self.links:
            found = facts[link.host].addresses
            if interface is not None:
                if interface not in found:
                    text = f"{link.host}: it has no interface {interface}"
                    problems.append(f"{text}; it has {', '.join(found) or 'none'}")
                found = {interface: found.get(interface, ())}
            every = list(chain.from_iterable(found.values()))
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
            reached_from = {other: reached[other].get(host, []) for other in self.hosts}
            del reached_from[host]
            address = _reached_by_all(its, reached_from.values())
            if address is None:
                problems.append(_not_reached(host, its, ports[host], reached_from))
                continue
            self.addresses[host] = address
            for name, addresses in facts[host].addresses.items():
                if address in addresses:
                    self.interfaces[host] = name
                    break
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
            targets = []
            for host, its in candidates.items():
                if host != link.host:
                    targets.append((host, its, ports[host]))
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
        ended = Ended()
        began_s = time.monotonic()
        ending_s = None
        has_asked = False
        while running:
            for link in list(running):
                if self._has_ended(link, ended, show):
                    running.remove(link)
            is_due = stop_in_s is not None and time.monotonic() - began_s > stop_in_s
            if not has_asked and (asked_to_stop.is_set() or is_due):
                has_asked = True
                _send_all(running, "stop")
            has_failed = bool(ended.exit_code) and not has_asked
            if ending_s is None and (ended.lost or has_failed):
                ending_s = time.monotonic() + LAST_WORDS_S
            if ending_s is not None and time.monotonic() > ending_s:
                _send_all(running, "end")
                ending_s = math.inf
            # A signal that ends snakemake comes here too, perhaps a moment later.
            if asked_to_stop.is_set() or all_alive(owners):
                owned_s = time.monotonic()
            if time.monotonic() - owned_s > ORPHAN_S:
                what = "the snakemake of this training has ended, and its ranks on all hosts too"
                raise Interrupted(f"{what}; {CONTINUES}")
            time.sleep(LOOK_S)
        return ended

    def _has_ended(self, link: HostLink, ended: Ended, show: Show) -> bool:
        """Return whether the host's ranks have ended or it is lost, and note in `ended` how."""
        try:
            code = self._poll(link, show)
        except HostLost as error:
            ended.lost[link.host] = error.reason
            return True
        if code and not ended.exit_code:
            ended.host = link.host
            ended.exit_code = code
        return code is not None

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
        silent_s = link.channel.silent_s
        if silent_s > self.timeout_s:
            text = f"it has not answered for {silent_s:.0f} s: look at its power and its network"
            raise HostLost(link.host, text)
        return None
