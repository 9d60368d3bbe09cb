"""A slow network between local processes: Linux's token bucket filter on loopback. Needs root."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from pipeline_lib.core.units import BITS, from_gbit_per_s

DEVICE = "lo"
DIRECTIONS = 2  # both of a link cross the one device
BURST_S, LEAST_BURST_BYTES = 1e-3, 2**19  # a packet of loopback has 64 KiB
QUEUE = "50ms"


@dataclass(frozen=True)
class Loopback:
    """The device of this network namespace; `tc` is iproute2's."""

    tc: str

    def limit(self, gbit_s: float) -> None:
        """Let no more through than a link of `gbit_s` in each direction.

        Raises RuntimeError where tc cannot.
        """
        rate = from_gbit_per_s(gbit_s) * DIRECTIONS
        burst = round(max(LEAST_BURST_BYTES, rate * BURST_S))
        command = [
            "qdisc",
            "replace",
            "dev",
            DEVICE,
            "root",
            "tbf",
            "rate",
            f"{round(rate * BITS)}bit",
        ]
        done = self._run(*command, "burst", f"{burst}b", "latency", QUEUE)
        if done.returncode or "tbf" not in self._run("qdisc", "show", "dev", DEVICE).stdout:
            raise RuntimeError(f"{self.tc} cannot slow {DEVICE} down: {done.stderr.strip()}")

    def free(self) -> None:
        """Let everything through; also where nothing was limited."""
        self._run("qdisc", "del", "dev", DEVICE, "root")

    def _run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([self.tc, *arguments], capture_output=True, text=True)


def sent_bytes() -> int:
    """All that has crossed the device, of both directions."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == DEVICE:
            return int(numbers.split()[0])
    raise RuntimeError(f"there is no device {DEVICE}")
