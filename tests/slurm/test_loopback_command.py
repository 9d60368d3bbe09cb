"""`tests/slurm/cluster`: `down` leaves nothing, whatever was killed, and disturbs nothing."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.processes import wait_for
from tests.slurm import daemons, network
from tests.slurm.loopback import CONFIG_LINK, FOLDER_PREFIX, STATE_FILE, current
from tests.slurm.needs import needs_accounting, needs_namespaces, needs_slurm
from tests.slurm.settings import Plan, is_alive

pytestmark = [pytest.mark.slow, pytest.mark.slurm, needs_slurm]
ROOT = Path(__file__).parents[2]
COMMAND = ROOT / "tests/slurm/cluster"


@pytest.fixture(autouse=True)
def always_down() -> Iterator[None]:
    found = current()
    if found is not None and (found.plan.owner is None or is_alive(found.plan.owner)):
        pytest.fail("a cluster is up, which these tests would end: tests/slurm/cluster down")
    yield
    cluster("down")


def cluster(*words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, COMMAND, *words],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=180,
    )


def processes_of(plan: Plan) -> set[psutil.Process]:
    """All that runs for a cluster."""
    found = set()
    for pid in daemons.supervisors(plan.folder).values():
        for each in {pid, *daemons.descendants(pid)}:
            with contextlib.suppress(psutil.NoSuchProcess):
                found.add(psutil.Process(each))
    return found


def still_run(processes: set[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; when their bodies are buried is for process 1 to say."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [process] if process.status() != psutil.STATUS_ZOMBIE else []
    return found


def names_of(processes: set[psutil.Process]) -> list[str]:
    """The names of `processes`, without those ended since, as a daemon's short-lived ones."""
    names = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            names.append(process.name())
    return names


def left_of(plan: Plan) -> list[str]:
    """Everything outside of processes that is still there of a cluster."""
    links = [
        link["ifname"] for link in json.loads(subprocess.check_output(["ip", "-json", "link"]))
    ]
    ours = [
        name
        for name in links
        if name in {network.BRIDGE, *(network.cable(node.name) for node in plan.nodes)}
    ]
    files = [
        STATE_FILE,
        CONFIG_LINK,
        plan.folder,
        *(network.NETNS / network.namespace(n.name) for n in plan.nodes),
    ]
    left = ours + [str(path) for path in files if path.exists() or path.is_symlink()]
    left += [str(path) for path in Path("/run/netns").glob(f"{network.PREFIX}*")]
    left += [
        line
        for line in Path("/proc/mounts").read_text().splitlines()
        if FOLDER_PREFIX in line or "q3-" in line
    ]
    if not plan.netns_was_mounted and network.is_mounted():
        left.append("mount of /run/netns")
    for port in (
        plan.control_port,
        plan.database_port,
        plan.accounting_port,
        *(node.port for node in plan.nodes),
    ):
        with socket.socket() as probe, contextlib.suppress(ConnectionRefusedError):
            probe.connect(("127.0.0.1", port))
            left.append(f"port {port}")
    return left


@pytest.mark.parametrize(
    "options",
    [
        (),
        pytest.param(("--namespaces",), marks=needs_namespaces),
        pytest.param(("--accounting", "--namespaces"), marks=[needs_accounting, needs_namespaces]),
    ],
    ids=["plain", "namespaces", "accounting"],
)
def test_nothing_is_left_after_down(options: tuple[str, ...], tmp_path: Path) -> None:
    started = cluster("up", *options)
    assert started.returncode == 0, started.stderr
    found = current()
    assert found is not None
    found.submit("(setsid env -i sleep 1000 &); srun sleep 1000", tmp_path / "job.log", "--nodes=2")
    wait_for(lambda: names_of(processes_of(found.plan)).count("sleep") == 3, "all sleeps")
    running = processes_of(found.plan)
    assert {"munged", "slurmctld", "slurmd", "slurmstepd", "sleep"} <= set(names_of(running))
    assert "n2 mixed" in cluster("status").stdout
    assert "a cluster is up already" in cluster("up").stderr

    assert cluster("down").stdout == "down\n"
    assert still_run(running) == []
    assert left_of(found.plan) == []
    assert cluster("down").stdout == "no cluster was up\n"
    assert "no cluster is up" in cluster("status").stderr


@needs_accounting
@needs_namespaces
def test_an_up_that_was_killed_half_way_leaves_nothing_either() -> None:
    starting = subprocess.Popen([sys.executable, COMMAND, "up", "--accounting", "--namespaces"])
    wait_for(
        lambda: (found := current()) is not None and bool(daemons.supervisors(found.folder)),
        "the first daemon",
    )
    starting.send_signal(signal.SIGKILL)
    starting.wait()
    found = current()
    assert found is not None
    running = processes_of(found.plan)

    assert cluster("down").stdout == "down\n"
    assert still_run(running) == []
    assert left_of(found.plan) == []


def test_what_killed_tests_have_left_is_in_nobodys_way() -> None:
    text = (
        "import time; from tests.slurm.loopback import loopback\nwith loopback(nodes=1): "
        "print('up'); time.sleep(60)"
    )
    tests = subprocess.Popen(
        [sys.executable, "-u", "-c", text], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert tests.stdout is not None
    assert tests.stdout.readline() == "up\n"
    left = current()
    assert left is not None
    assert "a cluster is up already" in cluster("up").stderr
    tests.kill()
    tests.communicate()

    assert cluster("up").returncode == 0
    assert not left.folder.exists()


def test_faults_by_command() -> None:
    assert cluster("up", "--nodes", "1", "--gpus", "0").returncode == 0
    assert cluster("kill-node", "n1").stdout.startswith("n1 is dead")
    assert "n1         not running" in cluster("status").stdout
    assert cluster("restore-node", "n1").stdout == "n1 is idle\n"
    assert cluster("kill-node", "n9").stderr == "error: there is no node n9: the nodes are n1\n"
    assert "start the cluster with --namespaces" in cluster("limit-link", "n1", "1mbit").stderr


def test_a_machine_of_another_cluster_is_left_alone() -> None:
    CONFIG_LINK.write_text("ClusterName=theirs\n")
    try:
        refused = cluster("up")
        cluster("down")
        assert CONFIG_LINK.read_text() == "ClusterName=theirs\n"
    finally:
        CONFIG_LINK.unlink()
    assert refused.returncode == 1
    assert f"{CONFIG_LINK} is there already: this machine belongs to a cluster" in refused.stderr
    assert not STATE_FILE.exists()


def test_missing_programs_are_named_with_their_packages(tmp_path: Path) -> None:
    refused = cluster("up", "--accounting", "--namespaces", PATH=str(tmp_path))

    assert refused.returncode == 1
    assert "this machine lacks hostname, ip, mariadb-install-db, mariadbd, munged" in refused.stderr
    assert (
        "apt-get install hostname iproute2 mariadb-client-core mariadb-server-core munge"
        in refused.stderr
    )
