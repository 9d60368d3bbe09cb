"""The loopback cluster runs jobs as a cluster does, and does to them what clusters do."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.processes import wait_for
from tests.slurm.loopback import Loopback, LoopbackError, loopback
from tests.slurm.needs import needs_slurm

pytestmark = [pytest.mark.slow, pytest.mark.slurm, needs_slurm]
GRACE_S = 4


@pytest.fixture(scope="module")
def slurm() -> Iterator[Loopback]:
    with loopback(grace_s=GRACE_S, slurmd_timeout_s=5) as made:
        yield made


def commands_of(slurm: Loopback, node: str) -> list[str]:
    """The command lines of a node's processes."""
    found = []
    for pid in slurm.processes(node):
        with contextlib.suppress(psutil.Error):
            found.append(" ".join(psutil.Process(pid).cmdline()))
    return found


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if psutil.pid_exists(pid)}


def test_a_job_runs_on_both_nodes_with_their_gpus(slurm: Loopback, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    job = slurm.submit(
        "srun sh -c 'echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES'", log, "--nodes=2", "--gres=gpu:2"
    )

    assert slurm.wait(job, 30) == "COMPLETED", log.read_text()
    assert sorted(log.read_text().split("\n")) == ["", "n1 0,1", "n2 0,1"]


def test_other_users_may_submit_and_stay_who_they_are(slurm: Loopback) -> None:
    assert (
        slurm.call("runuser", "-u", "nobody", "--", "srun", "--partition=cpu", "id", "-un")
        == "nobody\n"
    )


def test_what_the_cluster_cannot_do_is_refused(slurm: Loopback) -> None:
    for option in ("--partition=nosuch", "--gres=gpu:5", "--nodes=3", "--time=2-0", "--mem=20000"):
        assert slurm.attempt("sbatch", option, "--wrap=true").returncode == 1, option
    with pytest.raises(LoopbackError, match="there is no node n3: the nodes are n1, n2"):
        slurm.kill_node("n3")
    with pytest.raises(LoopbackError, match="--namespaces"):
        slurm.limit_link("n1", "down")


def test_a_killed_node_takes_all_of_its_own_with_it_and_its_job_goes_on_elsewhere(
    slurm: Loopback, tmp_path: Path
) -> None:
    log = tmp_path / "job.log"
    # This one has left its session and forgotten its environment: no trace of the job is on it.
    away = "(setsid env -i sleep 1000 &)"
    job = slurm.submit(
        f'[ "$SLURM_RESTART_COUNT" ] && exit; {away}; srun sleep 1000', log, "--gres=gpu:4"
    )
    slurm.wait_for(job, "RUNNING", 30)
    lost = slurm.field(job, "NodeList")
    [other] = set(slurm.nodes) - {lost}
    wait_for(
        lambda: {"sleep 1000", "/usr/bin/sleep 1000"} <= set(commands_of(slurm, lost)),
        "both sleeps",
    )
    beside = slurm.submit("sleep 1000", tmp_path / "beside.log", f"--nodelist={other}")
    slurm.wait_for(beside, "RUNNING", 30)
    wait_for(lambda: "sleep 1000" in commands_of(slurm, other), "the job beside")
    of_lost, of_other = slurm.processes(lost), slurm.processes(other)

    slurm.kill_node(lost)
    assert len(of_lost) >= 6
    assert alive(of_lost) == set()
    assert slurm.processes(lost) == set()
    assert alive(of_other) == of_other
    slurm.requeue_now(job)
    assert slurm.wait(job, 30) == "COMPLETED"
    assert (slurm.field(job, "NodeList"), slurm.restarts(job)) == (other, 1)
    assert slurm.state(beside) == "RUNNING"

    slurm.restore_node(lost)
    assert slurm.node_state(lost) == "idle"
    assert (
        slurm.call("srun", f"--nodelist={lost}", "sh", "-c", "echo $SLURMD_NODENAME") == f"{lost}\n"
    )
    slurm.call("scancel", str(beside))
    slurm.wait(beside, 30)


def test_power_that_comes_back_before_anybody_noticed(slurm: Loopback) -> None:
    slurm.kill_node("n1")
    slurm.restore_node("n1")

    assert slurm.call("srun", "--nodelist=n1", "sh", "-c", "echo $SLURMD_NODENAME") == "n1\n"


def test_jobs_outlive_the_controller(slurm: Loopback, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    job = slurm.submit("sleep 2; echo done", log)
    slurm.wait_for(job, "RUNNING", 30)
    slurm.stop_controller()
    wait_for(lambda: log.exists() and "done" in log.read_text(), "the end of the job")
    slurm.start_controller()

    assert slurm.wait(job, 30) == "COMPLETED"
    assert slurm.restarts(job) == 0


def test_an_urgent_job_preempts_after_a_warning(slurm: Loopback, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    script = "trap 'echo warned; trap \"\" USR1' USR1; echo begun; while :; do sleep 0.2; done"
    job = slurm.submit(script, log, "--nodes=2", "--exclusive", "--signal=B:USR1@60", "--time=30")
    wait_for(lambda: log.exists() and "begun" in log.read_text(), "its begin")
    urgent = slurm.submit(
        "true", tmp_path / "urgent.log", "--nodes=2", "--exclusive", "--partition=urgent"
    )

    assert slurm.wait(urgent, 60) == "COMPLETED"
    assert "warned" in log.read_text()
    slurm.requeue_now(job)
    slurm.wait_for(job, "RUNNING", 30)
    assert slurm.restarts(job) == 1
    slurm.call("scancel", str(job))
    slurm.wait(job, 60)
