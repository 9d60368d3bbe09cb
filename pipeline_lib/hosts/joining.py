"""How hosts join a training by themselves: the first host listens, and the others connect to it over TCP.

Both sides know a secret, which is never sent. Each side sends a fresh random nonce and proves that it knows the secret
by an HMAC-SHA256 over both nonces, the version of the protocol, the claimed node rank and its role. A recorded proof is
therefore useless later, and a proof that is sent back proves nothing. The joining host proves itself first: a client
without the secret gets nothing that depends on it. A program that reads the network, or that listens in place of the
first host, can test guesses against a proof. That is hopeless if the secret is random: it has at least 16 characters.

After that every line carries an HMAC over its number and its text, with a key for each direction, so that nobody can
change, repeat, leave out or reorder lines without being noticed. Nothing is encrypted: the settings of a training can
be read in the network. Credentials of the user are never sent.
"""

import hmac
import json
import os
import re
import secrets
import select
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from pipeline_lib.core import units
from pipeline_lib.core.errors import CONTINUES, ConfigError, Interrupted
from pipeline_lib.core.text import shortened
from pipeline_lib.hosts.channel import Channel, ChannelClosed

Say = Callable[[str], None]

# What the environment says.

SECRET, SECRET_FILE, JOIN_PORT = "PIPELINE_JOIN_SECRET", "PIPELINE_JOIN_SECRET_FILE", "PIPELINE_JOIN_PORT"  # noqa: S105
MIN_SECRET_CHARS = 16
_MAX_SECRET_BYTES = 4096
_HOW_TO_MAKE = (
    "make one with `(umask 077; head -c 24 /dev/urandom | base64 > join.secret)`, copy it to all hosts and set "
    f"{SECRET_FILE}=/path/of/join.secret there"
)
_SOURCE = "join"  # of a ConfigError; the name of a variable with a colon after it would be taken for a credential
_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<name>[^\s:/@\[\]]+)):(?P<port>[0-9]{1,5})")


def read_secret(environ: Mapping[str, str]) -> bytes:
    """Return the secret that all hosts of a training share; the file goes before the variable. Raises ConfigError."""
    path = environ.get(SECRET_FILE)
    if path:
        name, content = f"the file {path} of {SECRET_FILE}", _read_private(path)
    else:
        name, content = SECRET, environ.get(SECRET, "").encode("utf-8", "surrogateescape")
    text = content.decode("utf-8", "surrogateescape").strip()
    if not text:
        missing = "is empty" if path or SECRET in environ else f"is not set, nor is {SECRET_FILE}"
        raise ConfigError(_SOURCE, [f"{name} {missing}; {_HOW_TO_MAKE}"])
    if len(text) < MIN_SECRET_CHARS:
        problem = f"{name} has {len(text)} characters and needs at least {MIN_SECRET_CHARS}"
        raise ConfigError(_SOURCE, [f"{problem}; {_HOW_TO_MAKE}"])
    return text.encode("utf-8", "surrogateescape")


def _read_private(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_MAX_SECRET_BYTES + 1)
    except OSError as error:
        problem = f"{SECRET_FILE}={path} cannot be read ({error.strerror}); {_HOW_TO_MAKE}"
        raise ConfigError(_SOURCE, [problem]) from error
    if len(content) > _MAX_SECRET_BYTES:
        raise ConfigError(_SOURCE, [f"{SECRET_FILE}={path} has more than {_MAX_SECRET_BYTES} bytes; {_HOW_TO_MAKE}"])
    if content.strip() and mode & 0o077:
        problem = f"{SECRET_FILE}={path} can be used by other users (mode {mode:03o}); run `chmod 600 {path}`"
        raise ConfigError(_SOURCE, [problem])
    return content


@dataclass(frozen=True)
class FirstHost:
    """Where the first host listens, and the node rank of this host; None if the first host may choose it."""

    address: str
    port: int
    node_rank: int | None


@dataclass(frozen=True)
class JoinPort:
    """The port at which the first host waits for the others, and the variable that names it."""

    port: int
    variable: str


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT` or `[IPv6]:PORT`. Raises ConfigError."""
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match["port"]) <= 65535:
        problem = f"{shortened(text, 80)!r} is no address; expected HOST:PORT, as in gpu1:29400 or [fd00::1]:29400"
        raise ConfigError(_SOURCE, [problem])
    return match["v6"] or match["name"], int(match["port"])


def address_from(environ: Mapping[str, str]) -> FirstHost:
    """Return the first host that the platform names by MASTER_ADDR and its like. Raises ConfigError."""
    address = environ.get("MASTER_ADDR")
    if not address or not environ.get("MASTER_PORT"):
        problem = "no first host: give HOST:PORT, as in gpu1:29400, or set MASTER_ADDR and MASTER_PORT"
        raise ConfigError(_SOURCE, [problem])
    port = _number(environ, "MASTER_PORT", 1, 65535)
    return FirstHost(address, port or 0, node_rank_of(environ))


def joining_hosts(environ: Mapping[str, str]) -> JoinPort | None:
    """Return the port at which this host waits for others; None if nothing asks for that. Raises ConfigError.

    PIPELINE_JOIN_PORT asks for it, or a complete set of the variables that platforms set on each host. SLURM's tasks
    and torchrun's ranks have the same variables with another meaning: ask only outside of both.
    """
    nodes = _number(environ, "NNODES" if environ.get("NNODES") else "WORLD_SIZE", 1) or 1
    placed = nodes > 1 and bool(environ.get("MASTER_ADDR")) and bool(environ.get("MASTER_PORT"))
    rank = node_rank_of(environ) if placed else None
    if rank:
        problem = f"this is node {rank}: run `python -m pipeline_lib join` here; snakemake runs on node 0"
        raise ConfigError(_SOURCE, [problem])
    if port := _number(environ, JOIN_PORT, 1, 65535):
        return JoinPort(port, JOIN_PORT)
    if rank == 0 and (port := _number(environ, "MASTER_PORT", 1, 65535)):
        return JoinPort(port, "MASTER_PORT")
    return None


def node_rank_of(environ: Mapping[str, str]) -> int | None:
    """Return the node rank that the platform gives this host; None if it gives none. Raises ConfigError."""
    return _number(environ, "NODE_RANK" if environ.get("NODE_RANK") else "RANK", 0)


def _number(environ: Mapping[str, str], name: str, least: int, most: int = 1_000_000) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,7}", text) or not least <= int(text) <= most:
        raise ConfigError(_SOURCE, [f"{name}={shortened(text, 80)} is no whole number from {least} to {most}"])
    return int(text)


# What both sides send. A handshake is four lines of JSON, each with exactly the fields that are expected.

PROTOCOL = "qwen3-pipeline join 1"
HANDSHAKE_S = 5.0
_MAX_HANDSHAKE_BYTES = 1024
_Fields = Mapping[str, tuple[type, ...]]
_CLAIM: _Fields = {"protocol": (str,), "node_rank": (int, type(None)), "nonce": (str,)}
_HELLO: _Fields = {"protocol": (str,), "nonce": (str,)}
_PROOF: _Fields = {"proof": (str,)}
_ANSWER: _Fields = {"node_rank": (int, type(None)), "refused": (str,), "proof": (str,)}


def _derive(secret: bytes, label: str, transcript: list[Any]) -> bytes:
    return hmac.digest(secret, json.dumps([PROTOCOL, label, transcript]).encode(), "sha256")


def _is_proof(proof: str, secret: bytes, label: str, transcript: list[Any]) -> bool:
    return hmac.compare_digest(proof.encode(), _derive(secret, label, transcript).hex().encode())


class Signed:
    """A codec for a network that is not trusted. Each line is an HMAC over its number and its text, and the text."""

    def __init__(self, write_key: bytes, read_key: bytes) -> None:
        """Number the lines of each direction from 0."""
        self._write_key, self._read_key = write_key, read_key
        self._written = self._read = 0

    def encode(self, text: str) -> str:
        """Return the line that carries `text` as the next one."""
        line = f"{_line_mac(self._write_key, self._written, text)} {text}"
        self._written += 1
        return line

    def decode(self, line: str) -> str | None:
        """Return the text in `line`. Raise ChannelClosed if it is not exactly the next one that was sent."""
        mac, _, text = line.partition(" ")
        if not hmac.compare_digest(mac.encode(), _line_mac(self._read_key, self._read, text).encode()):
            raise ChannelClosed(
                f"a message was changed on the way, repeated or left out (line {self._read + 1} of this connection): "
                "something between the hosts interferes"
            )
        self._read += 1
        return text


def _line_mac(key: bytes, number: int, text: str) -> str:
    return hmac.digest(key, number.to_bytes(8, "big") + text.encode(), "sha256").hex()


def _codec(secret: bytes, transcript: list[Any], writes: str, reads: str) -> Signed:
    return Signed(_derive(secret, f"{writes} writes", transcript), _derive(secret, f"{reads} writes", transcript))


def _send(connection: socket.socket, **message: Any) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, deadline_s: float, fields: _Fields) -> dict[str, Any]:
    """Return the next line. Raises EOFError, OSError, and ValueError if it is not a message with these `fields`."""
    line = b""
    while not line.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:  # the time of all of it: a client may send a byte now and then
            raise TimeoutError("no answer")
        connection.settimeout(left_s)
        byte = connection.recv(1)  # what follows the line belongs to the channel
        if not byte:
            raise EOFError
        line += byte
        if len(line) > _MAX_HANDSHAKE_BYTES:
            raise ValueError("a line is too long")
    try:
        message = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(message, dict) or set(message) != set(fields):
        raise ValueError("not the fields that are expected")
    if any(type(message[name]) not in types for name, types in fields.items()):  # True is no node rank
        raise ValueError("a field of another type")
    if not re.fullmatch("[0-9a-f]{64}", message.get("nonce", "0" * 64)):
        raise ValueError("not a nonce")
    return message


def _prepare(connection: socket.socket) -> None:
    """Send small lines at once, and notice within a minute that the machine at the other end is off."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _open_channel(connection: socket.socket, codec: Signed) -> Channel:
    connection.settimeout(None)

    def hang_up() -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)  # the other side sees the end and hangs up as well
        connection.close()

    return Channel(connection.makefile("rb"), connection.makefile("wb"), codec, hang_up=hang_up)


# The first host.

MAX_HANDSHAKES = 64
SAY_EVERY_S = 60.0
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
        """Whether the other side has closed the connection; what it has sent before stays to be read."""
        poll = select.poll()
        poll.register(self.connection, select.POLLRDHUP)
        return bool(poll.poll(0))


class JoiningPort:
    """The port of the first host, to use as a context manager: at its end the port closes, joined hosts stay."""

    def __init__(self, port: int, secret: bytes, address: str = "") -> None:
        """Listen at `port` of `address`, of all interfaces without one; port 0 takes a free one. Raises ConfigError."""
        self._secret, self._address = secret, address
        try:
            self._socket = _listen(address, port)
        except OSError as error:
            problem = f"port {port} cannot be opened for the other hosts ({error.strerror}); choose another {JOIN_PORT}"
            raise ConfigError(_SOURCE, [problem]) from error
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
        """Return the `count` other hosts in the order of their ranks, 1 to `count`. Raises Interrupted after `wait_s`.

        A host that closes its connection while others are awaited loses its place.
        """
        start_s = said_s = time.monotonic()
        self._count = count
        hosts = units.count(count, "hosts")
        how = f"`python -m pipeline_lib join {self._address or socket.gethostname()}:{self.port}`"
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
                return [Joined(rank, at.address, _open_channel(at.connection, at.codec)) for rank, at in here]
            now_s = time.monotonic()
            if now_s - start_s >= wait_s:
                names = ": " + ", ".join(f"node {rank} from {place.address}" for rank, place in here) if here else ""
                raise Interrupted(
                    f"{len(here)} of {hosts} joined at port {self.port} within {wait_s:.0f} s{names}; "
                    f"run {how} on the others, and {CONTINUES}"
                )
            if now_s - said_s >= SAY_EVERY_S:
                said_s = now_s
                say(f"waiting for {count - len(here)} of {hosts} to join at port {self.port}; run {how} on each")

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
            if len(self._pending) >= MAX_HANDSHAKES:  # the oldest of the address that has most of them must go
                crowd = Counter(self._pending.values()).most_common(1)[0][0]
                oldest = next(one for one, its_address in self._pending.items() if its_address == crowd)
                del self._pending[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # ends its thread, which closes it
            self._pending[connection] = address
        threading.Thread(target=self._welcome, args=(connection, address), daemon=True).start()

    def _welcome(self, connection: socket.socket, address: str) -> None:
        """Shake hands with one client; whoever does not keep to the protocol is left without a word."""
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
        _prepare(connection)
        claim = _receive(connection, deadline_s, _CLAIM)
        nonce = secrets.token_hex(32)
        _send(connection, protocol=PROTOCOL, nonce=nonce)
        transcript = [claim["protocol"], claim["node_rank"], claim["nonce"], nonce]
        proof = _receive(connection, deadline_s, _PROOF)["proof"]
        if not _is_proof(proof, self._secret, "joiner proves", transcript):
            self._warn(address)
            return False
        codec = _codec(self._secret, transcript, "first host", "joiner")
        with self._lock:
            self._forget_left()
            rank, refused = self._choose_rank(claim["node_rank"])
            answer = _derive(self._secret, "first host proves", [*transcript, rank, refused]).hex()
            _send(connection, node_rank=rank, refused=refused, proof=answer)
            if rank is not None:
                self._pending.pop(connection, None)  # no flood of other clients can end it from here on
                self._places[rank] = _Place(connection, address, codec)
                self._news.put(f"{address} joined as node {rank}")
        return rank is not None

    def _choose_rank(self, claimed: int | None) -> tuple[int | None, str]:
        """Return the rank of a host that claims one, or may have any; or None and why it is refused."""
        free = [rank for rank in range(1, self._count + 1) if rank not in self._places]
        if self._is_over or not free:
            return None, "all hosts that the first host waits for have joined already"
        if claimed is None:
            return free[0], ""
        if claimed in self._places:
            return None, f"node rank {claimed} is taken by {self._places[claimed].address}"
        if claimed not in free:
            return None, f"there is no node rank {claimed} to join with; expected 1 to {self._count}"
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
    """Return a listening socket; without an address one for IPv6 and IPv4, or IPv4 alone where there is no IPv6."""
    if address:
        family, _, _, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(target[:2], family=family, backlog=128)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)
    return socket.create_server(("", port), backlog=128)


# The other hosts.

_RETRY_S = 1.0


def connect(address: str, port: int, secret: bytes, node_rank: int | None, wait_s: float, say: Say) -> Channel:
    """Join the training whose first host listens at `port` of `address`, as soon as it does.

    Raises Interrupted after `wait_s`, and ConfigError if the secrets differ or the first host refuses this one.
    """
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    start_s, said_s = time.monotonic(), -SAY_EVERY_S
    while True:
        try:
            with socket.create_connection((address, port), timeout=HANDSHAKE_S) as connection:
                rank, codec = _join(connection, where, secret, node_rank)
                say(f"joined {where} as node {rank}")
                return _open_channel(connection.dup(), codec)  # the block closes `connection`
        except OSError as error:
            reason = error.strerror or str(error)
        except (EOFError, ValueError):
            reason = "what listens there does not answer as a training of this project"
        now_s = time.monotonic()
        if now_s - start_s >= wait_s:
            raise Interrupted(
                f"nobody listens at {where} for {wait_s:.0f} s ({reason}); start the training on the first host "
                f"(`{JOIN_PORT}={port} snakemake ...`), and {CONTINUES}"
            )
        if now_s - start_s - said_s >= SAY_EVERY_S:
            said_s = now_s - start_s
            say(f"waiting for the first host at {where} ({reason})")
        time.sleep(min(_RETRY_S, max(0.0, start_s + wait_s - now_s)))


def _join(connection: socket.socket, where: str, secret: bytes, node_rank: int | None) -> tuple[int, Signed]:
    """Shake hands with the first host, and return the rank that it gives and the codec."""
    deadline_s = time.monotonic() + HANDSHAKE_S
    _prepare(connection)
    nonce = secrets.token_hex(32)
    _send(connection, protocol=PROTOCOL, node_rank=node_rank, nonce=nonce)
    hello = _receive(connection, deadline_s, _HELLO)
    if hello["protocol"] != PROTOCOL:
        problem = f"{where} runs another version of this project; use the same code on all hosts"
        raise ConfigError(_SOURCE, [problem])
    transcript = [PROTOCOL, node_rank, nonce, hello["nonce"]]
    _send(connection, proof=_derive(secret, "joiner proves", transcript).hex())
    differ = ConfigError(
        _SOURCE, [f"the secrets differ: set {SECRET_FILE} or {SECRET} to the same as on the first host ({where})"]
    )
    try:
        answer = _receive(connection, deadline_s, _ANSWER)
    except (EOFError, ConnectionError) as error:
        raise differ from error
    rank, refused = answer["node_rank"], answer["refused"]
    if not _is_proof(answer["proof"], secret, "first host proves", [*transcript, rank, refused]):
        raise differ
    if rank is None:
        raise ConfigError(_SOURCE, [f"{where} refuses this host: {shortened(refused, 200)}"])
    return rank, _codec(secret, transcript, "joiner", "first host")
