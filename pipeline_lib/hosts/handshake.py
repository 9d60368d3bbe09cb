"""What two hosts send one another when one joins: a handshake, then signed lines.

Both sides know a secret, which is never sent. Each side sends a fresh random nonce and proves that
it knows the secret by an HMAC-SHA256 over both nonces, the version of the protocol, the claimed
node rank and its role. A recorded proof is therefore useless later, and a proof that is sent back
proves nothing. The joining host proves itself first: a client without the secret gets nothing that
depends on it. A program that reads the network, or that listens in place of the first host, can
test guesses against a proof. That is hopeless if the secret is random: it has at least 16
characters.

A handshake is four lines of JSON, each with exactly the fields that are expected. After that every
line carries an HMAC over its number and its text, with a key for each direction, so that nobody can
change, repeat, leave out or reorder lines without being noticed. Nothing is encrypted: the settings
of a training can be read in the network. Credentials of the user are never sent.
"""

import hmac
import json
import re
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from pipeline_lib.hosts.channel import Channel, ChannelClosed

PROTOCOL = "qwen3-pipeline join 1"
HANDSHAKE_S = 5.0
_MAX_HANDSHAKE_BYTES = 1024
_Fields = Mapping[str, tuple[type, ...]]
CLAIM: _Fields = {"protocol": (str,), "node_rank": (int, type(None)), "nonce": (str,)}
HELLO: _Fields = {"protocol": (str,), "nonce": (str,)}
PROOF: _Fields = {"proof": (str,)}
ANSWER: _Fields = {"node_rank": (int, type(None)), "refused": (str,), "proof": (str,)}


def derive(secret: bytes, label: str, transcript: list[Any]) -> bytes:
    """Return what is derived from `secret` for the use `label` in `transcript`'s handshake."""
    return hmac.digest(secret, json.dumps([PROTOCOL, label, transcript]).encode(), "sha256")


def is_proof(proof: str, secret: bytes, label: str, transcript: list[Any]) -> bool:
    """Return whether `proof`, in hexadecimal, is what `derive` returns, in constant time."""
    return hmac.compare_digest(proof.encode(), derive(secret, label, transcript).hex().encode())


class Signed:
    """A codec for a network that is not trusted.

    Each line is an HMAC over its number and its text, and the text.
    """

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
        """Return the text in `line`.

        Raise ChannelClosed if it is not exactly the next one that was sent.
        """
        mac, _, text = line.partition(" ")
        if not hmac.compare_digest(
            mac.encode(), _line_mac(self._read_key, self._read, text).encode()
        ):
            raise ChannelClosed(
                f"a message was changed on the way, repeated or left out (line {self._read + 1} of "
                "this connection): something between the hosts interferes"
            )
        self._read += 1
        return text


def _line_mac(key: bytes, number: int, text: str) -> str:
    return hmac.digest(key, number.to_bytes(8, "big") + text.encode(), "sha256").hex()


def codec_of(secret: bytes, transcript: list[Any], writes: str, reads: str) -> Signed:
    """Return the codec of the side called `writes`, which reads what the side `reads` sends."""
    return Signed(
        derive(secret, f"{writes} writes", transcript),
        derive(secret, f"{reads} writes", transcript),
    )


def send_fields(connection: socket.socket, **message: Any) -> None:
    """Send `message` as a line of JSON."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive_fields(connection: socket.socket, deadline_s: float, fields: _Fields) -> dict[str, Any]:
    """Return the next line.

    Raises EOFError, OSError, and ValueError if it is not a message with these `fields`.
    """
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
    # True is no node rank
    if any(type(message[name]) not in types for name, types in fields.items()):
        raise ValueError("a field of another type")
    if not re.fullmatch("[0-9a-f]{64}", message.get("nonce", "0" * 64)):
        raise ValueError("not a nonce")
    return message


def prepare(connection: socket.socket) -> None:
    """Send small lines at once, and notice within a minute that the other machine is off."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 20),
        (socket.TCP_KEEPINTVL, 5),
        (socket.TCP_KEEPCNT, 4),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def open_channel(connection: socket.socket, codec: Signed) -> Channel:
    """Return the channel of signed lines over `connection`, once the handshake is over."""
    connection.settimeout(None)

    def hang_up() -> None:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_WR)  # the other side sees the end and hangs up as well
        connection.close()

    return Channel(connection.makefile("rb"), connection.makefile("wb"), codec, hang_up=hang_up)
