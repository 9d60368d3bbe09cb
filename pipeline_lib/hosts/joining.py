"""How a host joins a training: it connects to the first, and both prove they know a secret."""

import secrets
import socket
import time

from pipeline_lib.core.errors import CONTINUES, ConfigError, Interrupted
from pipeline_lib.core.text import shortened
from pipeline_lib.hosts.channel import Channel
from pipeline_lib.hosts.handshake import (
    ANSWER,
    HANDSHAKE_S,
    HELLO,
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
from pipeline_lib.hosts.join_settings import (
    JOIN_PORT,
    SAY_EVERY_S,
    SECRET,
    SECRET_FILE,
    WHERE_SET,
    Say,
)

_RETRY_S = 1.0


def connect(
    address: str, port: int, secret: bytes, node_rank: int | None, wait_s: float, say: Say
) -> Channel:
    """Join the training whose first host listens at `port` of `address`, as soon as it does.

    Raises Interrupted after `wait_s`, and ConfigError if the secrets differ or the first host
    refuses this one.
    """
    where = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
    start_s = time.monotonic()
    said_s = -SAY_EVERY_S
    while True:
        try:
            with socket.create_connection((address, port), timeout=HANDSHAKE_S) as connection:
                rank, codec = _join(connection, where, secret, node_rank)
                say(f"joined {where} as node {rank}")
                return open_channel(connection.dup(), codec)  # the block closes `connection`
        except OSError as error:
            reason = error.strerror or str(error)
        except (EOFError, ValueError):
            reason = "what listens there does not answer as a training of this project"
        now_s = time.monotonic()
        if now_s - start_s >= wait_s:
            raise Interrupted(
                f"nobody listens at {where} for {wait_s:.0f} s ({reason}); start the training on "
                f"the first host (`{JOIN_PORT}={port} snakemake ...`), and {CONTINUES}"
            )
        if now_s - start_s - said_s >= SAY_EVERY_S:
            said_s = now_s - start_s
            say(f"waiting for the first host at {where} ({reason})")
        time.sleep(min(_RETRY_S, max(0.0, start_s + wait_s - now_s)))


def _join(
    connection: socket.socket, where: str, secret: bytes, node_rank: int | None
) -> tuple[int, Signed]:
    """Shake hands with the first host, and return the rank that it gives and the codec."""
    deadline_s = time.monotonic() + HANDSHAKE_S
    prepare(connection)
    nonce = secrets.token_hex(32)
    send_fields(connection, protocol=PROTOCOL, node_rank=node_rank, nonce=nonce)
    hello = receive_fields(connection, deadline_s, HELLO)
    if hello["protocol"] != PROTOCOL:
        problem = f"{where} runs another version of this project; use the same code on all hosts"
        raise ConfigError(WHERE_SET, [problem])
    transcript = [PROTOCOL, node_rank, nonce, hello["nonce"]]
    send_fields(connection, proof=derive(secret, "joiner proves", transcript).hex())
    differ = ConfigError(
        WHERE_SET,
        [
            f"the secrets differ: set {SECRET_FILE} or {SECRET} to the same as on the first host "
            f"({where})"
        ],
    )
    try:
        answer = receive_fields(connection, deadline_s, ANSWER)
    except (EOFError, ConnectionError) as error:
        raise differ from error
    rank = answer["node_rank"]
    refused = answer["refused"]
    if not is_proof(answer["proof"], secret, "first host proves", [*transcript, rank, refused]):
        raise differ
    if rank is None:
        raise ConfigError(WHERE_SET, [f"{where} refuses this host: {shortened(refused, 200)}"])
    return rank, codec_of(secret, transcript, "joiner", "first host")
