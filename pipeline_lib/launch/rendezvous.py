"""Where a run's ranks find each other: in a private file on one machine, else at rank 0's address.

torch's own start (`env://`) listens on every interface of rank 0's machine, whatever the address
says. A store has no password: who reaches it can read and replace what is in it. So it is kept from
all who need not reach it, and nothing that comes from it is unpickled.
"""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
from torch import distributed

from pipeline_lib.core.errors import TrainingError
from pipeline_lib.core.user_cache import UserCache
from pipeline_lib.launch.environment import GLOO_INTERFACE, RENDEZVOUS_FILE, is_loopback, mark_used


@dataclass(frozen=True)
class Rendezvous:
    """The meeting point of the ranks: `file`, or else a TCP port of rank 0 at `address`.

    `is_served` says that a foreign launcher (torchrun) listens there already. `interface` leads to
    the other nodes.
    """

    file: str | None = None
    address: str = ""
    port: int = 0
    is_served: bool = False
    interface: str | None = None

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> "Rendezvous":
        """Read what the launcher has set. What is missing stays missing: `store` says so."""
        address = environ.get("MASTER_ADDR", "")
        port = environ.get("MASTER_PORT", "")
        return Rendezvous(
            file=environ.get(RENDEZVOUS_FILE),
            address=address if port.isdecimal() else "",
            port=int(port) if port.isdecimal() else 0,
            is_served=environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True),
            interface=environ.get(GLOO_INTERFACE),
        )

    def store(self, rank: int, ranks: int, timeout_s: float, waits: bool = True) -> Any:
        """Return the torch.distributed.Store of the `ranks` ranks.

        Without a file, rank 0 listens on one address only. With `waits`, all ranks have connected
        when it returns, if they have no file. Raises TrainingError if no launcher has said where
        the ranks meet, if the file's folder cannot be made here or is not the user's alone, or if
        rank 0's machine does not have the address; torch's DistNetworkError or DistStoreError if
        the others do not come within `timeout_s`.
        """
        timeout = timedelta(seconds=timeout_s)
        if self.file is not None:
            folder = Path(self.file).parent
            if not UserCache(
                folder
            ).is_private:  # made here if the launcher runs on another machine
                raise TrainingError(
                    f"the ranks cannot meet in {folder}: set TMPDIR to a local folder of every node"
                )
            mark_used(folder)  # until this process ends
            store: Any = distributed.FileStore(self.file, ranks)  # type: ignore[attr-defined]
            store.set_timeout(timeout)
            return store
        if not self.address:
            raise TrainingError(
                f"neither {RENDEZVOUS_FILE} nor MASTER_ADDR and MASTER_PORT are set: a rank is "
                "started by `python -m pipeline_lib train`"
            )
        options: dict[str, Any] = {"timeout": timeout, "wait_for_workers": waits}
        address = self.address
        if rank == 0 and not self.is_served:
            address = own_address(address, self.interface)
            listener = _listen(address, self.port)
            options |= {"is_master": True, "master_listen_fd": listener.detach()}
        return distributed.TCPStore(address, self.port, ranks, **options)  # type: ignore[attr-defined]


def own_address(address: str, interface: str | None) -> str:
    """Return the numeric address of this machine at which the other ranks reach it by `address`.

    A host name may lead its own machine to a loopback address (127.0.1.1 on Debian), where others
    cannot connect; then it is the address of `interface`, which leads to the others. Raises
    TrainingError if this machine has neither.
    """
    by_interface = _addresses_by_interface()
    own = {one for addresses in by_interface.values() for one in addresses}
    leading = [one for name in (interface or "").split(",") for one in by_interface.get(name, [])]
    resolved = [one for one in _resolved(address) if one in own or _is_of_this_machine(one)]
    if not is_loopback(address):
        resolved = [one for one in resolved if not is_loopback(one)]
    reached = [one for one in resolved if one in leading] + resolved + leading
    if reached:
        return reached[0]
    raise TrainingError(
        f"rank 0 is to be reached at {address}, which is no address of this machine: name the "
        f"network interface that leads to the other nodes in {GLOO_INTERFACE} (it is "
        f"{interface or 'not set'}; this machine has {', '.join(sorted(by_interface))})"
    )


def _resolved(address: str) -> list[str]:
    try:
        entries = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [str(target[0]).partition("%")[0] for *_, target in entries]


def _is_of_this_machine(address: str) -> bool:
    """Return whether `address` is 127.0.0.2 or the like, which belong to every machine."""
    return address.startswith("127.")


def _addresses_by_interface() -> dict[str, list[str]]:
    """Return the IPv4 addresses, then the IPv6 addresses, of each interface that has one."""
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = [
            entry.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for entry in entries
            if entry.family == family and "%" not in entry.address  # no link-local ones
        ]
        if addresses:
            found[name] = addresses
    return found


def _listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens at `address` alone.

    Raises TrainingError if the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=2048)
    except OSError as error:
        raise TrainingError(
            f"rank 0 cannot listen at {address}, port {port} ({error.strerror}): run the same "
            "command again"
        ) from error
