"""What processes listen on, and what another user can do with it."""

import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

OTHER_USER = 65534
_LISTEN = "0A"  # in the tables of /proc/net
# Run by another user, who knows no secret: reads what stores of torch at HOST PORT ... hold, all at
# once.
_ATTACK = """
import os, sys, threading, time
from datetime import timedelta
from torch.distributed import TCPStore
os.setgroups([]); os.setgid({user}); os.setuid({user})

def attack(host, port):
    store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=3))
    print("found", host, port, store.list_keys(), flush=True)

attacks = [threading.Thread(target=attack, args=place, daemon=True) for place in zip(sys.argv[1::2], sys.argv[2::2])]
for each in attacks:
    each.start()
deadline_s = time.monotonic() + 10
for each in attacks:  # what listens there may say nothing that torch understands
    each.join(max(0, deadline_s - time.monotonic()))
os._exit(0)
"""


def listeners(processes: Sequence[psutil.Process]) -> set[tuple[str, int]]:
    """Return the addresses and ports where `processes` accept connections, on any network.

    Their own networks count.
    """
    found: set[tuple[str, int]] = set()
    for process in processes:
        with suppress(OSError):  # it has ended
            folder = Path("/proc", str(process.pid))
            targets = {str(file.readlink()) for file in (folder / "fd").iterdir()}
            for table in ("tcp", "tcp6"):
                found |= _listening(folder / "net" / table, targets)
    return found


def _listening(table: Path, targets: set[str]) -> set[tuple[str, int]]:
    """Return the listening sockets of a table of the kernel whose links are among `targets`."""
    found = set()
    for line in table.read_text().splitlines()[1:]:
        _, local, _, state, *rest = line.split()
        if state == _LISTEN and f"socket:[{rest[5]}]" in targets:
            address, port = local.split(":")
            words = [
                bytes.fromhex(address[start : start + 8])[::-1]
                for start in range(0, len(address), 8)
            ]
            found.add((str(ip_address(b"".join(words))), int(port, 16)))
    return found


def assert_private(found: set[tuple[str, int]]) -> None:
    """Assert that all listeners are on a loopback address."""
    assert all(ip_address(address).is_loopback for address, _ in found), found


def stores_that_another_user_finds(places: Collection[tuple[str, int]]) -> set[tuple[str, int]]:
    """Return those of `places` where another user of this machine gets the keys of a store.

    They are addresses and ports.
    """
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    words = [word for address, port in places for word in (address, str(port))]
    command = [sys.executable, "-c", _ATTACK.format(user=OTHER_USER), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = [line.split() for line in done.stdout.splitlines() if line.startswith("found ")]
    return {(address, int(port)) for _, address, port, *_ in found}
