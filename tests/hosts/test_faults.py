"""What may befall a training on two hosts. The same command continues, and the weights are those of a quiet run."""

import contextlib
import signal
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.hosts.machines import Machine
from tests.hosts.needs import needs_machines
from tests.hosts.project import AGENT, HostsProject
from tests.pipeline.conftest import Project
from tests.slurm.project import until

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_machines, pytest.mark.timeout(1200)]
TIMEOUT_S = 10
SAVE_EVERY = 10
STEPS = 480


@pytest.fixture(scope="module")
def quiet(small: Project, tmp_path_factory: pytest.TempPathFactory) -> str:
    """sha256 of the weights that two ranks of one machine make."""
    project = Project(tmp_path_factory.mktemp("quiet") / "project")
    project.take_data(small)
    lengthen(project)
    project.set_cluster("{nodes: 1, cpu_ranks: 2}")
    project.snakemake(project.target("train"))
    return HostsProject.trained_weights(project)  # type: ignore[arg-type]


def lengthen(project: Project) -> None:
    """Make the training long enough for several faults, and its patience short."""
    project.take_small_steps(epochs=STEPS // 60)
    project.edit("save_every_steps: 3", f"save_every_steps: {SAVE_EVERY}, timeout_s: {TIMEOUT_S}")


class Faults:
    """Attempts at one training, each ended by a fault."""

    def __init__(self, project: HostsProject) -> None:
        """Begin with nothing saved."""
        lengthen(project)
        self.project = project
        self.saved: list[int] = []  # the last step that was saved when the last fault came, if there was one

    def suffer(self, what: Callable[[], None], mend: Callable[[], None] = lambda: None) -> str:
        """Train until something new is saved, let `what` happen, and return why the training says that it ended.

        Nothing of it runs anywhere then, and it had continued from what was saved when the last fault came.
        """
        begin = self.project.saved_steps()[-1:]
        started = self.project.start_training()
        until(lambda: self.project.saved_steps()[-1:] > begin, "a checkpoint", self.project.said)
        before, self.saved = self.saved, self.project.saved_steps()[-1:]
        what()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(90)
        assert started.poll() is not None, f"it still runs\n{self.project.said()}"
        self.project.wait_until_gone("pipeline_lib")
        mend()
        resumed = [event["step"] for event in self.project.events("run.resumed")]
        assert resumed[-1:] >= before, (resumed, before)
        ends = [*self.project.events("run.interrupted"), *self.project.events("run.failed")]
        return str(max(ends, key=lambda event: float(event["at"]))["reason"])

    def finish(self, quiet: str) -> None:
        """Train to the end, and compare."""
        self.project.finish_training()
        assert self.project.trained_weights() == quiet


@pytest.fixture
def faults(project: HostsProject) -> Faults:
    return Faults(project)


def kill(processes: list[psutil.Process]) -> None:
    """Kill -9 all of them."""
    assert processes
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_a_killed_rank_agent_or_launcher_is_named_and_no_rank_survives(
    faults: Faults, pair: list[Machine], quiet: str
) -> None:
    _, second = pair
    said = faults.suffer(lambda: kill(faults.project.ranks(second)[:1]))
    assert "rank 1 on m2 was killed by SIGKILL" in said

    said = faults.suffer(lambda: kill(second.processes(AGENT)))
    assert "host m2 was lost: its agent was killed" in said
    assert "run the same command again to continue" in said

    said = faults.suffer(lambda: kill([second_launcher(second)]))
    assert "spawn on m2 was killed by SIGKILL" in said

    second.limit(20)  # a slow host changes nothing
    try:
        faults.finish(quiet)
    finally:
        second.mend()
    assert "2 cpu ranks by spawn, on m1 and m2" in faults.project.job_log()


def second_launcher(machine: Machine) -> psutil.Process:
    """What starts the ranks of a host."""
    return next(process for process in machine.processes("-m pipeline_lib node") if process.name() != "sh")


def test_a_killed_connection_or_driver_ends_all_ranks_and_a_request_to_stop_saves_first(
    faults: Faults, pair: list[Machine], quiet: str
) -> None:
    project = faults.project
    said = faults.suffer(lambda: kill(pair[1].processes("sshd: root")))
    assert "host m2 was lost: ssh: Connection to m2 closed by remote host" in said

    faults.suffer(lambda: kill(project.snakemakes()))

    said = faults.suffer(partial(project.interrupt, signal.SIGINT))
    last = max(project.steps_done())
    assert f"stopped by a signal after step {last}, which is saved" in said
    assert project.saved_steps()[-1] == last < STEPS
    faults.finish(quiet)


def test_a_network_that_is_cut_in_one_direction_or_a_full_disk_ends_all_ranks_and_is_named(
    faults: Faults, pair: list[Machine], quiet: str
) -> None:
    """The folder of checkpoints is a full disk for m2 alone, as where its share of the file server is used up."""
    second, checkpoints = pair[1], faults.project.run_dir / "checkpoints"
    for cut in (second.cut_outgoing, second.cut_incoming):
        said = faults.suffer(cut, mend=second.mend)
        assert "host m2 was lost: it has not answered for " in said

    def fill() -> None:
        second.mount_private(checkpoints, size_mb=1)
        second.run("sh", "-c", f"head -c 2000000 /dev/zero > {checkpoints}/fill || true", cwd=Path("/"))

    def mend() -> None:
        second.run("umount", "-l", str(checkpoints), cwd=Path("/"))

    faults.suffer(fill, mend)
    assert faults.project.exit_code() in (66, 74)
    faults.finish(quiet)


def test_one_host_goes_on_alone_when_the_other_is_off(
    faults: Faults, pair: list[Machine], quiet: str, tmp_path: Path
) -> None:
    first, second = pair
    bridge = second.bridge
    try:
        said = faults.suffer(second.power_off)
        assert "host m2 was lost: it has not answered for " in said
        done = faults.project.snakemake("train", check=False)
        assert "m2: ssh: " in done.stdout
        faults.project.edit("nodes: 2, cpu_ranks: 1", "nodes: 1, cpu_ranks: 2")
        faults.finish(quiet)
    finally:
        if not second.is_on:
            second.power_on(bridge)


def test_without_the_first_host_the_others_end_their_ranks(faults: Faults, pair: list[Machine]) -> None:
    first, second = pair
    faults.project.start_training()
    faults.project.wait_for_step(SAVE_EVERY + 1)
    bridge = first.bridge
    first.power_off()
    try:
        faults.project.wait_until_gone(timeout_s=5 * TIMEOUT_S)
        assert second.is_on
        assert not second.processes("pipeline_lib")
    finally:
        first.power_on(bridge)
