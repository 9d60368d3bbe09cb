"""The first host: it waits for the others to join, and refuses who does not know the secret."""

import secrets
import select
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Self

from pipeline_lib.core import units
from pipeline_lib.core.errors import CONTINUES, ConfigError, Interrupted
from pipeline_lib.hosts.channel import Channel
from pipeline_lib.hosts.handshake import (
    CLAIM,
    HANDSHAKE_S,
    PROOF,
    PROTOCOL,
    Signed,
    codec_of,
    derive,
    is_proof,
    open_channel,
    prepare,
    receive_fields,
    send_fields,
)
from pipeline_lib.hosts.join_settings import JOIN_PORT, SAY_EVERY_S, WHERE_SET, Say

MAX_HANDSHAKES = 64
_POLL_S = 0.1
_MAX_WARNED = 100  # addresses


@dataclass(frozen=True)
class Joined:
    """A host that has joined."""

    node_rank: int
    address: str
    channel: Channel


@dataclass(frozen=True)
class _Place:
    connection: socket.socket
    address: str
    codec: Signed

    def is_left(self) -> bool:
        """Whether the other side has closed the connection; what it sent stays to be read."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        return bool(poll.poll(0))


class JoiningPort:
    """The first host's port, a context manager: at its end the port closes, joined hosts stay."""

    def __init__(self, port: int, secret: bytes, address: str = "") -> None:
        """Listen at `port` of `address`, of all interfaces without one; port 0 takes a free one.

        Raises ConfigError.
        """
        self._secret, self._address = secret, address
        try:
            self._socket = _listen(address, port)
        except OSError as error:
            problem = (
                f"port {port} cannot be opened for the other hosts ({error.strerror}); "
                f"choose another {JOIN_PORT}"
            )
            raise ConfigError(WHERE_SET, [problem]) from error
        self._socket.settimeout(_POLL_S)
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Lock()  # of all below
        self._count = 0
        self._pending: dict[socket.socket, str] = {}
        self._places: dict[int, _Place] = {}
        self._is_over = False
        self._warned: set[str] = set()
        self._news: SimpleQueue[str] = SimpleQueue()

    def __enter__(self) -> Self:
        """Return the listener."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the port, and the connections to hosts that `accept` has not returned."""
        self._socket.close()
        with self._lock:
            self._is_over = True
            for place in self._places.values():
                place.connection.close()

    def accept(self, count: int, wait_s: float, say: Say) -> list[Joined]:
        """Return the `count` other hosts in the order of their ranks, 1 to `count`.

        Raises Interrupted after `wait_s`. A host that closes its connection while others are
        awaited loses its place.
        """
        start_s = said_s = time.monotonic()
        self._count = count
        hosts = units.count(count, "hosts")
        how = f"`qwen3 join {self._address or socket.gethostname()}:{self.port}`"
        say(f"waiting for {count} of {hosts} to join at port {self.port}; run {how} on each")
        while True:
            self._take_connection()
            with self._lock:
                self._forget_left()
                here = sorted(self._places.items())
                self._is_over = len(here) == count
            while not self._news.empty():
                say(self._news.get())
            if self._is_over:
                self._places = {}
                return [
                    Joined(rank, at.address, open_channel(at.connection, at.codec))
                    for rank, at in here
                ]
            now_s = time.monotonic()
            if now_s - start_s >= wait_s:
                names = ""
                if here:
                    places = [f"node {rank} from {place.address}" for rank, place in here]
                    names = f": {', '.join(places)}"
                raise Interrupted(
                    f"{len(here)} of {hosts} joined at port {self.port} within {wait_s:.0f} "
                    f"s{names}; run {how} on the others, and {CONTINUES}"
                )
            if now_s - said_s >= SAY_EVERY_S:
                said_s = now_s
                say(
                    f"waiting for {count - len(here)} of {hosts} to join at port {self.port}; run "
                    f"{how} on each"
                )

    def _take_connection(self) -> None:
        try:
            connection, peer = self._socket.accept()
        except TimeoutError:
            return
        except OSError:
            if self._socket.fileno() < 0:  # closed by another thread
                raise
            time.sleep(_POLL_S)  # the client has gone again, or this process has no descriptor left
            return
        address = peer[0].removeprefix("::ffff:")
        with self._lock:
            # the oldest of the address that has most of them must go
            if len(self._pending) >= MAX_HANDSHAKES:
                crowd = Counter(self._pending.values()).most_common(1)[0][0]
                of_crowd = [one for one, address in self._pending.items() if address == crowd]
                oldest = of_crowd[0]
                del self._pending[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # ends its thread, which closes it
            self._pending[connection] = address
        threading.Thread(target=self._welcome, args=(connection, address), daemon=True).start()

    def _welcome(self, connection: socket.socket, address: str) -> None:
        """Shake hands with one client; one that breaks the protocol is left without a word."""
        is_kept = False
        try:
            is_kept = self._shake_hands(connection, address)
        except (OSError, EOFError, ValueError):
            pass
        finally:
            with self._lock:
                self._pending.pop(connection, None)
            if not is_kept:
                connection.close()

    def _shake_hands(self, connection: socket.socket, address: str) -> bool:
        """Return whether the client has joined."""
        deadline_s = time.monotonic() + HANDSHAKE_S
        prepare(connection)
        claim = receive_fields(connection, deadline_s, CLAIM)
        nonce = secrets.token_hex(32)
        send_fields(connection, protocol=PROTOCOL, nonce=nonce)
        transcript = [claim["protocol"], claim["node_rank"], claim["nonce"], nonce]
        proof = receive_fields(connection, deadline_s, PROOF)["proof"]
        if not is_proof(proof, self._secret, "joiner proves", transcript):
            self._warn(address)
            return False
        codec = codec_of(self._secret, transcript, "first host", "joiner")
        with self._lock:
            self._forget_left()
            rank, refused = self._choose_rank(claim["node_rank"])
            answer = derive(self._secret, "first host proves", [*transcript, rank, refused]).hex()
            send_fields(connection, node_rank=rank, refused=refused, proof=answer)
            if rank is not None:
                # no flood of other clients can end it from here on
                self._pending.pop(connection, None)
                self._places[rank] = _Place(connection, address, codec)
                self._news.put(f"{address} joined as node {rank}")
        return rank is not None

    def _choose_rank(self, claimed: int | None) -> tuple[int | None, str]:
        """Return the rank of a host that claims one or takes any; or None and the reason."""
        free = [rank for rank in range(1, self._count + 1) if rank not in self._places]
        if self._is_over or not free:
            return None, "all hosts that the first host waits for have joined already"
        if claimed is None:
            return free[0], ""
        if claimed in self._places:
            return None, f"node rank {claimed} is taken by {self._places[claimed].address}"
        if claimed not in free:
            return (
                None,
                f"there is no node rank {claimed} to join with; expected 1 to {self._count}",
            )
        return claimed, ""

    def _warn(self, address: str) -> None:
        with self._lock:
            if address not in self._warned and len(self._warned) < _MAX_WARNED:
                self._warned.add(address)
                self._news.put(f"a client at {address} does not have the secret of this training")

    def _forget_left(self) -> None:
        for rank in [rank for rank, place in self._places.items() if place.is_left()]:
            left = self._places.pop(rank)
            left.connection.close()
            self._news.put(f"{left.address} closed its connection: node {rank} is free again")


def _listen(address: str, port: int) -> socket.socket:
    """Return a listening socket; without address one for IPv6 and IPv4, or only IPv4.

    The latter is for hosts without IPv6.
    """
    if address:
        family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(target[:2], family=family, backlog=128)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128
        )
    return socket.create_server(("", port), backlog=128)
