"""Nodes in their own networks: they reach each other by name; their links can be throttled.

The links can also be cut.
"""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.daemons import wait_until
from tests.slurm.loopback import Loopback, LoopbackError, loopback
from tests.slurm.needs import needs_namespaces
from tests.slurm.network import inside

pytestmark = [pytest.mark.slow, pytest.mark.slurm, needs_namespaces]
PORT = 29_000
RECEIVE = f"""
import socket
listener = socket.create_server(("", {PORT}))
print("listens", flush=True)
listener.settimeout(20)
connection, _ = listener.accept()
connection.settimeout(20)
while connection.recv(1 << 20):
    pass
connection.sendall(b"all")
"""
SEND = f"""
import socket, sys, time
connection = socket.create_connection((sys.argv[1], {PORT}), timeout=2)
connection.settimeout(20)
since = time.monotonic()
connection.sendall(bytes(int(sys.argv[2])))
connection.shutdown(socket.SHUT_WR)
assert connection.recv(8) == b"all"
print(time.monotonic() - since)
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[Loopback]:
    with loopback(namespaces=True, slurmd_timeout_s=5) as made:
        yield made


def bytes_per_second(source: str, target: str, size: int) -> float:
    """How fast TCP is from node to node; subprocess.CalledProcessError without connection."""
    python = [sys.executable, "-I", "-S", "-c"]
    receiver = subprocess.Popen(inside(target, *python, RECEIVE), stdout=subprocess.PIPE, text=True)
    try:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listens\n"
        send = inside(source, *python, SEND, target, str(size))
        return size / float(
            subprocess.run(send, capture_output=True, text=True, check=True, timeout=30).stdout
        )
    finally:
        receiver.kill()
        receiver.communicate()


def test_a_job_sees_hosts_that_know_each_other(slurm: Loopback, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    script = "hostname; getent hosts n1 n2; echo $(ls /sys/class/net); echo $CUDA_VISIBLE_DEVICES"
    job = slurm.submit(f"srun --ntasks=2 sh -c '{script}'", log, "--nodes=2", "--gres=gpu:2")

    assert slurm.wait(job, 30) == "COMPLETED", log.read_text()
    addresses = [f"{node.address}    {node.name}" for node in slurm.plan.nodes]
    assert sorted(log.read_text().splitlines()) == sorted(
        ["n1", "n2", *addresses * 2, *["eth0 lo", "0,1"] * 2]
    )
    assert bytes_per_second("n1", "n1", 1000) > 0


def test_a_throttled_link_is_slow_both_ways_and_fast_again(slurm: Loopback) -> None:
    assert bytes_per_second("n1", "n2", 100_000_000) > 100e6
    slurm.limit_link("n2", "80mbit")
    for ends in (("n1", "n2"), ("n2", "n1")):
        assert 5e6 < bytes_per_second(*ends, 10_000_000) < 11e6
    slurm.limit_link("n2", "none")
    assert bytes_per_second("n1", "n2", 100_000_000) > 100e6


def test_a_cut_link_is_silent_and_comes_back(slurm: Loopback) -> None:
    slurm.limit_link("n1", "down")
    with pytest.raises(subprocess.CalledProcessError) as error:
        bytes_per_second("n1", "n2", 1000)
    assert "timed out" in error.value.stderr or "No route to host" in error.value.stderr
    slurm.limit_link("n1", "up")

    def is_back() -> (
        bool
    ):  # its neighbours may have to be found anew, which takes seconds on a busy machine
        with contextlib.suppress(subprocess.CalledProcessError):
            return bytes_per_second("n1", "n2", 1000) > 0
        return False

    wait_until(is_back, "n1 reaches n2 again")


def test_an_unknown_rate_is_refused(slurm: Loopback) -> None:
    with pytest.raises(LoopbackError, match="'fast' is no rate: expected e.g. 100mbit"):
        slurm.limit_link("n1", "fast")


def test_a_job_on_two_nodes_starts_again_when_one_has_died(slurm: Loopback, tmp_path: Path) -> None:
    job = slurm.submit(
        '[ "$SLURM_RESTART_COUNT" ] || srun sleep 1000', tmp_path / "job.log", "--nodes=2"
    )
    slurm.wait_for(job, "RUNNING", 30)
    slurm.kill_node("n2")
    slurm.notice_loss("n2")
    slurm.requeue_now(job)
    assert slurm.state(job) == "PENDING"  # until it has its nodes
    slurm.restore_node("n2")

    assert slurm.wait(job, 60) == "COMPLETED"
    assert slurm.restarts(job) == 1
