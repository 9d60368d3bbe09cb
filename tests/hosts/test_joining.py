import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep

import pytest

from pipeline_lib.core.errors import ConfigError, Interrupted
from pipeline_lib.core.text import redact
from pipeline_lib.hosts import first_host as listening
from pipeline_lib.hosts import handshake, joining
from pipeline_lib.hosts.channel import Channel, ChannelClosed
from pipeline_lib.hosts.first_host import Joined, JoiningPort
from pipeline_lib.hosts.handshake import Signed
from pipeline_lib.hosts.join_settings import (
    FirstHost,
    JoinPort,
    address_from,
    joining_hosts,
    parse_address,
    read_secret,
)
from pipeline_lib.hosts.joining import connect
from tests.processes import wait_for

HERE = "127.0.0.1"
SECRET = b"correct horse battery"
OTHER = b"wrong horse, no battery"
WAIT_S = 30.0
Lines = list[bytes]


def silent(text: str) -> None:
    """Say nothing."""


class FirstHostOfTest:
    """A listener that waits for hosts in a thread, and what it has said."""

    def __init__(
        self, pool: ThreadPoolExecutor, listener: JoiningPort, count: int, wait_s: float
    ) -> None:
        """Begin to wait."""
        self.port, self.said = listener.port, list[str]()
        self.accepting: Future[list[Joined]] = pool.submit(
            listener.accept, count, wait_s, self.said.append
        )

    def joined(self) -> list[Joined]:
        return self.accepting.result(WAIT_S)

    def channels(self) -> list[Channel]:
        return [host.channel for host in self.joined()]

    def wait_until(self, text: str) -> None:
        wait_for(lambda: any(text in line for line in self.said), f"{text!r} in {self.said}")


@contextmanager
def first_host(count: int = 1, wait_s: float = WAIT_S) -> Iterator[FirstHostOfTest]:
    with ThreadPoolExecutor(1) as pool, JoiningPort(0, SECRET, HERE) as listener:
        yield FirstHostOfTest(pool, listener, count, wait_s)


def join(
    port: int, rank: int | None = None, secret: bytes = SECRET, say: Callable[[str], None] = silent
) -> Channel:
    return connect(HERE, port, secret, rank, WAIT_S, say)


def expect_refusal_of(pretend: Callable[[socket.socket], None], match: str) -> None:
    """Join a first host that `pretend` plays at a listening socket: it ends in ConfigError."""
    with socket.create_server((HERE, 0)) as server, ThreadPoolExecutor(1) as pool:
        pretending = pool.submit(pretend, server)
        with pytest.raises(ConfigError, match=match):
            join(server.getsockname()[1])
        pretending.result(WAIT_S)


class Client:
    """A client that speaks in raw lines."""

    def __init__(self, port: int) -> None:
        """Connect."""
        self.socket = socket.create_connection((HERE, port), timeout=WAIT_S)
        self._file = self.socket.makefile("rb")

    def send(self, line: bytes) -> None:
        self.socket.sendall(line)

    def read(self) -> bytes:
        """The next line; nothing at the end, orderly or not."""
        try:
            return self._file.readline()
        except ConnectionError:
            return b""

    def close(self) -> None:
        self._file.close()
        self.socket.close()


@contextmanager
def client(port: int) -> Iterator[Client]:
    made = Client(port)
    try:
        yield made
    finally:
        made.close()


def claim(node_rank: object = None, nonce: str = "a" * 64, **more: object) -> bytes:
    return (
        json.dumps(
            {"protocol": handshake.PROTOCOL, "node_rank": node_rank, "nonce": nonce, **more}
        ).encode()
        + b"\n"
    )


class Between:
    """Someone in the network between the hosts, who reads all lines and may pass on others."""

    def __init__(
        self, target_port: int, change: Callable[[bool, int, bytes], Lines] | None = None
    ) -> None:
        """Listen; `change` gets if a line is the joining host's, its number and the line."""
        self._server = socket.create_server((HERE, 0))
        self.port: int = self._server.getsockname()[1]
        self.lines: dict[bool, list[bytes]] = {True: [], False: []}
        self._target_port, self._change = target_port, change
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _serve(self) -> None:
        with suppress(OSError):
            near = self._server.accept()[0]
            far = socket.create_connection((HERE, self._target_port))
            for source, sink, is_joiner in ((near, far, True), (far, near, False)):
                threading.Thread(
                    target=self._pass_on, args=(source, sink, is_joiner), daemon=True
                ).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, is_joiner: bool) -> None:
        with suppress(OSError), source.makefile("rb") as file:
            for number, line in enumerate(file):
                self.lines[is_joiner].append(line)
                for passed in (
                    [line] if self._change is None else self._change(is_joiner, number, line)
                ):
                    sink.sendall(passed)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def end_of(channel: Channel) -> str:
    with pytest.raises(ChannelClosed) as end:
        while channel.receive(WAIT_S) is not None:
            pass
    return str(end.value)


# Hosts join.


def test_two_hosts_join_and_talk_in_both_directions() -> None:
    said: list[str] = []
    with first_host(2) as first, ThreadPoolExecutor(2) as pool:
        theirs = [pool.submit(join, first.port, rank, SECRET, said.append) for rank in (2, 1)]
        hosts = first.joined()
        channels = [future.result(WAIT_S) for future in theirs]

    assert [(host.node_rank, host.address) for host in hosts] == [(1, HERE), (2, HERE)]
    for number in range(50):  # the port is closed by now
        for host in hosts:
            host.channel.send({"to": host.node_rank, "number": number})
        for rank, channel in zip((2, 1), channels, strict=True):
            assert channel.receive(WAIT_S) == {"to": rank, "number": number}
            channel.send({"from": rank, "text": "naïve ☃ \n"})
        for host in hosts:
            assert host.channel.receive(WAIT_S) == {"from": host.node_rank, "text": "naïve ☃ \n"}
    for channel in channels:
        channel.close()
    assert [end_of(host.channel) for host in hosts] == ["it closed the connection"] * 2
    for host in hosts:
        host.channel.close()
    assert [end_of(channel) for channel in channels] == ["it closed the connection"] * 2
    assert {f"joined {HERE}:{first.port} as node {rank}" for rank in (1, 2)} <= set(said)
    assert first.said[0] == (
        f"waiting for 2 of 2 hosts to join at port {first.port}; "
        f"run `qwen3 join {HERE}:{first.port}` on each"
    )


def test_hosts_in_processes_of_their_own_join() -> None:
    code = """
import sys
from pipeline_lib.hosts.join_settings import read_secret
from pipeline_lib.hosts.joining import connect
channel = connect("127.0.0.1", int(sys.argv[1]), read_secret({"PIPELINE_JOIN_SECRET": sys.argv[2]}), None, 30.0, print)
channel.send({"answer": channel.receive(30.0)})
channel.close()
"""
    with first_host(2) as first:
        command = [sys.executable, "-c", code, str(first.port), SECRET.decode()]
        processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        hosts = first.joined()
        for host in hosts:
            host.channel.send({"rank": host.node_rank})
        for host in hosts:
            assert host.channel.receive(WAIT_S) == {"answer": {"rank": host.node_rank}}
            assert end_of(host.channel) == "it closed the connection"
            host.channel.close()
        printed = sorted(process.communicate(timeout=WAIT_S)[0] for process in processes)
    assert printed == [f"joined {HERE}:{first.port} as node {rank}\n" for rank in (1, 2)]
    assert [process.returncode for process in processes] == [0, 0]


def test_a_host_without_a_rank_gets_the_first_free_one() -> None:
    with first_host(3) as first:
        held = [join(first.port, 2), join(first.port), join(first.port)]
        hosts = first.joined()
        for host in hosts:
            host.channel.send({"rank": host.node_rank})

        assert [channel.receive(WAIT_S) for channel in held] == [
            {"rank": rank} for rank in (2, 1, 3)
        ]


def test_a_host_waits_for_the_first_host_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_RETRY_S", 0.05)
    with socket.create_server((HERE, 0)) as probe:
        port = probe.getsockname()[1]
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        future = pool.submit(join, port, None, SECRET, said.append)
        wait_for(lambda: bool(said), "the first line")
        with JoiningPort(port, SECRET, HERE) as listener:
            (host,) = listener.accept(1, WAIT_S, silent)
        host.channel.send({"hello": 1})
        assert future.result(WAIT_S).receive(WAIT_S) == {"hello": 1}
    assert said == [
        f"waiting for the first host at {HERE}:{port} (Connection refused)",
        f"joined {HERE}:{port} as node 1",
    ]


def test_both_ends_send_at_once_and_notice_a_machine_that_is_off() -> None:
    with first_host(1) as first:
        joiner = join(first.port)
        (host,) = first.joined()
        for channel in (joiner, host.channel):
            with socket.socket(fileno=os.dup(channel._reader.fileno())) as connection:
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) <= 60


def test_all_interfaces_listen_for_both_families() -> None:
    with ThreadPoolExecutor(1) as pool, JoiningPort(0, SECRET) as listener:
        first = FirstHostOfTest(pool, listener, 2, WAIT_S)
        addresses = (
            ["127.0.0.1", "::1"] if socket.has_dualstack_ipv6() else ["127.0.0.1", "127.0.0.2"]
        )
        held = [connect(address, first.port, SECRET, None, WAIT_S, silent) for address in addresses]
        assert [host.address for host in first.joined()] == addresses
        assert socket.gethostname() in first.said[0]
        del held


def test_a_port_in_use_is_named() -> None:
    with (
        JoiningPort(0, SECRET, HERE) as other,
        pytest.raises(ConfigError, match=f"port {other.port} cannot be opened"),
    ):
        JoiningPort(other.port, SECRET, HERE)


# Hosts that are missing, leave or are refused.


def test_nobody_listens() -> None:
    with socket.create_server((HERE, 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(
        Interrupted,
        match=f"nobody listens at {HERE}:{port} for 0 s .Connection refused.*JOIN_PORT={port}",
    ):
        connect(HERE, port, SECRET, None, 0.3, silent)


def test_who_has_joined_and_how_the_others_join_is_said_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "SAY_EVERY_S", 0.5)
    with first_host(3, wait_s=1.5) as first:
        channel = join(first.port, 2)
        with pytest.raises(Interrupted) as end:
            first.joined()
    command = f"`qwen3 join {HERE}:{first.port}`"
    assert (
        f"1 of 3 hosts joined at port {first.port} within 2 s: node 2 from {HERE}; run {command}"
        in str(end.value)
    )
    assert (
        f"waiting for 2 of 3 hosts to join at port {first.port}; run {command} on each"
        in first.said
    )
    assert end_of(channel), "who has joined in vain learns of the end"


@pytest.mark.parametrize("has_sent", [False, True])
def test_a_host_that_leaves_frees_its_place(has_sent: bool) -> None:
    with first_host(2) as first:
        leaving = join(first.port, 1)
        if has_sent:
            leaving.send({"early": "message"})
        leaving.close()
        first.wait_until("node 1 is free again")
        held = [join(first.port, 1), join(first.port, 2)]
        hosts = first.joined()
        hosts[0].channel.send({"rank": 1})

        assert held[0].receive(WAIT_S) == {"rank": 1}
        assert held[1].receive(0.1) is None


def test_what_a_host_sends_while_others_are_awaited_is_kept() -> None:
    with first_host(2) as first:
        early = join(first.port, 1)
        early.send({"early": "message"})
        late = join(first.port, 2)

        assert first.channels()[0].receive(WAIT_S) == {"early": "message"}
        assert late.receive(0.1) is None


@pytest.mark.parametrize(
    ("rank", "reason"),
    [
        (1, f"node rank 1 is taken by {HERE}"),
        (0, "there is no node rank 0 to join with; expected 1 to 2"),
        (3, "there is no node rank 3 to join with; expected 1 to 2"),
        (-1, "there is no node rank -1"),
        (10**300, "there is no node rank 1000"),
    ],
)
def test_a_rank_that_cannot_be_is_refused_with_the_reason(rank: int, reason: str) -> None:
    with first_host(2) as first:
        held = [join(first.port, 1)]
        with pytest.raises(ConfigError) as refusal:
            join(first.port, rank)
        assert reason in str(refusal.value)
        held.append(join(first.port, 2))
        assert len(first.joined()) == 2


def test_one_host_too_many_is_told_so() -> None:
    """Its handshake begins while a host is awaited, and ends when all are there."""
    with first_host(1) as first, client(first.port) as late:
        late.send(claim())
        transcript = [handshake.PROTOCOL, None, "a" * 64, json.loads(late.read())["nonce"]]
        held = join(first.port)
        first.joined()
        late.send(
            json.dumps(
                {"proof": handshake.derive(SECRET, "joiner proves", transcript).hex()}
            ).encode()
            + b"\n"
        )
        answer = json.loads(late.read())

        assert answer["node_rank"] is None
        assert answer["refused"] == "all hosts that the first host waits for have joined already"
        assert late.read() == b""
        held.close()


def test_wrong_secrets_fail_at_once_and_are_reported_once() -> None:
    with first_host(1) as first:
        for _ in range(3):
            begin_s = monotonic()
            with pytest.raises(ConfigError) as refusal:
                join(first.port, None, OTHER)
            assert monotonic() - begin_s < 3.0
            assert (
                "the secrets differ: set PIPELINE_JOIN_SECRET_FILE or PIPELINE_JOIN_SECRET"
                in str(refusal.value)
            )
            assert OTHER.decode() not in str(refusal.value)
        held = join(first.port)
        first.joined()
    warnings = [line for line in first.said if "secret" in line]
    assert warnings == [f"a client at {HERE} does not have the secret of this training"]
    assert not any(secret.decode() in line for secret in (SECRET, OTHER) for line in first.said)
    held.close()


def test_a_first_host_without_the_secret_is_not_believed() -> None:
    """It answers whatever it likes, also with the proof of the joining host sent back."""

    def pretend(server: socket.socket) -> None:
        connection = server.accept()[0]
        with connection, connection.makefile("rb") as file:
            file.readline()
            connection.sendall(
                json.dumps({"protocol": handshake.PROTOCOL, "nonce": "b" * 64}).encode() + b"\n"
            )
            proof = json.loads(file.readline())["proof"]
            connection.sendall(
                json.dumps({"node_rank": 1, "refused": "", "proof": proof}).encode() + b"\n"
            )
            file.readline()

    expect_refusal_of(pretend, "the secrets differ")


def test_another_version_is_named() -> None:
    def answer(server: socket.socket) -> None:
        connection = server.accept()[0]
        with connection:
            connection.recv(1000)
            connection.sendall(
                json.dumps({"protocol": "qwen3-pipeline join 2", "nonce": "b" * 64}).encode()
                + b"\n"
            )
            connection.recv(1000)

    expect_refusal_of(answer, "runs another version of this project")


def test_a_service_of_another_kind_is_told_from_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_RETRY_S", 0.05)

    def serve(server: socket.socket) -> None:
        with suppress(OSError):
            while True:
                with server.accept()[0] as connection:
                    connection.recv(1000)
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with socket.create_server((HERE, 0)) as server:
        threading.Thread(target=serve, args=(server,), daemon=True).start()
        with pytest.raises(
            Interrupted, match="what listens there does not answer as a training of this project"
        ):
            connect(HERE, server.getsockname()[1], SECRET, None, 0.3, silent)
        server.shutdown(socket.SHUT_RDWR)


# Attacks on the handshake.


@pytest.mark.parametrize(
    "content",
    [
        b"GET / HTTP/1.1\r\nHost: gpu1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00" + bytes(600) + b"\n",
        b"\x80\x04\x95.\n",  # a pickle
        b"x" * 100_000,
        b"[" * 1000 + b"\n",
        b"\n",
        b"null\n",
        b'{"protocol": "' + handshake.PROTOCOL.encode() + b'"}\n',
        claim(True),
        claim(1.0),
        claim("1"),
        claim([1]),
        claim(nonce="A" * 64),
        claim(nonce="a" * 63),
        claim(nonce="a" * 64 + "\n"),
        claim(extra=1),
        b'{"protocol": 1, "node_rank": null, "nonce": null}\n',
    ],
)
def test_garbage_is_refused_without_a_word(content: bytes) -> None:
    with first_host(1) as first:
        with client(first.port) as stranger:
            with suppress(ConnectionError):
                stranger.send(content)
            begin_s = monotonic()
            assert stranger.read() == b""
            assert monotonic() - begin_s < handshake.HANDSHAKE_S / 2, "it was heard out"
        held = join(first.port)
        first.joined()
    assert not any("secret" in line for line in first.said)
    held.close()


@pytest.mark.parametrize("proof", ["", "0" * 64, "é", "x" * 900])
def test_a_forged_proof_is_refused_without_a_word(proof: str) -> None:
    with first_host(1) as first:
        with client(first.port) as stranger:
            stranger.send(claim())
            hello = json.loads(stranger.read())
            assert set(hello) == {"protocol", "nonce"}
            stranger.send(json.dumps({"proof": proof}).encode() + b"\n")
            assert stranger.read() == b""
        first.wait_until("does not have the secret")
        held = join(first.port)
        first.joined()
        held.close()


def recorded_session() -> dict[bool, list[bytes]]:
    """All lines of a good session, as a listener reads them; True for the joining host's."""
    with first_host(1) as first, ExitStack() as stack:
        between = Between(first.port)
        stack.callback(between.close)
        joiner = join(between.port)
        (host,) = first.joined()
        joiner.send({"recorded": 1})
        assert host.channel.receive(WAIT_S) == {"recorded": 1}
        host.channel.close()
        joiner.close()
        return between.lines


def test_the_secret_is_never_on_the_wire() -> None:
    lines = recorded_session()
    wire = b"".join([*lines[True], *lines[False]])

    assert len(lines[True]) == 3
    assert b'{"recorded": 1}' in wire, "the recording misses what was sent"
    assert not any(word in wire for word in [SECRET, *SECRET.split()])


def test_a_recorded_session_is_worth_nothing() -> None:
    lines = recorded_session()
    with first_host(1) as first:
        with client(first.port) as thief:
            thief.send(b"".join(lines[True]))
            assert thief.read() != lines[False][0], "a nonce was used twice"
            assert thief.read() == b""
        first.wait_until("does not have the secret")
        held = join(first.port)
        first.joined()
        held.close()


def test_a_recorded_first_host_is_not_believed() -> None:
    lines = recorded_session()

    def replay(server: socket.socket) -> None:
        connection = server.accept()[0]
        with connection:
            connection.sendall(b"".join(lines[False]))
            with suppress(OSError):
                connection.recv(10_000)
                connection.recv(10_000)

    expect_refusal_of(replay, "the secrets differ")


def test_answers_of_the_first_host_sent_back_to_it_prove_nothing() -> None:
    """The nonce of one connection becomes the claim of another, and each proof is sent back."""
    with first_host(2) as first, client(first.port) as one, client(first.port) as two:
        one.send(claim())
        two.send(claim(nonce=json.loads(one.read())["nonce"]))
        one.send(two.read())
        assert one.read() == b""
    assert not any("joined" in line for line in first.said)


@pytest.mark.parametrize("line_number", [0, 1])
@pytest.mark.parametrize("is_joiner", [True, False])
def test_a_handshake_that_is_changed_on_the_way_fails(is_joiner: bool, line_number: int) -> None:
    """In each line another field changes: the claimed rank, a nonce, the proof, the given rank."""
    fields = {
        (True, 0): "node_rank",
        (False, 0): "nonce",
        (True, 1): "proof",
        (False, 1): "node_rank",
    }

    def change(from_joiner: bool, number: int, line: bytes) -> Lines:
        if (from_joiner, number) != (is_joiner, line_number):
            return [line]
        message = json.loads(line)
        name = fields[is_joiner, line_number]
        message[name] = 2 if name == "node_rank" else "c" * 64
        return [json.dumps(message).encode() + b"\n"]

    with first_host(2) as first, ExitStack() as stack:
        between = Between(first.port, change)
        stack.callback(between.close)
        with pytest.raises(ConfigError, match="the secrets differ"):
            join(between.port, 1)


@pytest.mark.parametrize("length", [1, 60, len(claim()) - 1, len(claim())])
def test_a_handshake_that_is_cut_off_leaves_nothing(length: int) -> None:
    with first_host(1) as first:
        with client(first.port) as stranger:
            stranger.send(claim()[:length])
        held = join(first.port)
        first.joined()
        held.close()


# Later lines.


def flip(line: bytes) -> bytes:
    return line[:-3] + bytes([line[-3] ^ 1]) + line[-2:]


@pytest.mark.parametrize("is_joiner", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0], flip(lines[1]), lines[2]],
        lambda lines: [lines[0], b"\xff" + lines[1][1:], lines[2]],
        lambda lines: [lines[0], lines[2]],
        lambda lines: [lines[0], lines[0], lines[1]],
        lambda lines: [lines[0], lines[2], lines[1]],
        lambda lines: [lines[0], b"\n", lines[1]],
        lambda lines: [lines[0], b'{"number": 1}\n'],
        lambda lines: [lines[0], b"@agent {}\n"],
        lambda lines: [lines[0], lines[1][:-1] + lines[2]],
    ],
    ids=[
        "flipped",
        "no text",
        "left out",
        "repeated",
        "reordered",
        "inserted",
        "unsigned",
        "marked",
        "joined",
    ],
)
def test_lines_that_are_changed_on_the_way_end_the_channel(
    is_joiner: bool, change: Callable[[Lines], Lines]
) -> None:
    held: Lines = []

    def interfere(from_joiner: bool, number: int, line: bytes) -> Lines:
        if from_joiner != is_joiner or number < 2:  # the handshake
            return [line]
        held.append(line)
        return change(held) if len(held) == 3 else []

    with first_host(1) as first, ExitStack() as stack:
        between = Between(first.port, interfere)
        stack.callback(between.close)
        joiner = join(between.port)
        (host,) = first.joined()
        sender, receiver = (joiner, host.channel) if is_joiner else (host.channel, joiner)
        for number in range(3):
            sender.send({"number": number})

        assert receiver.receive(WAIT_S) == {"number": 0}
        with pytest.raises(ChannelClosed, match="a message was changed on the way"):
            receiver.receive(WAIT_S)


def test_a_line_of_one_direction_is_none_of_the_other() -> None:
    ours = Signed(b"a" * 32, b"b" * 32)
    theirs = Signed(b"b" * 32, b"a" * 32)
    line = ours.encode("{}")

    with pytest.raises(ChannelClosed):
        ours.decode(line)
    assert theirs.decode(line) == "{}"


def test_a_connection_cut_in_a_line_is_an_end_and_no_forgery() -> None:
    def cut(from_joiner: bool, number: int, line: bytes) -> Lines:
        return [line[:-5]] if from_joiner and number == 3 else [line]

    with first_host(1) as first, ExitStack() as stack:
        between = Between(first.port, cut)
        stack.callback(between.close)
        joiner = join(between.port)
        (host,) = first.joined()
        joiner.send({"whole": 1})
        joiner.send({"cut": 1})
        joiner.close()

        assert host.channel.receive(WAIT_S) == {"whole": 1}
        assert end_of(host.channel) == "it closed the connection"


# Many and slow clients.


def test_idle_clients_keep_nobody_out() -> None:
    with first_host(2) as first, ExitStack() as stack:
        idle = [stack.enter_context(client(first.port)) for _ in range(50)]
        for stranger in idle[:25]:
            stranger.send(claim()[:20])
        begin_s = monotonic()
        held = [join(first.port) for _ in range(2)]
        first.joined()
        assert monotonic() - begin_s < 4.0
        del held


def test_a_flood_of_clients_is_bounded_and_keeps_nobody_out() -> None:
    before = threading.active_count()
    with first_host(1) as first, ExitStack() as stack:
        flood = [
            stack.enter_context(client(first.port)) for _ in range(3 * listening.MAX_HANDSHAKES)
        ]
        wait_for(lambda: flood[0].read() == b"", "the end of the oldest")
        most = before + 1 + listening.MAX_HANDSHAKES
        wait_for(lambda: threading.active_count() <= most, "the end of the oldest threads")
        held = join(first.port)
        first.joined()
        del held


def test_an_address_with_many_clients_keeps_only_its_own_out() -> None:
    with first_host(1) as first, ExitStack() as stack:
        slow = socket.create_connection(
            (HERE, first.port), source_address=("127.0.0.2", 0), timeout=WAIT_S
        )
        stack.enter_context(slow)
        flood = [
            stack.enter_context(client(first.port)) for _ in range(listening.MAX_HANDSHAKES + 20)
        ]
        assert flood[0].read() == b"" == flood[15].read()
        slow.sendall(claim())

        assert slow.makefile("rb").readline().startswith(b'{"protocol"')


def test_a_client_that_sends_a_byte_now_and_then_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HANDSHAKE_S", 0.5)
    with first_host(1) as first, client(first.port) as slow:
        begin_s = monotonic()
        slow.socket.settimeout(0.05)
        while monotonic() - begin_s < WAIT_S:
            try:
                slow.send(b" ")
                if not slow.socket.recv(1):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
            sleep(0.01)
        assert 0.3 < monotonic() - begin_s < 5.0
        held = join(first.port)
        first.joined()
        held.close()


# The secret and the addresses.


def secret_problem(environ: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as error:
        read_secret(environ)
    text = str(error.value)
    assert redact(text) == text, "the command line would mask a part of the message"
    return text


def written(path: Path, content: bytes, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def test_the_secret_comes_from_the_file_before_the_variable(tmp_path: Path) -> None:
    path = written(tmp_path / "join.secret", b"\n  of the file 12345678 \r\n")
    both = {"PIPELINE_JOIN_SECRET_FILE": path, "PIPELINE_JOIN_SECRET": "of the variable 12345678"}

    assert read_secret(both) == b"of the file 12345678"
    assert read_secret(both | {"PIPELINE_JOIN_SECRET_FILE": ""}) == b"of the variable 12345678"


def test_any_bytes_are_the_same_secret_from_both(tmp_path: Path) -> None:
    content = b"\xff\xfe" + "naïve ☃ 1234567".encode()
    path = written(tmp_path / "join.secret", content)

    assert read_secret({"PIPELINE_JOIN_SECRET_FILE": path}) == content
    assert read_secret({"PIPELINE_JOIN_SECRET": os.fsdecode(content)}) == content


def test_the_command_in_the_message_makes_a_secret(tmp_path: Path) -> None:
    command = secret_problem({}).split("`")[1]
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)

    assert len(read_secret({"PIPELINE_JOIN_SECRET_FILE": str(tmp_path / "join.secret")})) == 32


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "join.secret", b"too open 12345678", mode)
    problem = secret_problem({"PIPELINE_JOIN_SECRET_FILE": path})

    assert f"(mode {mode:o}); run `chmod 600 {path}`" in problem
    assert "12345678" not in problem


def test_problems_of_the_secret_are_named(tmp_path: Path) -> None:
    def of_file(content: bytes) -> str:
        return secret_problem(
            {"PIPELINE_JOIN_SECRET_FILE": written(tmp_path / "join.secret", content, 0o644)}
        )

    assert "PIPELINE_JOIN_SECRET is not set, nor is PIPELINE_JOIN_SECRET_FILE" in secret_problem({})
    assert "PIPELINE_JOIN_SECRET is empty" in secret_problem({"PIPELINE_JOIN_SECRET": "  "})
    short = secret_problem({"PIPELINE_JOIN_SECRET": "short-and-weak"})
    assert "has 14 characters and needs at least 16" in short and "short-and-weak" not in short
    assert "join.secret of PIPELINE_JOIN_SECRET_FILE is empty" in of_file(b" \n")
    assert "has more than 4096 bytes" in of_file(b"x" * 5000)
    missing = secret_problem({"PIPELINE_JOIN_SECRET_FILE": str(tmp_path / "none")})
    assert "cannot be read (No such file or directory)" in missing
    assert "cannot be read (Is a directory)" in secret_problem(
        {"PIPELINE_JOIN_SECRET_FILE": str(tmp_path)}
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpu1:29400", ("gpu1", 29400)),
        ("10.0.0.7:1", ("10.0.0.7", 1)),
        ("[fd00::1]:65535", ("fd00::1", 65535)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpu1",
        "gpu1:",
        ":29400",
        "gpu1:0",
        "gpu1:65536",
        "gpu1:-1",
        "gpu1:٣",
        "fd00::1:29400",
        "[fd00::1]",
        "[x]:1",
    ]
    + [
        "http://gpu1:29400",
        "gpu1:29400/",
        "user@gpu1:29400",
        "gpu1:29400\n",
        "gpu 1:29400",
        "gpu1:2940000000",
    ],
)
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT, as in gpu1:29400"):
        parse_address(text)


PLATFORM = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "2"}


def test_the_first_host_of_a_platform() -> None:
    assert address_from(PLATFORM) == FirstHost("job-master-0", 23456, None)
    assert address_from(PLATFORM | {"RANK": "1"}) == FirstHost("job-master-0", 23456, 1)
    assert address_from(PLATFORM | {"RANK": "9", "NODE_RANK": "1"}) == FirstHost(
        "job-master-0", 23456, 1
    )
    for bad, problem in (
        ({"MASTER_PORT": ""}, "give HOST:PORT"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT=http is no whole number from 1 to 65535"),
        ({"NODE_RANK": "-1"}, "NODE_RANK=-1 is no whole number"),
    ):
        with pytest.raises(ConfigError, match=problem):
            address_from(PLATFORM | bad)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"PIPELINE_JOIN_PORT": "29400"}, JoinPort(29400, "PIPELINE_JOIN_PORT")),
        ({"PIPELINE_JOIN_PORT": "29400", "RANK": "3"}, JoinPort(29400, "PIPELINE_JOIN_PORT")),
        (PLATFORM | {"RANK": "0"}, JoinPort(23456, "MASTER_PORT")),
        (
            PLATFORM | {"RANK": "0", "PIPELINE_JOIN_PORT": "29400"},
            JoinPort(29400, "PIPELINE_JOIN_PORT"),
        ),
        (PLATFORM | {"NODE_RANK": "0", "RANK": "5"}, JoinPort(23456, "MASTER_PORT")),
        (PLATFORM | {"RANK": "0", "WORLD_SIZE": "", "NNODES": "2"}, JoinPort(23456, "MASTER_PORT")),
        (PLATFORM | {"RANK": "0", "WORLD_SIZE": "8", "NNODES": "1"}, None),
        (PLATFORM | {"RANK": "0", "WORLD_SIZE": "1"}, None),
        (PLATFORM, None),
        ({"MASTER_ADDR": "left-over"}, None),
        ({"MASTER_ADDR": "left-over", "RANK": "4", "WORLD_SIZE": "8"}, None),
    ],
)
def test_when_the_first_host_waits_for_others(
    environ: dict[str, str], expected: JoinPort | None
) -> None:
    assert joining_hosts(environ) == expected


def test_snakemake_on_another_node_is_refused() -> None:
    for more in ({}, {"PIPELINE_JOIN_PORT": "29400"}):
        with pytest.raises(ConfigError, match="this is node 1: run `qwen3 join` here"):
            joining_hosts(PLATFORM | {"RANK": "1"} | more)
    with pytest.raises(
        ConfigError, match="PIPELINE_JOIN_PORT=99999 is no whole number from 1 to 65535"
    ):
        joining_hosts({"PIPELINE_JOIN_PORT": "99999"})
