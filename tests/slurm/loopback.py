"""A real SLURM on this machine: munged, slurmctld, a slurmd for each node, pretended GPUs.

Promise: what `up` makes is gone after `down`, whatever was killed in between. Its files are in a
folder of their own; outside of it there are the file that says so (/run), and a link at
/etc/slurm/slurm.conf, where SLURM's programs look: Snakemake's SLURM plugin takes SLURM_CONF away
from its jobs.
"""

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.processes import free_port
from tests.slurm import accounting, daemons, network
from tests.slurm.daemons import LoopbackError, wait_until
from tests.slurm.running import Loopback, environment, last_lines, start_controller, start_node
from tests.slurm.settings import Node, Plan, Settings, is_alive, owner_of_now, write_config

__all__ = ["Loopback", "LoopbackError", "current", "down", "loopback", "missing", "up"]
STATE_FILE = Path("/run/qwen3-loopback.json")
CONFIG_LINK = Path("/etc/slurm/slurm.conf")
FOLDER_PREFIX = "qwen3-loopback-"
PACKAGES = {
    **dict.fromkeys(
        ("slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "sinfo", "squeue"),
        "slurm-wlm",
    ),
    **dict.fromkeys(("munged", "mungekey"), "munge"),
}
NETWORK_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "unshare": "util-linux",
    "hostname": "hostname",
}


@contextlib.contextmanager
def loopback(**settings: Any) -> Iterator[Loopback]:
    """A cluster for the block, and nothing of it afterwards; for `settings` see Settings."""
    made = up(Settings(**settings), owner_of_now())
    try:
        yield made
    finally:
        down()


def up(settings: Settings, owner: tuple[int, str] | None = None) -> Loopback:
    """Start a cluster and wait until all its nodes are idle; LoopbackError if that cannot be."""
    _check_machine(settings)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    plan = _make_plan(settings, folder, owner)
    _claim(plan)
    try:
        folder.chmod(0o755)
        write_config(plan)
        CONFIG_LINK.parent.mkdir(exist_ok=True)
        CONFIG_LINK.symlink_to(plan.config)
        if settings.namespaces:
            network.build(plan)
        _start(plan)
    except BaseException as error:
        text = last_lines(folder)
        down()
        if isinstance(error, LoopbackError | OSError | subprocess.SubprocessError):
            raise LoopbackError(f"the cluster did not start: {error}\n{text}") from error
        raise
    return Loopback(plan)


def current() -> Loopback | None:
    """The cluster that is up, if there is one."""
    try:
        return Loopback(Plan.from_json(STATE_FILE.read_text()))
    except FileNotFoundError:
        return None


def down() -> bool:
    """End the cluster that is up and all its jobs, and remove all of it; whether there was one."""
    found = current()
    if found is not None:
        found.end_jobs()
        running = daemons.supervisors(found.folder)
        for node in set(found.nodes) & running.keys():
            daemons.kill_tree(running[node])
        for name in reversed(found.plan.control_daemons):
            daemons.stop(found.folder, name)
        for pid in daemons.supervisors(found.folder).values():  # of an `up` that was killed
            daemons.kill_tree(pid)
        if found.plan.settings.namespaces:
            network.remove(found.plan)
    _remove_link()
    if found is not None:
        shutil.rmtree(found.folder, ignore_errors=True)
        STATE_FILE.unlink(missing_ok=True)  # last: whatever interrupts this, it can be done again
    return found is not None


def missing(settings: Settings) -> dict[str, str]:
    """The programs that a cluster needs and this machine lacks, each with its package."""
    needed = dict(PACKAGES)
    if settings.namespaces:
        needed |= NETWORK_PACKAGES
    if settings.accounting:
        needed |= accounting.PACKAGES
    return {name: package for name, package in needed.items() if shutil.which(name) is None}


def _check_machine(settings: Settings) -> None:
    """Refuse what cannot work, or would disturb others."""
    lacking = missing(settings)
    if lacking:
        packages = " ".join(sorted(set(lacking.values())))
        raise LoopbackError(
            f"this machine lacks {', '.join(sorted(lacking))}: apt-get install {packages}"
        )
    if os.geteuid() != 0:
        raise LoopbackError("slurmd needs to be root: run this with sudo")
    found = current()
    if found is not None and found.plan.owner is not None and not is_alive(found.plan.owner):
        down()  # tests that were killed have left it
    elif found is not None:
        raise LoopbackError(
            f"a cluster is up already, in {found.folder}: end it with tests/slurm/cluster down"
        )
    if CONFIG_LINK.is_symlink() and not CONFIG_LINK.exists():
        _remove_link()
    if CONFIG_LINK.exists() or CONFIG_LINK.is_symlink():
        raise LoopbackError(
            f"{CONFIG_LINK} is there already: this machine belongs to a cluster, which a second "
            "one would disturb"
        )


def _make_plan(settings: Settings, folder: Path, owner: tuple[int, str] | None) -> Plan:
    ports: set[int] = set()
    while len(ports) < settings.nodes + 3:
        ports.add(free_port())
    subnet = network.free_subnet() if settings.namespaces else ""
    nodes = tuple(
        Node(f"n{number}", f"{subnet}.{10 + number}" if subnet else "127.0.0.1", ports.pop())
        for number in range(1, settings.nodes + 1)
    )
    return Plan(
        settings=settings,
        folder=folder,
        nodes=nodes,
        address=f"{subnet}.1" if subnet else "127.0.0.1",
        control_port=ports.pop(),
        database_port=ports.pop(),
        accounting_port=ports.pop(),
        owner=owner,
        netns_was_mounted=network.is_mounted(),
    )


def _claim(plan: Plan) -> None:
    """Write the file that says what is up, whole, unless there is one."""
    text = STATE_FILE.with_suffix(f".{os.getpid()}")
    text.write_text(plan.to_json())
    try:
        os.link(text, STATE_FILE)
    except FileExistsError:
        shutil.rmtree(plan.folder)
        raise LoopbackError("a cluster is being started by somebody else at this moment") from None
    finally:
        text.unlink()


def _start(plan: Plan) -> None:
    folder = plan.folder
    files = {
        "key-file": "munge.key",
        "pid-file": "munge.pid",
        "seed-file": "munge.seed",
        "log-file": "munge.log",
    }
    options = [f"--{option}={folder / name}" for option, name in files.items()]
    subprocess.run(
        ["mungekey", "--create", "--keyfile", str(folder / "munge.key")],
        check=True,
        capture_output=True,
        timeout=30,
    )
    munge = folder / "munge.socket"
    daemons.start(
        folder,
        "munged",
        ["munged", "--foreground", "--force", f"--socket={munge}", *options],
        environment(),
    )
    if plan.settings.accounting:
        accounting.start_database(plan, environment())
    wait_until(munge.exists, "munged listens")
    if plan.settings.accounting:
        accounting.start_slurmdbd(plan, environment())
    start_controller(plan, "-c")  # without the state of an older one
    for node in plan.nodes:
        start_node(plan, node.name)
    made = Loopback(plan)

    def all_idle() -> bool:
        return made.attempt(
            "sinfo", "--noheader", "--Node", "--partition=gpu", "--format=%T"
        ).stdout.split() == ["idle"] * len(plan.nodes)

    wait_until(all_idle, "all nodes idle")
    if plan.settings.accounting:
        accounting.add_accounts(made.call)


def _remove_link() -> None:
    """Remove slurm.conf if it is a loopback cluster's."""
    if CONFIG_LINK.is_symlink() and CONFIG_LINK.readlink().parent.name.startswith(FOLDER_PREFIX):
        CONFIG_LINK.unlink()
