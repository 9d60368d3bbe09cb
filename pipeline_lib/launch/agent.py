"""The agent of one host: answers the checks, starts this host's ranks, and never leaves one behind.

It ends its ranks at once when its link closes, which is how the death of the training stage shows,
or when the link is silent for the training's timeout, which is how a cut network shows.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pipeline_lib.core.errors import CONTINUES, Interrupted, PipelineError
from pipeline_lib.core.processes import OWNER_VARIABLE, describe_owner
from pipeline_lib.hosts.channel import Channel, ChannelClosed
from pipeline_lib.hosts.facts import PACKAGE, facts_of_this_host
from pipeline_lib.launch.environment import (
    HOST_VARIABLE,
    INTERFACE_VARIABLES,
    NODE_VARIABLE,
    PLACE_IN_WORLD,
    free_port,
    is_sent,
)
from pipeline_lib.launch.outcome import peer_is_lost
from pipeline_lib.launch.place import HostOrder
from pipeline_lib.launch.ranks import (
    frozen_ranks_ended,
    ranks_asked_to_stop,
    run_launcher,
    stop_requests_received,
)

POLL_S = 0.2
FIRST_S = 120.0  # for the first question of who started this agent
CONNECT_S = 3.0  # for one address
GREETING = b"agent "
ABANDONED_S = 20.0  # for the ranks to end


class Agent:
    """One host's side of the link `channel`.

    `environ` is that of its ranks, before the order's own variables.
    """

    def __init__(
        self,
        channel: Channel,
        environ: Mapping[str, str],
        first_s: float,
        accepts: Callable[[str], bool],
    ) -> None:
        """Begin with no ranks, and wait `first_s` for the first message.

        Of the variables in an order, those are taken whose names `accepts` allows.
        """
        self._channel, self._environ, self._accepts = channel, environ, accepts
        self._exit_code: int | None = None
        self._timeout_s = first_s  # until the training says its own
        self._asked_to_stop = threading.Event()
        self._is_abandoned = threading.Event()
        self._signalled = threading.Event()
        self._listener: AgentListener | None = None
        self._work: threading.Thread | None = None

    def serve(self) -> int | None:
        """Obey messages until the link ends, then end the ranks; return their exit code if any."""
        try:
            while self._channel.silent_s < self._timeout_s:
                if (message := self._channel.receive(POLL_S)) is not None:
                    self._do(message)
                if self._signalled.is_set():
                    self._asked_to_stop.set()
                    if self._work is None or not self._work.is_alive():
                        break
        except ChannelClosed:
            pass
        self._end()
        return self._exit_code

    def _do(self, message: dict[str, Any]) -> None:
        what = message.get("do")
        if what == "facts":
            self._timeout_s = float(message["timeout_s"])
            folders = [Path(folder) for folder in message["folders"]]
            found = facts_of_this_host(folders, str(message["token"]), str(message["host"]))
            self._channel.send({"facts": found.to_json()})
        elif what == "listen":
            self._listener = AgentListener(str(message["token"]))
            self._channel.send({"listen": self._listener.port})
        elif what == "reach":
            reached = reach(message["targets"], str(message["token"]), float(message["within_s"]))
            self._channel.send({"reach": reached})
        elif what == "start":
            self._start(HostOrder.from_json(message, self._accepts))
        elif what == "stop":
            self._asked_to_stop.set()
        elif what == "end":
            self._end()
        elif what == "beat":
            self._channel.send({"beat": True})

    def _start(self, order: HostOrder) -> None:
        if self._listener is not None:  # its port is rank 0's from now on
            self._listener.close()
        self._asked_to_stop.clear()
        self._is_abandoned.clear()
        self._work = threading.Thread(target=self._run, args=(order,), daemon=True)
        self._work.start()

    def _run(self, order: HostOrder) -> None:
        """Run the launcher of this host's ranks, and say how it ended."""
        environ = {
            name: value for name, value in self._environ.items() if name not in PLACE_IN_WORLD
        }
        environ |= {**order.environ, NODE_VARIABLE: str(order.node_rank), HOST_VARIABLE: order.host}
        environ["PYTHONPATH"] = f"{PACKAGE.parent}:{environ.get('PYTHONPATH', '')}"
        environ[OWNER_VARIABLE] = describe_owner()
        # else it warns of every address without a name
        environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        for name in INTERFACE_VARIABLES:
            environ.setdefault(
                name, f"={order.interface}" if name.startswith("NCCL") else order.interface
            )
        try:
            command = order.command()

            def is_lost() -> bool:
                return peer_is_lost(order.run_dir, order.ranks)

            with (
                ranks_asked_to_stop(order.program.mark, self._asked_to_stop),
                frozen_ranks_ended(order.program.mark, is_lost),
            ):
                self._exit_code = run_launcher(
                    command,
                    environ,
                    order.program.mark,
                    self._is_abandoned.is_set,
                    give_up_s=0.0,
                    output=self._send_line,
                )
        except (PipelineError, OSError) as error:
            self._channel.send({"error": str(error)})
            return
        self._channel.send({"ended": self._exit_code})

    def _send_line(self, line: str) -> None:
        self._channel.send({"line": line})

    def _end(self) -> None:
        """End the ranks, if there are some, and wait until they are gone."""
        if self._listener is not None:
            self._listener.close()
        self._is_abandoned.set()
        if self._work is not None:
            self._work.join(ABANDONED_S)

    @property
    def is_signalled(self) -> bool:
        """Whether a signal asked this agent to stop."""
        return self._signalled.is_set()

    @contextmanager
    def signals_handled(self) -> Iterator[None]:
        """Ask the ranks to save and end at a signal to stop, such as that of a shutdown."""
        with stop_requests_received(self._signalled):
            # the end of the link says the same
            before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)


class AgentListener:
    """Listens on a free port, and greets whoever connects with the token, until it is closed."""

    def __init__(self, token: str) -> None:
        """Begin to listen on all addresses."""
        self.port = free_port()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._socket = socket.create_server(("", self.port), family=family, dualstack_ipv6=both)
        self._token = token
        threading.Thread(target=self._greet, daemon=True).start()

    def _greet(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                with connection, suppress(OSError):
                    connection.settimeout(CONNECT_S)
                    connection.sendall(GREETING + self._token.encode())

    def close(self) -> None:
        """Free the port."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def reach(targets: list[list[Any]], token: str, within_s: float) -> list[tuple[str, list[str]]]:
    """Return each host's addresses at which its agent answers.

    A host of `targets` is (name, addresses, port).
    """
    reached: dict[str, list[str]] = {host: [] for host, _, _ in targets}

    def try_one(host: str, address: str, port: int) -> None:
        with (
            suppress(OSError),
            socket.create_connection((address, port), timeout=CONNECT_S) as connection,
        ):
            connection.settimeout(CONNECT_S)
            wanted = GREETING + token.encode()
            if connection.recv(len(wanted), socket.MSG_WAITALL) == wanted:
                reached[host].append(address)

    tries = []
    for host, addresses, port in targets:
        for address in addresses:
            place = (host, address, int(port))
            tries.append(threading.Thread(target=try_one, args=place, daemon=True))
    for thread in tries:
        thread.start()
    for thread in tries:
        thread.join(within_s)
    return list(reached.items())


def serve_on_pipes(environ: Mapping[str, str]) -> int:
    """Serve the training stage that started this process by ssh; return the exit code."""
    # Only messages may be printed to the pipe: what any library prints goes to standard error.
    reader = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    writer = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    agent = Agent(Channel(reader, writer), environ, FIRST_S, accepts=lambda _: True)
    with agent.signals_handled():
        return agent.serve() or 0


def serve_by_joining(
    connect: Callable[[], Channel],
    environ: Mapping[str, str],
    wait_s: float,
    stays: bool,
    say: Callable[[str], None],
) -> None:
    """Join a training again and again until it is done, or for ever with `stays`.

    Raises Interrupted at a signal. After joining, this host waits `wait_s` for the others to join.
    """
    while True:
        agent = Agent(connect(), environ, wait_s, accepts=is_sent)
        with agent.signals_handled():
            exit_code = agent.serve()
        if agent.is_signalled:
            raise Interrupted(f"this host was asked to stop, and left the training; {CONTINUES}")
        if exit_code == 0 and not stays:
            say("the training is done")
            return
        what = "the training has not begun"
        if exit_code is not None:
            what = f"the ranks of this host ended with code {exit_code}"
        say(f"{what}; waiting for the first host to go on")
