"""What this machine sends to others, as the kernel counts it: the check of the plan's bytes over the network.

All that leaves the machine is counted, whoever sends it; what stays within (loopback, NVLink, bridges) is not.
Non-goal: networks that Linux keeps no such counters of.
"""

from pathlib import Path

SYS = Path("/sys/class")
# Linux, Documentation/ABI/stable/sysfs-class-infiniband: port_xmit_data counts octets divided by 4.
_OCTETS_OF_A_WORD = 4
# Kinds of interface (linux/if_arp.h): loopback, and those over InfiniBand, whose bytes their port counts too.
_NOT_COUNTED = (772, 32)


def sent_bytes(sys: Path = SYS) -> int | None:
    """Bytes that this machine has sent since it was started; None where nothing counts them."""
    plain = [folder for folder in _folders(sys / "net") if _number(folder / "type") not in _NOT_COUNTED]
    # Where there is hardware, the rest only passes on what the hardware sends: bonds, bridges, containers.
    real = [folder for folder in plain if (folder / "device").exists()] or plain
    counts = [_number(folder / "statistics" / "tx_bytes") for folder in real]
    for port in sorted(sys.glob("infiniband/*/ports/*")):
        words = _number(port / "counters" / "port_xmit_data")
        counts.append(None if words is None else words * _OCTETS_OF_A_WORD)
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


class SentMeter:
    """What this machine sends from one step to the next; nothing if the ranks are all on it, and none on the first."""

    def __init__(self, has_others: bool, sys: Path = SYS) -> None:
        """Count only if `has_others`, other machines in the run."""
        self._has_others, self._sys = has_others, sys
        self._before: int | None = None

    def take(self) -> dict[str, int]:
        """The field `node_sent_bytes` for the row of a step, where it is known."""
        if not self._has_others:
            return {}
        before, self._before = self._before, sent_bytes(self._sys)
        if before is None or self._before is None or self._before < before:  # an interface went away
            return {}
        return {"node_sent_bytes": self._before - before}


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.glob("*") if path.is_dir())


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
