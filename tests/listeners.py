"""What processes listen on, and what another user can do with it."""

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

OTHER_USER = 65534
_LISTEN = "0A"  # in the tables of /proc/net
ATTACK_S = 30.0  # the most of it is importing torch
# Run by another user, who knows no secret: reads and replaces what a store of torch at HOST PORT holds.
_ATTACK = """
import os, sys
from datetime import timedelta
from torch.distributed import TCPStore
os.setgroups([]); os.setgid({user}); os.setuid({user})
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=3))
print("keys", store.list_keys())
"""


def listeners(processes: Sequence[psutil.Process]) -> set[tuple[str, int]]:
    """Return the addresses and ports at which `processes` accept connections, also in networks of their own."""
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
            words = [bytes.fromhex(address[start : start + 8])[::-1] for start in range(0, len(address), 8)]
            found.add((str(ip_address(b"".join(words))), int(port, 16)))
    return found


def assert_private(found: set[tuple[str, int]]) -> None:
    """Assert that all listeners are on a loopback address."""
    assert all(ip_address(address).is_loopback for address, _ in found), found


def another_user_finds_a_store(address: str, port: int) -> bool:
    """Return whether another user of this machine gets the keys of a store of torch there."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    command = [sys.executable, "-c", _ATTACK.format(user=OTHER_USER), address, str(port)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ATTACK_S)
    except subprocess.TimeoutExpired:  # what listens there says nothing that torch understands
        return False
    return done.returncode == 0 and "keys" in done.stdout
