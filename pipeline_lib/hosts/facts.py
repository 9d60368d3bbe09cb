"""What an agent finds on its host before a training: versions, GPUs, memory and the rest.

The rest are folders and addresses.
"""

import hashlib
import importlib.metadata
import platform
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

PACKAGE = Path(__file__).parents[1]
# Those that decide whether ranks of two hosts compute the same, and whether they understand each
# other.
COMPARED_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "peft",
    "accelerate",
    "deepspeed",
    "triton",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
_NOT_BETWEEN_HOSTS = ("lo", "docker", "virbr", "br-", "veth", "cni", "flannel")
_CALL_S = 20.0


@dataclass(frozen=True)
class HostGpu:
    """A GPU as `nvidia-smi` reports it."""

    name: str
    driver: str


@dataclass(frozen=True)
class HostFacts:
    """A host as its agent sees it. `clock_s` is the time since 1970 at the moment of the answer.

    `folders` has, by path, why a folder cannot be used, or the empty text. `addresses` has those of
    each interface.
    """

    machine: str
    python: str
    code: str
    packages: dict[str, str]
    gpus: tuple[HostGpu, ...]
    memory_bytes: int
    memory_available_bytes: int
    temporary_folder: str
    temporary_free_bytes: int
    clock_s: float
    folders: dict[str, str] = field(default_factory=dict)
    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(fields: dict[str, Any]) -> "HostFacts":
        """Read what `to_json` made. Raises TypeError and KeyError for anything else."""
        gpus = tuple(HostGpu(**gpu) for gpu in fields["gpus"])
        addresses = {name: tuple(found) for name, found in fields["addresses"].items()}
        return HostFacts(**{**fields, "gpus": gpus, "addresses": addresses})


def facts_of_this_host(folders: list[Path], token: str, host: str) -> HostFacts:
    """Collect the facts; read `token` in each of `folders`, and write an answer beside it."""
    memory = psutil.virtual_memory()
    temporary = tempfile.gettempdir()
    return HostFacts(
        machine=_identity(),
        python=platform.python_version(),
        code=code_digest(),
        packages=_packages(),
        gpus=tuple(gpus_here()),
        memory_bytes=memory.total,
        memory_available_bytes=memory.available,
        temporary_folder=temporary,
        temporary_free_bytes=shutil.disk_usage(temporary).free,
        folders={str(folder): _answer_token(folder, token, host) for folder in folders},
        addresses=addresses(),
        clock_s=time.time(),
    )


def code_digest() -> str:
    """Return a digest of this package's source, which shows hosts with different code."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def addresses() -> dict[str, tuple[str, ...]]:
    """Return, by interface that is up, the addresses by which other machines may reach this one."""
    state = psutil.net_if_stats()
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        of_version_4 = [one.address for one in entries if one.family == socket.AF_INET]
        of_version_6 = [one.address for one in entries if one.family == socket.AF_INET6]
        every = of_version_4 + of_version_6
        usable = [address for address in every if not address.startswith("fe80")]
        if (
            usable
            and name in state
            and state[name].isup
            and not name.startswith(_NOT_BETWEEN_HOSTS)
        ):
            found[name] = tuple(usable)
    return found


def _identity() -> str:
    """Identify the running machine or container: two names in the list may be one machine."""
    parts = [socket.gethostname()]
    for path in (Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")):
        with suppress(OSError):
            if path.is_symlink():
                parts.append(str(path.readlink()))
            else:
                parts.append(path.read_text(encoding="utf-8").strip())
    return " ".join(parts)


def _packages() -> dict[str, str]:
    found = {}
    for package in COMPARED_PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def gpus_here() -> list[HostGpu]:
    """Return the GPUs of this host in the driver's order; none without a driver."""
    return [HostGpu(*values) for values in ask_driver("name", "driver_version")]


def ask_driver(*keys: str) -> list[list[str]]:
    """Return what nvidia-smi says of each GPU of this host under `keys`; none without a driver."""
    command = ["nvidia-smi", f"--query-gpu={','.join(keys)}", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_CALL_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    found = []
    for line in done.stdout.splitlines():
        values = [value.strip() for value in line.split(",")]
        if len(values) == len(keys):
            found.append(values)
    return found


def _answer_token(folder: Path, token: str, host: str) -> str:
    try:
        # over NFS, this asks the server for files that another host has created
        list(folder.iterdir())
        if (folder / token).read_text(encoding="utf-8") != token:
            return "it holds another file of that name"
        (folder / f"{token}.{host}").write_text(token, encoding="utf-8")
    except FileNotFoundError:
        return "it is not the same folder there" if folder.is_dir() else "it does not exist there"
    except OSError as error:
        return error.strerror or str(error)
    return ""
