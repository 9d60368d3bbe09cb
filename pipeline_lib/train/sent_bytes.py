"""Bytes that this machine sends, as the kernel counts them, to check the plan's network traffic.

All traffic that leaves the machine is counted, whoever sends it; local traffic (loopback, NVLink,
bridges) is not. Non-goal: networks for which Linux keeps no such counters.
"""

from pathlib import Path

SYS = Path("/sys/class")
# Interface types (linux/if_arp.h): loopback, and IP over InfiniBand, whose bytes their port counts
# too.
_NOT_COUNTED = (772, 32)


def sent_bytes(sys: Path = SYS) -> int | None:
    """Return the bytes that this machine has sent since boot; None if nothing counts them."""
    folders = [
        path
        for path in sys.glob("net/*")
        if path.is_dir() and _number(path / "type") not in _NOT_COUNTED
    ]
    # Where there are hardware interfaces, the others (bonds, bridges, containers) only pass traffic
    # on to them.
    real = [folder for folder in folders if (folder / "device").exists()] or folders
    counts = [_number(folder / "statistics" / "tx_bytes") for folder in real]
    for port in sys.glob("infiniband/*/ports/*"):
        words = _number(port / "counters" / "port_xmit_data")
        # Linux, Documentation/ABI/stable/sysfs-class-infiniband: octets divided by 4
        counts.append(None if words is None else words * 4)
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


class SentMeter:
    """A meter of the bytes sent between steps: nothing at the first, or without other machines."""

    def __init__(self, has_others: bool, sys: Path = SYS) -> None:
        """Count only if `has_others`: other machines take part in the run."""
        self._has_others, self._sys = has_others, sys
        self._before: int | None = None

    def take(self) -> dict[str, int]:
        """Return the field `node_sent_bytes` for the row of a step, if it is known."""
        if not self._has_others:
            return {}
        before = self._before
        self._before = sent_bytes(self._sys)
        # an interface went away
        if before is None or self._before is None or self._before < before:
            return {}
        return {"node_sent_bytes": self._before - before}


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
