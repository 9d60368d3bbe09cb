"""A node of a cluster as one of its processes sees it: the facts of any machine, its network, and what it shares."""

import hashlib
import socket
from collections.abc import Mapping
from pathlib import Path

import psutil

from pipeline_lib.doctor.facts import Facts, Section, Unmeasured, measured
from pipeline_lib.doctor.run import deadline, look

BUDGET_S = 60.0
PATIENCE = 3.0  # as long as on a machine whose own disk has the packages: many nodes read them at once here
PACKAGE = Path(__file__).parents[1]
INFINIBAND = Path("/sys/class/infiniband")
NOT_LINKS = ("lo", "docker", "virbr", "br-")


def node_facts(share: Path, token: str, environ: Mapping[str, str]) -> Facts:
    """All that is found out without the other nodes. `share` is the folder of the store, `token` names a file in it."""
    within = deadline(BUDGET_S)
    facts = look(share, environ, lambda most_s: within(PATIENCE * most_s), lambda _: None)
    for name in ("SLURM_PROCID", "SLURM_LOCALID"):  # of this task alone
        facts["variables"].pop(name, None)
    facts["code"] = {"pipeline_lib": code_digest()}
    facts["store"] = measured(lambda: _shared(share, token, environ))
    facts["network"] = measured(network)
    return facts


def code_digest() -> str:
    """Of this package's source, so that nodes with another one are found."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _shared(share: Path, token: str, environ: Mapping[str, str]) -> Section:
    """Read what the asking machine wrote, and write what it can read. Raises Unmeasured."""
    try:
        if (share / token).read_text() != token:
            raise Unmeasured(f"{share / token} holds something else here")
        (share / f"{token}.{environ.get('SLURMD_NODENAME', socket.gethostname())}").write_text(token)
    except OSError as error:
        raise Unmeasured(f"{error.filename}: {error.strerror}") from error
    return {"folder": str(share), "reads_and_writes": True}


def network() -> Section:
    """Interfaces that are up, with their addresses and speeds, and InfiniBand ports."""
    found: Section = {"host": socket.gethostname()}
    state, addresses = psutil.net_if_stats(), psutil.net_if_addrs()
    for name in sorted(state):
        shown = [one.address for one in addresses.get(name, []) if one.family == socket.AF_INET]
        if state[name].isup and shown and not name.startswith(NOT_LINKS):
            found[name] = {"address": shown[0], "mbit_per_s": state[name].speed or "?", "mtu": state[name].mtu}
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        texts = [(port / name).read_text().strip() for name in ("state", "rate") if (port / name).exists()]
        found[f"{port.parts[-3]} port {port.name}"] = ", ".join(texts)
    return found
