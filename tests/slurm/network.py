"""The network of a loopback cluster with nodes in namespaces: a bridge, and a cable for each.

host (slurmctld) -- q3bridge --+-- q3n1 ==== eth0 of namespace q3-n1
                               +-- q3n2 ==== eth0 of namespace q3-n2
"""

import contextlib
import json
import re
import shutil
import subprocess
from pathlib import Path

from tests.slurm.daemons import LoopbackError
from tests.slurm.settings import Node, Plan

BRIDGE = "q3bridge"
PREFIX = "q3-"
NETNS = Path("/etc/netns")
RUN_NETNS = "/run/netns"
RATE = re.compile(r"\d+(\.\d+)?([kmg]bit)")
BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


def namespace(node: str) -> str:
    """The network namespace of a node."""
    return PREFIX + node


def cable(node: str) -> str:
    """The host's end of the link to a node."""
    return f"q3{node}"


def inside(node: str, *command: str) -> list[str]:
    """The command line that runs `command` in the node's network, under its host name."""
    renamed = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', node, *command]
    return ["ip", "netns", "exec", namespace(node), *renamed]


def free_subnet() -> str:
    """The first three bytes of addresses that no route of this machine leads to: `10.200.77`."""
    routes = json.loads(_run("ip", "-json", "route", "show", "table", "all"))
    taken = {str(route.get("dst", "")) for route in routes}
    for number in range(200, 250):
        prefix = f"10.{number}.77"
        if not any(address.startswith((f"10.{number}.", "10.0.0.0/8")) for address in taken):
            return prefix
    raise LoopbackError(
        "no free addresses: all of 10.200.77.0/24 to 10.249.77.0/24 are routed somewhere"
    )


def is_mounted() -> bool:
    """Whether network namespaces have been used here before."""
    return any(
        line.split()[1] == RUN_NETNS for line in Path("/proc/mounts").read_text().splitlines()
    )


def build(plan: Plan) -> None:
    """Make the bridge, the namespaces and the links, all up."""
    _run("ip", "link", "add", BRIDGE, "type", "bridge", "forward_delay", "0")
    _run("ip", "address", "add", f"{plan.address}/24", "dev", BRIDGE)
    _run("ip", "link", "set", BRIDGE, "up")
    hosts = "".join(f"{node.address} {node.name}\n" for node in plan.nodes)
    common = [
        line for line in Path("/etc/hosts").read_text().splitlines() if not line.startswith("127.")
    ]
    for node in plan.nodes:
        folder = NETNS / namespace(node.name)
        folder.mkdir(parents=True)
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *common, hosts]))
        _connect(node)


def _connect(node: Node) -> None:
    name, end = namespace(node.name), cable(node.name)
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", name)
    _run("ip", "link", "set", end, "master", BRIDGE, "up")
    _run("ip", "-n", name, "address", "add", f"{node.address}/24", "dev", "eth0")
    _run("ip", "-n", name, "link", "set", "lo", "up")
    _run("ip", "-n", name, "link", "set", "eth0", "up")


def limit(node: str, rate: str) -> None:
    """Throttle a node's link (`100mbit`), cut it (`down`), mend it (`up`), or free it (`none`).

    It holds for both ways.
    """
    if rate in ("down", "up"):
        _run("ip", "link", "set", cable(node), rate)
        return
    for prefix, device in (([], cable(node)), (["-n", namespace(node)], "eth0")):
        if rate == "none":
            with contextlib.suppress(LoopbackError):  # it had no limit
                _run("tc", *prefix, "qdisc", "del", "dev", device, "root")
        else:
            _run(
                "tc",
                *prefix,
                "qdisc",
                "replace",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                rate,
                *_bucket(rate),
            )
    if rate == "none":
        _run("ip", "link", "set", cable(node), "up")


def _bucket(rate: str) -> list[str]:
    """The kernel's clock of 100 to 1000 Hz refills the bucket: a small one lowers the rate."""
    match = RATE.fullmatch(rate)
    if match is None:
        raise LoopbackError(f"'{rate}' is no rate: expected e.g. 100mbit, or one of down, up, none")
    bits_s = float(rate.removesuffix(match[2])) * BITS[match[2]]
    return ["burst", str(max(64_000, int(bits_s / 8 / 100))), "latency", "100ms"]


def remove(plan: Plan) -> None:
    """Undo `build`, also if it got half way."""
    for node in plan.nodes:
        with contextlib.suppress(LoopbackError):
            _run("ip", "link", "del", cable(node.name))
        with contextlib.suppress(LoopbackError):
            _run("ip", "netns", "del", namespace(node.name))
        shutil.rmtree(NETNS / namespace(node.name), ignore_errors=True)
    with contextlib.suppress(LoopbackError):
        _run("ip", "link", "del", BRIDGE)
    with contextlib.suppress(OSError):  # somebody else's are there
        NETNS.rmdir()
    if not plan.netns_was_mounted and is_mounted() and not any(Path(RUN_NETNS).iterdir()):
        _run("umount", RUN_NETNS)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        raise LoopbackError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
