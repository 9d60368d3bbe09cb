"""What clusters do to trainings: each ends with an undisturbed run's weights.

The faults are those of the fault matrix: F15 time limit, F16 lost node, F17 scancel, requeue and
preemption, F18 a cut network, F30 a killed driver and two at once; a control daemon that is away,
and a full disk.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from pipeline_lib.core.errors import ConfigError
from pipeline_lib.launch.ranks import rank_processes
from pipeline_lib.slurm.can_start import refuse_jobs
from pipeline_lib.slurm.cluster import read_groups
from pipeline_lib.slurm.request import JobRequest
from pipeline_lib.slurm.site import Site
from tests.pipeline.conftest import Project
from tests.slurm.loopback import Loopback, loopback
from tests.slurm.needs import needs_namespaces
from tests.slurm.project import (
    QUICK,
    SlurmProject,
    completed,
    ended,
    plan_here,
    train_here,
    until,
    wait,
)
from tests.train.conftest import small_disk

pytestmark = [pytest.mark.slow, pytest.mark.slurm, needs_namespaces, pytest.mark.timeout(3000)]
SAVE_EVERY = 10
STEPS = 180
# Over such a link a step takes 0.2 s, nearly all of it waiting: each fault comes long before the
# end.
LINK = "10mbit"
AWAY_S = 60
DISK_BYTES = 64 << 20
LEFT_BYTES = 200_000  # on a full disk: for events, and for no checkpoint
TWO_NODES = "nodes: 2, cpu_ranks: 1, internode_gbit_s: 1"
ONE_NODE = "cpu_ranks: 1, runtime_minutes: 3"
OPTIONS = """\
exclude: n1
sbatch: [--nice=7]
gpu_sbatch: ['--mail-type=END,FAIL']
cpu_sbatch: [--mail-type=NONE]
"""


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A disk that can be filled. Nodes see what was mounted before they came up."""
    with small_disk(tmp_path_factory.mktemp("disk") / "runs", f"size={DISK_BYTES}") as mounted:
        yield mounted


@pytest.fixture(scope="module")
def prepared(small: Project, tmp_path_factory: pytest.TempPathFactory) -> SlurmProject:
    """All that a training needs, made on this machine."""
    project = SlurmProject(tmp_path_factory.mktemp("prepared") / "project", f"{{{TWO_NODES}}}")
    project.take_data(small)
    project.take_small_steps(epochs=STEPS // 60)
    project.edit("save_every_steps: 3", f"save_every_steps: {SAVE_EVERY}, timeout_s: 10")
    plan_here(project)
    return project


@pytest.fixture(scope="module")
def slurm(disk: Path) -> Iterator[Loopback]:
    """Nodes with their own networks, so that ranks give up a silent one, long before SLURM."""
    assert disk.is_mount()
    with loopback(
        nodes=2, namespaces=True, kill_wait_s=20, grace_s=10, slurmd_timeout_s=300
    ) as made:
        made.limit_link("n2", LINK)
        yield made


@pytest.fixture
def project(prepared: SlurmProject, slurm: Loopback, tmp_path: Path) -> Iterator[SlurmProject]:
    """A copy to train in, of which nothing runs any more in the end."""
    made = prepared.copy_to(tmp_path / "project")
    yield made
    end_all(made, slurm)


def end_all(project: SlurmProject, slurm: Loopback) -> None:
    """Cancel all jobs; nothing of the project may stay."""
    slurm.end_jobs()
    ending = [
        process for process in psutil.process_iter(["cmdline"]) if _is_of(process, project.root)
    ]
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
    """Whether the plugin starts it in a job, where only clusters with cgroups end it surely.

    Its handler of SIGTERM takes a lock that the thread it interrupts may hold, and then waits for
    itself.
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


def test_f15_a_job_at_its_time_limit_saves_and_is_queued_again(
    slurm: Loopback, project: SlurmProject, tmp_path: Path
) -> None:
    """It asks for three minutes, and is warned in time, with any `sbatch` options.

    They may be the site's or the user's. That the weights come out the same, test_srun.py sees
    after the same warning.
    """
    project.edit(TWO_NODES, ONE_NODE)
    project.edit(f"epochs: {STEPS // 60}", "epochs: 4")
    site = tmp_path / "site.yaml"
    site.write_text(OPTIONS)
    project.environment = {**project.environment, "PIPELINE_SITE": str(site)}
    given = (
        "--set-resources",
        "train_stage:slurm_extra=--mail-user=nobody@localhost",
        "shard_stage:mem_mb=9000",
    )
    started = project.start(*project.command[:-1], *given, "--", project.command[-1])
    job = project.job()
    told = slurm.call("scontrol", "show", "job", str(job))
    shown = dict(re.findall(r"(\S+?)=(\S*)", told))
    wanted = {
        "ExcNodeList": "n1",
        "Nice": "7",
        "MailType": "END,FAIL",
        "MailUser": "nobody@localhost",
    }
    assert {name: shown.get(name) for name in wanted} == wanted
    hold_until_warned(project)
    project.wait_for_event("run.requeued")
    slurm.wait_for(job, "PENDING", 60)
    # for the next attempt to be the last
    slurm.call("scontrol", "update", f"job={job}", "TimeLimit=20")
    wait_for_attempt(2, started, project, slurm)
    [launched, _], [requeued] = project.events("run.launched"), project.events("run.requeued")
    assert requeued["at"] - launched["at"] < 170, "it was warned, and not ended at its limit"
    assert requeued["job"] == job
    assert slurm.restarts(job) == 1
    assert [event["step"] for event in project.events("run.resumed")] == [requeued["step"]]
    assert requeued["step"] > 0
    done = project.steps_done()
    assert done == list(range(1, done[-1] + 1))  # no step was made twice
    # the log is that of all attempts
    assert project.slurm_log(job).count("will be queued again") == 1
    slurm.call("scancel", str(job))
    assert ended(started, project, slurm) == 1


def hold_until_warned(project: SlurmProject) -> None:
    """Freeze the only rank at a step until a signal waits for it: it would make thousands."""
    project.wait_for_step(1)
    [rank] = rank_processes(project.store.spec_path(project.train.digest).absolute())
    rank.suspend()
    # what froze it, which waits too until the kernel has stopped all its threads
    frozen = 1 << (signal.SIGSTOP - 1)

    def is_warned() -> bool:
        try:
            status = Path(f"/proc/{rank.pid}/status").read_text()
        except FileNotFoundError:  # SLURM may wake what it warns, and then it saves and ends
            return True
        pending = [
            int(mask, 16) for mask in re.findall(r"^S[hi][dg]Pnd:\s+(\w+)", status, re.MULTILINE)
        ]
        return any(mask & ~frozen != 0 for mask in pending)

    until(is_warned, "the warning", project.job_log)
    with contextlib.suppress(psutil.NoSuchProcess):
        rank.resume()


def test_f16_f17_f18_f30_one_training_outlives_all_that_clusters_do(
    slurm: Loopback, prepared: SlurmProject, project: SlurmProject, disk: Path, tmp_path: Path
) -> None:
    """Three jobs in a row; the first is requeued often, and the same command starts the others."""
    shutil.rmtree(project.root / "runs", ignore_errors=True)
    (project.root / "runs").symlink_to(disk)
    started = project.start_training()
    first = project.job()
    lose_nodes_and_give_way(first, started, project, slurm, tmp_path)
    lose_the_controller(started, project, slurm)
    lose_the_link(started, project, slurm)
    fill_the_disk(disk, started, project, slurm)
    assert slurm.state(first) == "FAILED"
    attempts = 1 + slurm.restarts(first)
    second = cancel(project, slurm)
    third = kill_the_driver(project, slurm)

    launched = [event["job"] for event in project.events("run.launched")]
    assert launched == [first] * attempts + [second, third]  # no second copy
    # to cancel was the user's wish
    assert {event["job"] for event in project.events("run.requeued")} == {first}
    other = prepared.copy_to(tmp_path / "undisturbed")
    other.edit(TWO_NODES, "nodes: 1, cpu_ranks: 2")
    plan_here(other)
    assert project.trained_weights() == train_here(other, tmp_path / "here")


def lose_nodes_and_give_way(
    job: int, started: "subprocess.Popen[str]", project: SlurmProject, slurm: Loopback, folder: Path
) -> None:
    """F16, F17: a job is queued again four times; the first node that it loses has the launcher."""
    project.wait_for_step(SAVE_EVERY + 5)
    done_before = max(project.steps_done())
    lose_node(slurm, "n1")
    wait_for_attempt(2, started, project, slurm)
    slurm.call("scontrol", "requeue", str(job))  # as an administrator does
    wait_for_attempt(3, started, project, slurm)
    lose_node(slurm, "n2")
    wait_for_attempt(4, started, project, slurm)
    assert project.events("run.requeued") == []  # SLURM did it
    urgent = slurm.submit(
        "sleep 3", folder / "urgent.log", "--partition=urgent", "--nodes=2", "--exclusive"
    )
    assert slurm.wait(urgent, 120) == "COMPLETED"
    assert slurm.restarts(job) == 4
    wait_for_attempt(5, started, project, slurm)
    resumed = [event["step"] for event in project.events("run.resumed")]
    assert len(resumed) == 4
    assert done_before - resumed[0] <= SAVE_EVERY + 5  # what was being written is lost, too
    # it saved when it was told, whether a save was due or not
    stopped = project.events("run.interrupted")[-1]
    assert f"after step {resumed[-1]}, which is saved" in stopped["reason"]


def lose_node(slurm: Loopback, node: str) -> None:
    """Kill all that a node runs, and give it back once SLURM knows."""
    slurm.kill_node(node)
    slurm.notice_loss(node)
    slurm.restore_node(node)


def wait_for_attempt(
    attempt: int, started: "subprocess.Popen[str]", project: SlurmProject, slurm: Loopback
) -> None:
    """Until that attempt has made a step, or a later one."""
    wait(started, project, slurm, lambda: any(row["attempt"] >= attempt for row in project.rows()))
    assert started.poll() is None, project.said()


def lose_the_controller(
    started: "subprocess.Popen[str]", project: SlurmProject, slurm: Loopback
) -> None:
    """A control daemon gone for a minute disturbs neither the short job nor snakemake."""
    slurm.limit_link("n2", "2mbit")
    slurm.stop_controller()
    done, launched = max(project.steps_done()), project.events("run.launched")
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(AWAY_S)
        assert started.poll() is None
    finally:
        slurm.start_controller()
        slurm.limit_link("n2", LINK)
    project.wait_for_step(done + 1)
    assert project.events("run.launched") == launched


def lose_the_link(started: "subprocess.Popen[str]", project: SlurmProject, slurm: Loopback) -> None:
    """F18: ranks give up, srun would wait for n2 as SLURM does; the job resumes with the link."""
    slurm.limit_link("n2", "down")
    until(
        lambda: len(project.events("run.requeued")) == 2, "the end of the attempt", project.job_log
    )
    slurm.limit_link("n2", "up")
    # What SLURM hears late of the job's earlier life it would take for the end of its next attempt.
    until(
        lambda: slurm.node_state("n2") in ("idle", "mixed", "allocated"),
        "all that n2 has to tell",
        slurm.logs,
    )
    wait_for_attempt(6, started, project, slurm)
    requeued = project.events("run.requeued")[1]
    # neither rank was silent: both could write
    assert "look at the network between n1, n2" in requeued["reason"]


def fill_the_disk(
    disk: Path, started: "subprocess.Popen[str]", project: SlurmProject, slurm: Loopback
) -> None:
    """A disk without room for the next checkpoint ends the job for good."""
    requeued = project.events("run.requeued")
    fill = disk / "fill"
    fill.write_bytes(bytes(shutil.disk_usage(disk).free - LEFT_BYTES))
    assert ended(started, project, slurm) == 1
    assert "no room" in project.job_log() or "disk" in project.job_log()
    assert project.events("run.requeued") == requeued
    fill.unlink()


def cancel(project: SlurmProject, slurm: Loopback) -> int:
    """F17: a cancelled job ends, and snakemake with it; the job."""
    attempt = 1 + len(project.events("run.launched"))
    started = project.start_training()
    job = project.job()
    wait_for_attempt(attempt, started, project, slurm)
    slurm.call("scancel", str(job))
    assert ended(started, project, slurm) == 1
    assert slurm.state(job) == "CANCELLED"
    return job


def kill_the_driver(project: SlurmProject, slurm: Loopback) -> int:
    """F30: after a killed driver two at once find its job again, which ends well; the job."""
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
    return job


@pytest.mark.parametrize(
    ("edit", "variables", "said"),
    [
        (
            ("nodes: 2", "nodes: 4, runtime_minutes: 3000"),
            {},
            [
                "cluster.nodes: 4 nodes of this size, and partition gpu has 2",
                "cluster.runtime_minutes: 3000 minutes, ",
            ],
        ),
        (
            ("nodes: 2", "nodes: 2"),
            {"PIPELINE_SLURM_CONSTRAINT": "h900"},
            ["set `constraint` in the site file, or"],
        ),
    ],
    ids=["too much", "refused by sbatch"],
)
def test_what_the_cluster_never_has_is_refused_before_a_job(
    project: SlurmProject, edit: tuple[str, str], variables: dict[str, str], said: list[str]
) -> None:
    project.edit(*edit)
    project.environment = {**project.environment, "PIPELINE_SLURM_PARTITION": "gpu", **variables}
    done = project.snakemake("--profile", "slurm", *QUICK, check=False)
    assert done.returncode == 2, done.stdout
    assert [words for words in said if words not in done.stdout] == []
    assert "Traceback" not in done.stdout
    assert "has been submitted" not in done.stdout


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("partition", "change", "said"),
    [
        ("gpu", {"gpus_per_node": 8}, "cluster.gpus_per_node: 8 GPUs, "),
        ("gpu", {"memory_mb": 90_000}, "cluster.memory_gb: the job needs 90 GB"),
        ("gpuu", {}, "partition 'gpuu' does not exist"),
    ],
    ids=["GPUs", "memory", "partition"],
)
def test_what_its_nodes_never_have_is_told_by_its_key(
    partition: str, change: dict[str, int], said: str
) -> None:
    """By what the real `sinfo` prints."""
    wanted = JobRequest(2, 1, 1, 0, 1000, 60, 30)
    refuse_jobs(Site(partition="gpu"), wanted, read_groups())
    with pytest.raises(ConfigError, match=re.escape(said)):
        refuse_jobs(Site(partition=partition), replace(wanted, **change), read_groups())
