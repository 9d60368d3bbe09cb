"""What clusters do to trainings: each ends with the weights of an undisturbed run, and loses only what was not saved.

The faults are those of the fault matrix: F15 time limit, F16 lost node, F17 scancel, requeue and preemption, F30 a
killed driver and two at once; a control daemon that is away, and a full disk.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.pipeline.conftest import Project
from tests.slurm.loopback import Loopback, loopback
from tests.slurm.needs import needs_slurm
from tests.slurm.project import QUICK, SlurmProject, completed, ended, wait
from tests.train.conftest import small_disk

pytestmark = [pytest.mark.slow, pytest.mark.slurm, needs_slurm, pytest.mark.timeout(1200)]
SAVE_EVERY = 10


@pytest.fixture(scope="module")
def slurm() -> Iterator[Loopback]:
    with loopback(nodes=2, kill_wait_s=20, grace_s=10) as made:
        yield made


@pytest.fixture(scope="module")
def prepared(small: Project, tmp_path_factory: pytest.TempPathFactory) -> SlurmProject:
    """All that a training needs, made on this machine."""
    project = SlurmProject(tmp_path_factory.mktemp("prepared") / "project")
    project.take_data(small)
    project.take_small_steps(epochs=6)
    project.edit("save_every_steps: 3", f"save_every_steps: {SAVE_EVERY}")
    project.snakemake("plan")
    return project


@pytest.fixture(scope="module")
def undisturbed(prepared: SlurmProject, tmp_path_factory: pytest.TempPathFactory) -> str:
    """sha256 of the weights that two ranks of one machine make, without a cluster."""
    project = prepared.copy_to(tmp_path_factory.mktemp("undisturbed") / "project")
    project.edit("nodes: 2, cpu_ranks: 1", "nodes: 1, cpu_ranks: 2")
    project.snakemake(project.target("train"))
    return project.trained_weights()


@pytest.fixture
def project(prepared: SlurmProject, tmp_path: Path, slurm: Loopback) -> Iterator[SlurmProject]:
    """A copy to train in, of which nothing runs any more in the end."""
    made = prepared.copy_to(tmp_path / "project")
    yield made
    slurm.end_jobs()
    ending = [process for process in psutil.process_iter(["cmdline"]) if _is_of(process, made.root)]
    left = psutil.wait_procs(ending, timeout=30)[1]
    told = [_told(process) for process in left if not _is_jobs_snakemake(process)]
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    assert told == []


def _is_of(process: psutil.Process, root: Path) -> bool:
    """Whether a process works in that project, as its command or its folder tells."""
    with contextlib.suppress(psutil.Error):
        return str(root) in " ".join(process.cmdline()) or process.cwd() == str(root)
    return False


def _is_jobs_snakemake(process: psutil.Process) -> bool:
    """Whether it is the one that the plugin starts in a job, which only clusters with cgroups end for certain.

    Its handler of SIGTERM takes a lock that the thread it interrupts may hold, and then waits for itself.
    """
    with contextlib.suppress(psutil.Error):
        return process.cmdline()[1:3] == ["-m", "snakemake"]
    return False


def _told(process: psutil.Process) -> str:
    """What a process is, and where it waits."""
    texts = []
    for name in ("status", "wchan", "stack"):
        with contextlib.suppress(OSError):
            texts.append(Path(f"/proc/{process.pid}/{name}").read_text())
    with contextlib.suppress(psutil.Error):
        lineage = [(parent.pid, parent.name()) for parent in process.parents()]
        texts.append(f"{process.cmdline()} in {process.cwd()}, below {lineage}")
    return "\n".join(texts)


def test_f15_a_job_at_its_time_limit_saves_and_is_queued_again(slurm: Loopback, project: SlurmProject) -> None:
    """It asks for a minute, in which it cannot be done, and saves half a minute before that is over.

    That the weights come out the same, test_srun.py sees after the same warning.
    """
    project.edit("nodes: 2, cpu_ranks: 1, internode_gbit_s: 1", "cpu_ranks: 1, runtime_minutes: 1")
    project.edit("epochs: 6", "epochs: 55")
    started = project.start_training()
    job = project.job()
    project.wait_for_event("run.requeued")
    slurm.wait_for(job, "PENDING", 60)
    slurm.call("scontrol", "update", f"job={job}", "TimeLimit=20")  # for the next attempt to be the last
    wait_for_attempt(2, started, project, slurm)
    requeued = project.events("run.requeued")
    assert 1 <= len(requeued) == slurm.restarts(job) <= 6
    assert {event["job"] for event in requeued} == {job}
    saved = [event["step"] for event in requeued if event["step"]]  # a busy machine may make no step in a minute
    assert saved == [event["step"] for event in project.events("run.resumed")]
    done = project.steps_done()
    assert done == list(range(1, done[-1] + 1))  # no step was made twice
    assert project.slurm_log(job).count("will be queued again") == len(requeued)  # the log is that of all attempts
    slurm.call("scancel", str(job))
    assert ended(started, project, slurm) == 1


def test_f16_f17_a_job_loses_nodes_and_gives_way_to_a_more_urgent_one(
    slurm: Loopback, project: SlurmProject, undisturbed: str, tmp_path: Path
) -> None:
    """One job is queued again four times, and continues each time; the first node that it loses has the launcher."""
    started = project.start_training()
    job = project.job()
    project.wait_for_step(SAVE_EVERY + 5)
    done_before = max(project.steps_done())
    lose_node(slurm, "n1")
    wait_for_attempt(2, started, project, slurm)
    slurm.call("scontrol", "requeue", str(job))  # as an administrator does
    wait_for_attempt(3, started, project, slurm)
    assert project.events("run.requeued") == []  # SLURM did it
    lose_node(slurm, "n2")
    wait_for_attempt(4, started, project, slurm)
    urgent = slurm.submit("sleep 3", tmp_path / "urgent.log", "--partition=urgent", "--nodes=2", "--exclusive")
    assert slurm.wait(urgent, 120) == "COMPLETED"
    assert slurm.restarts(job) == 4
    completed(started, project, slurm)
    assert project.trained_weights() == undisturbed
    resumed = [event["step"] for event in project.events("run.resumed")]
    assert len(resumed) == 4
    assert done_before - resumed[0] <= SAVE_EVERY + 5  # what was being written is lost, too
    stopped = project.events("run.interrupted")[-1]  # it saved when it was told, whether a save was due or not
    assert f"after step {resumed[-1]}, which is saved" in stopped["reason"]


def lose_node(slurm: Loopback, node: str) -> None:
    """Kill all that a node runs, and give it back once SLURM knows."""
    slurm.kill_node(node)
    slurm.notice_loss(node)
    slurm.restore_node(node)


def wait_for_attempt(attempt: int, started: "subprocess.Popen[str]", project: SlurmProject, slurm: Loopback) -> None:
    """Until that attempt has made a step."""
    wait(started, project, slurm, lambda: any(row["attempt"] == attempt for row in project.rows()))


def test_f17_after_a_full_disk_and_after_scancel_the_same_command_goes_on(
    slurm: Loopback, project: SlurmProject, undisturbed: str
) -> None:
    runs = project.store.root.parent / "runs"
    kept = shutil.copytree(runs, project.root.parent / "kept")
    shutil.rmtree(runs)
    with small_disk(runs, "size=2m"):
        shutil.copytree(kept, runs, dirs_exist_ok=True)
        started = project.start_training()
        assert ended(started, project, slurm) == 1
        assert "no room" in project.job_log() or "disk" in project.job_log()
        assert project.events("run.requeued") == []
        shutil.copytree(runs, kept, dirs_exist_ok=True)
    shutil.rmtree(runs)
    shutil.copytree(kept, runs)

    started = project.start_training()
    job = project.job()
    wait_for_attempt(2, started, project, slurm)
    slurm.call("scancel", str(job))
    assert ended(started, project, slurm) == 1
    assert slurm.state(job) == "CANCELLED"
    assert project.events("run.requeued") == []  # it was the user's wish
    project.finish_training()
    assert project.trained_weights() == undisturbed


def test_f30_after_a_killed_driver_two_at_once_find_its_job_again(
    slurm: Loopback, project: SlurmProject, undisturbed: str
) -> None:
    killed = project.start_training()
    job = project.job()
    slurm.wait_for(job, "RUNNING", 60)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    started = project.start_training()
    output = project.finish_training()
    completed(started, project, slurm)
    told = f"waiting for SLURM job {job}, RUNNING, of an earlier snakemake: small: train"
    assert told in output
    assert told in project.said()
    assert slurm.state(job) == "COMPLETED"
    assert len(project.events("run.launched")) == 1  # no second copy
    assert project.trained_weights() == undisturbed


def test_a_control_daemon_that_is_away_for_a_minute(slurm: Loopback, project: SlurmProject, undisturbed: str) -> None:
    started = project.start_training()
    project.job()
    project.wait_for_step(3)
    slurm.stop_controller()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(60)
        assert started.poll() is None
    finally:
        slurm.start_controller()
    completed(started, project, slurm)
    assert project.trained_weights() == undisturbed
    assert len(project.events("run.launched")) == 1


@pytest.mark.parametrize(
    ("edit", "variables", "said"),
    [
        (("nodes: 2", "nodes: 4"), {}, "cluster.nodes: 4 nodes of this size, and partition gpu has 2"),
        (("nodes: 2", "nodes: 1, gpus_per_node: 8, gpu: h200"), {}, "cluster.gpus_per_node: 8 GPUs, "),
        (("nodes: 2", "nodes: 2, memory_gb: 90"), {}, "cluster.memory_gb: the job needs 90 GB"),
        (("nodes: 2", "nodes: 2, runtime_minutes: 3000"), {}, "cluster.runtime_minutes: 3000 minutes, "),
        (
            ("nodes: 2", "nodes: 2"),
            {"PIPELINE_SLURM_PARTITION": "gpuu"},
            "partition 'gpuu' does not exist",
        ),
        (("nodes: 2", "nodes: 2"), {"PIPELINE_SLURM_CONSTRAINT": "h900"}, "set `constraint` in the site file, or"),
    ],
)
def test_what_the_cluster_never_has_is_refused_before_a_job(
    project: SlurmProject, edit: tuple[str, str], variables: dict[str, str], said: str
) -> None:
    project.edit(*edit)
    project.environment = {**project.environment, "PIPELINE_SLURM_PARTITION": "gpu", **variables}
    done = project.snakemake("--profile", "slurm", *QUICK, check=False)
    assert done.returncode == 2, done.stdout
    assert said in done.stdout
    assert "Traceback" not in done.stdout
    assert "has been submitted" not in done.stdout
