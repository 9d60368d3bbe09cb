"""The project on several machines: real snakemake on m1, ranks on all, and what became of them."""

import os
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from pipeline_lib.core.errors import EXIT_LINE
from pipeline_lib.core.run_folder import sealed_steps
from tests.hosts.machines import Machine, wait_until
from tests.pipeline.conftest import BIN, DEADLINE_S
from tests.slurm.project import SlurmProject

RANK = "-m pipeline_lib rank"
AGENT = "-m pipeline_lib agent"


def _is_idle(machine: Machine, word: str) -> bool:
    return not machine.processes(word)


class HostsProject(SlurmProject):
    """A working copy on a disk that all machines share. Its training has a rank on each host."""

    def __init__(self, root: Path, machines: list[Machine]) -> None:
        """Copy the project to `root`, with the small config for as many nodes as `machines`."""
        super().__init__(root, f"{{nodes: {len(machines)}, cpu_ranks: 1, internode_gbit_s: 1}}")
        self.use(machines)

    def use(self, machines: list[Machine]) -> None:
        """Train on `machines` from now on."""
        self.machines = machines
        self.environment = {"PATH": f"{BIN}:/usr/sbin:/usr/bin:/sbin:/bin", "OMP_NUM_THREADS": "1"}
        self.environment["PIPELINE_HOSTS"] = ",".join(machine.name for machine in machines)

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments of snakemake for the training and what it needs."""
        return (self.target("train"),)

    def run(self, *command: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
        """Run a command of the environment on the first machine; the output is in stdout."""
        program = [str(BIN / command[0]), *command[1:]]
        done = self.machines[0].run(
            *program, cwd=self.root, environ=self.environment, check=False, timeout_s=DEADLINE_S
        )
        assert not check or done.returncode == 0, done.stdout + self.job_log()
        return done

    def start_training(self) -> "subprocess.Popen[Any]":
        """Start snakemake on the first machine and leave it running."""
        return self._start(str(BIN / "snakemake"), *self.command, log=self.root / "started.log")

    def start_stage(self) -> "subprocess.Popen[Any]":
        """Start the training alone as its rule does, without snakemake, once its plan is there."""
        spec = self.store.spec_path(self.train.digest)
        plan = self.store.pointer(self.experiment().ref("plan"))
        log = self.job_log_path
        log.parent.mkdir(parents=True, exist_ok=True)
        command = (
            str(BIN / "python"),
            "-m",
            "pipeline_lib",
            "train",
            "--spec",
            str(spec),
            "--plan",
            str(plan),
        )
        return self._start(*command, log=log)

    def _start(self, *command: str, log: Path) -> "subprocess.Popen[Any]":
        return self.machines[0].start(*command, cwd=self.root, environ=self.environment, log=log)

    def snakemakes(self) -> list[psutil.Process]:
        """The processes of snakemake on the first machine."""
        return self.machines[0].processes("bin/snakemake")

    def interrupt(self, number: signal.Signals) -> None:
        """Send a signal to snakemake and all its processes on its machine, as a terminal does."""
        outermost = min(self.snakemakes(), key=lambda process: process.create_time())
        os.killpg(os.getpgid(outermost.pid), number)

    def ranks(self, machine: Machine) -> list[psutil.Process]:
        """The ranks on one machine."""
        return machine.processes(RANK)

    def wait_until_gone(self, word: str = "pipeline_lib", timeout_s: float = 60.0) -> None:
        """Wait until no running machine has a project process with `word` in its command."""
        for machine in self.machines:
            if machine.is_on:
                wait_until(partial(_is_idle, machine, word), f"{machine.name} is idle", timeout_s)

    def saved_steps(self) -> list[int]:
        """The steps of whole checkpoints."""
        return [step for step, _ in sealed_steps(self.run_dir / "checkpoints")]

    def exit_code(self) -> int:
        """What the last attempt ended with, as its log states."""
        lines = [line for line in self.job_log().splitlines() if line.startswith(EXIT_LINE)]
        return int(lines[-1].removeprefix(EXIT_LINE))
