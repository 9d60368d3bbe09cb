"""What the environment says of joining hosts: secret, port, and the first host's address."""

import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.core.text import shortened

Say = Callable[[str], None]
SAY_EVERY_S = 60.0  # how often those who wait say so
SECRET = "PIPELINE_JOIN_SECRET"  # noqa: S105
SECRET_FILE = "PIPELINE_JOIN_SECRET_FILE"  # noqa: S105
JOIN_PORT = "PIPELINE_JOIN_PORT"
MIN_SECRET_CHARS = 16
_MAX_SECRET_BYTES = 4096
_HOW_TO_MAKE = (
    "make one with `(umask 077; head -c 24 /dev/urandom | base64 > join.secret)`, copy it to all "
    f"hosts and set {SECRET_FILE}=/path/of/join.secret there"
)
# of a ConfigError; the name of a variable with a colon after it would be taken for a credential
WHERE_SET = "join"
_ADDRESS = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+(?:%[\w.-]+)?)\]|(?P<name>[^\s:/@\[\]]+)):(?P<port>[0-9]{1,5})"
)


def read_secret(environ: Mapping[str, str]) -> bytes:
    """Return the secret that all hosts of a training share; the file goes before the variable.

    Raises ConfigError.
    """
    path = environ.get(SECRET_FILE)
    if path:
        name = f"the file {path} of {SECRET_FILE}"
        content = _read_private(path)
    else:
        name = SECRET
        content = environ.get(SECRET, "").encode("utf-8", "surrogateescape")
    text = content.decode("utf-8", "surrogateescape").strip()
    if not text:
        missing = "is empty" if path or SECRET in environ else f"is not set, nor is {SECRET_FILE}"
        raise ConfigError(WHERE_SET, [f"{name} {missing}; {_HOW_TO_MAKE}"])
    if len(text) < MIN_SECRET_CHARS:
        problem = f"{name} has {len(text)} characters and needs at least {MIN_SECRET_CHARS}"
        raise ConfigError(WHERE_SET, [f"{problem}; {_HOW_TO_MAKE}"])
    return text.encode("utf-8", "surrogateescape")


def _read_private(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            content = file.read(_MAX_SECRET_BYTES + 1)
    except OSError as error:
        problem = f"{SECRET_FILE}={path} cannot be read ({error.strerror}); {_HOW_TO_MAKE}"
        raise ConfigError(WHERE_SET, [problem]) from error
    if len(content) > _MAX_SECRET_BYTES:
        raise ConfigError(
            WHERE_SET,
            [f"{SECRET_FILE}={path} has more than {_MAX_SECRET_BYTES} bytes; {_HOW_TO_MAKE}"],
        )
    if content.strip() and mode & 0o077:
        problem = (
            f"{SECRET_FILE}={path} can be used by other users (mode {mode:03o}); run `chmod "
            f"600 {path}`"
        )
        raise ConfigError(WHERE_SET, [problem])
    return content


@dataclass(frozen=True)
class FirstHost:
    """Where the first host listens, and this host's node rank; None if the first may choose."""

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
        problem = (
            f"{shortened(text, 80)!r} is no address; expected HOST:PORT, as in gpu1:29400 or "
            "[fd00::1]:29400"
        )
        raise ConfigError(WHERE_SET, [problem])
    return match["v6"] or match["name"], int(match["port"])


def address_from(environ: Mapping[str, str]) -> FirstHost:
    """Return the first host that the platform names by MASTER_ADDR and its like.

    Raises ConfigError.
    """
    address = environ.get("MASTER_ADDR")
    if not address or not environ.get("MASTER_PORT"):
        problem = (
            "no first host: give HOST:PORT, as in gpu1:29400, or set MASTER_ADDR and MASTER_PORT"
        )
        raise ConfigError(WHERE_SET, [problem])
    port = _number(environ, "MASTER_PORT", 1, 65535)
    return FirstHost(address, port or 0, node_rank_of(environ))


def joining_hosts(environ: Mapping[str, str]) -> JoinPort | None:
    """Return the port at which this host waits for others; None if nothing asks for that.

    Raises ConfigError. PIPELINE_JOIN_PORT asks for it, or a complete set of the variables that
    platforms set on each host. SLURM's tasks and torchrun's ranks have the same variables with
    another meaning: ask only outside of both.
    """
    nodes = _number(environ, "NNODES" if environ.get("NNODES") else "WORLD_SIZE", 1) or 1
    placed = nodes > 1 and bool(environ.get("MASTER_ADDR")) and bool(environ.get("MASTER_PORT"))
    rank = node_rank_of(environ) if placed else None
    if rank:
        problem = f"this is node {rank}: run `qwen3 join` here; snakemake runs on node 0"
        raise ConfigError(WHERE_SET, [problem])
    if port := _number(environ, JOIN_PORT, 1, 65535):
        return JoinPort(port, JOIN_PORT)
    if rank == 0 and (port := _number(environ, "MASTER_PORT", 1, 65535)):
        return JoinPort(port, "MASTER_PORT")
    return None


def node_rank_of(environ: Mapping[str, str]) -> int | None:
    """Return the node rank that the platform gives this host; None if it gives none.

    Raises ConfigError.
    """
    return _number(environ, "NODE_RANK" if environ.get("NODE_RANK") else "RANK", 0)


def _number(environ: Mapping[str, str], name: str, least: int, most: int = 1_000_000) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    if not re.fullmatch("[0-9]{1,7}", text) or not least <= int(text) <= most:
        raise ConfigError(
            WHERE_SET, [f"{name}={shortened(text, 80)} is no whole number from {least} to {most}"]
        )
    return int(text)
