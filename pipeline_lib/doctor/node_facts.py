"""Facts of a node, measured by one process: the machine, its network and its view of the store."""

import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from pipeline_lib.doctor.facts import Facts, Section, Unmeasured, measured
from pipeline_lib.doctor.machine import deadline, measure_machine
from pipeline_lib.hosts.facts import code_digest
from pipeline_lib.launch.heartbeat import host_of

BUDGET_S = 60.0
# times the deadlines of one machine with local packages, since many nodes read them at once
PATIENCE = 3.0
INFINIBAND = Path("/sys/class/infiniband")
NOT_LINKS = ("lo", "docker", "virbr", "br-")


def node_facts(share: Path, token: str, environ: Mapping[str, str]) -> Facts:
    """Return the facts about this node alone; `share` is the store, `token` names a file in it."""
    within = deadline(BUDGET_S)
    facts = measure_machine(
        share, environ, lambda most_s: within(PATIENCE * most_s), lambda _: None
    )
    for name in ("SLURM_PROCID", "SLURM_LOCALID"):  # specific to this task
        facts["variables"].pop(name, None)
    facts["code"] = {"pipeline_lib": code_digest()}
    facts["store"] = measured(lambda: _store_facts(share, token, environ))
    facts["network"] = measured(network)
    return facts


def _store_facts(share: Path, token: str, environ: Mapping[str, str]) -> Section:
    """Check that this node reads the submitting machine's token, and write an answer beside it.

    Raise Unmeasured.
    """
    try:
        if (share / token).read_text() != token:
            raise Unmeasured(f"{share / token} holds something else here")
        (share / f"{token}.{host_of(environ)}").write_text(token)
    except OSError as error:
        raise Unmeasured(f"{error.filename}: {error.strerror}") from error
    return {"folder": str(share), "reads_and_writes": True}


def network() -> Section:
    """Return the interfaces that are up, with addresses and speeds, and the InfiniBand ports."""
    found: Section = {"host": socket.gethostname()}
    state = psutil.net_if_stats()
    addresses = psutil.net_if_addrs()
    for name in sorted(state):
        ipv4 = [one.address for one in addresses.get(name, []) if one.family == socket.AF_INET]
        if state[name].isup and ipv4 and not name.startswith(NOT_LINKS):
            found[name] = {
                "address": ipv4[0],
                "mbit_per_s": state[name].speed or "?",
                "mtu": state[name].mtu,
            }
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        texts = []
        for name in ("state", "rate"):
            if (port / name).exists():
                texts.append((port / name).read_text().strip())
        found[f"{port.parts[-3]} port {port.name}"] = ", ".join(texts)
    return found
