"""What may befall a training on two hosts.

The same command continues, and the weights are those of a quiet run.
"""

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
from tests.slurm.project import plan_here, train_here, until

pytestmark = [pytest.mark.slow, pytest.mark.root, needs_machines, pytest.mark.timeout(3000)]
TIMEOUT_S = 10
SAVE_EVERY = 5
STEPS = 180
# Over such a link a step takes 0.2 s, nearly all of it waiting: each fault comes long before the
# end.
LINK_MBIT_S = 10
ENDED_S = 300.0


class Faults:
    """Attempts at one training, each ended by a fault."""

    def __init__(self, project: HostsProject, pair: list[Machine]) -> None:
        """Begin with nothing saved, the plan, and a slow second host."""
        project.take_small_steps(epochs=STEPS // 60)
        project.edit(
            "save_every_steps: 3", f"save_every_steps: {SAVE_EVERY}, timeout_s: {TIMEOUT_S}"
        )
        plan_here(project)
        self.project = project
        self.first, self.second = pair
        self.bridge = self.second.bridge
        self.saved: list[
            int
        ] = []  # the last step that was saved when the last fault came, if there was one
        self.mend()

    def mend(self) -> None:
        """Give each machine its power back, and the second one its slow link."""
        for machine in (self.first, self.second):
            if not machine.is_on:
                machine.power_on(self.bridge)
        self.second.mend()
        self.second.limit(LINK_MBIT_S)

    def suffer(
        self,
        what: Callable[[], None],
        mend: Callable[[], None] = lambda: None,
        by_snakemake: bool = False,
    ) -> str:
        """Train until something is saved, let `what` happen, and return why the training ended.

        The reason is the training's own words.

        Nothing of it runs anywhere then, and it had continued from what was saved when the last
        fault came.
        """
        project = self.project
        begin = project.saved_steps()[-1:]
        started = project.start_training() if by_snakemake else project.start_stage()
        until(lambda: project.saved_steps()[-1:] > begin, "a checkpoint", project.said)
        before, self.saved = self.saved, project.saved_steps()[-1:]
        what()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(ENDED_S)
        assert started.poll() is not None, f"it still runs\n{project.said()}{project.job_log()}"
        project.wait_until_gone("pipeline_lib")
        mend()
        resumed = [event["step"] for event in project.events("run.resumed")]
        assert resumed[-1:] >= before, (resumed, before)
        ends = [*project.events("run.interrupted"), *project.events("run.failed")]
        return str(max(ends, key=lambda event: float(event["at"]))["reason"])


def kill(processes: list[psutil.Process]) -> None:
    """Kill -9 all of them."""
    assert processes
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_after_every_fault_the_same_command_goes_on_to_the_weights_of_a_quiet_run(
    project: HostsProject, pair: list[Machine], tmp_path: Path
) -> None:
    """Each attempt suffers one fault, and its end is named; the last has lost a host for good."""
    faults = Faults(project, pair)
    try:
        lose_processes(faults)
        stop_and_lose_the_driver(faults)
        lose_the_network(faults)
        fill_the_disk(faults)
        lose_the_first_host(faults)
        go_on_without_the_second_host(faults)
        assert max(project.steps_done()) == STEPS
        trained = project.trained_weights()
        assert trained == train_here(project, tmp_path / "quiet")
    finally:
        faults.mend()
        faults.second.mend()


def lose_processes(faults: Faults) -> None:
    """A killed rank, agent or launcher is named, and no rank survives."""
    second = faults.second
    said = faults.suffer(lambda: kill(faults.project.ranks(second)[:1]))
    assert "rank 1 on m2 was killed by SIGKILL" in said
    assert "2 cpu ranks by spawn, on m1 and m2" in faults.project.job_log()

    said = faults.suffer(lambda: kill(second.processes(AGENT)))
    assert "host m2 was lost: its agent was killed" in said
    assert "run the same command again to continue" in said

    said = faults.suffer(lambda: kill([second_launcher(second)]))
    assert "spawn on m2 was killed by SIGKILL" in said

    said = faults.suffer(lambda: kill(second.processes("sshd: root")))
    assert "host m2 was lost: ssh: Connection to m2 closed by remote host" in said


def second_launcher(machine: Machine) -> psutil.Process:
    """What starts the ranks of a host."""
    return next(
        process for process in machine.processes("-m pipeline_lib node") if process.name() != "sh"
    )


def stop_and_lose_the_driver(faults: Faults) -> None:
    """A request to stop saves first; the end of snakemake ends all ranks."""
    project = faults.project
    said = faults.suffer(partial(project.interrupt, signal.SIGINT), by_snakemake=True)
    last = max(project.steps_done())
    assert f"stopped by a signal after step {last}, which is saved" in said
    assert project.saved_steps()[-1] == last < STEPS

    faults.suffer(lambda: kill(project.snakemakes()), by_snakemake=True)


def lose_the_network(faults: Faults) -> None:
    """A network that is cut in one direction ends all ranks."""
    for cut in (faults.second.cut_outgoing, faults.second.cut_incoming):
        said = faults.suffer(cut, faults.mend)
        assert "host m2 was lost: it has not answered for " in said


def fill_the_disk(faults: Faults) -> None:
    """The folder of checkpoints is a full disk for m2 alone, as where its share is used up.

    The share is that of the file server.
    """
    second, checkpoints = faults.second, faults.project.run_dir / "checkpoints"

    def fill() -> None:
        second.mount_private(checkpoints, size_mb=1)
        second.run(
            "sh", "-c", f"head -c 2000000 /dev/zero > {checkpoints}/fill || true", cwd=Path("/")
        )

    def mend() -> None:
        second.run("umount", "-l", str(checkpoints), cwd=Path("/"))

    faults.suffer(fill, mend)
    assert faults.project.exit_code() in (66, 74)


def lose_the_first_host(faults: Faults) -> None:
    """Without the host of the launcher, the others end their ranks."""

    def switch_off() -> None:
        faults.first.power_off()
        faults.project.wait_until_gone(timeout_s=5 * TIMEOUT_S)
        assert faults.second.is_on

    faults.suffer(switch_off, faults.mend)


def go_on_without_the_second_host(faults: Faults) -> None:
    """One that is off is named, also where a training starts there; the first goes on alone."""
    project = faults.project
    said = faults.suffer(faults.second.power_off)
    assert "host m2 was lost: it has not answered for " in said
    done = project.snakemake("train", check=False)
    assert done.returncode != 0
    assert "m2: ssh: " in done.stdout
    project.edit("nodes: 2, cpu_ranks: 1", "nodes: 1, cpu_ranks: 2")
    project.finish_training()
