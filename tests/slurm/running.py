"""A cluster that is up: its jobs, its nodes, its controller, and what may befall them."""

import contextlib
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.slurm import daemons, network
from tests.slurm.daemons import DEADLINE_S, Condition, LoopbackError, wait_until
from tests.slurm.settings import Plan

WAITING = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "STOPPED")

SETTLED_S = 3.0


@dataclass(frozen=True)
class Loopback:
    """A cluster that is up."""

    plan: Plan

    @property
    def folder(self) -> Path:
        return self.plan.folder

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.plan.nodes)

    def call(self, *command: str, timeout_s: float = DEADLINE_S) -> str:
        """Run one of SLURM's programs; what it prints."""
        done = self.attempt(*command, timeout_s=timeout_s)
        if done.returncode:
            raise LoopbackError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done.stdout

    def attempt(
        self, *command: str, timeout_s: float = DEADLINE_S
    ) -> "subprocess.CompletedProcess[str]":
        """The same for one that may fail."""
        return subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=timeout_s
        )

    def submit(self, script: str, log: Path, *options: str) -> int:
        """Submit a batch job; its number."""
        path = log.with_suffix(".sh")
        path.write_text(f"#!/bin/bash\n{script}\n")
        answer = self.call("sbatch", "--parsable", "--output", str(log), *options, str(path))
        return int(answer.strip().partition(";")[0])

    def state(self, job: int) -> str:
        """RUNNING, COMPLETED, FAILED and so on."""
        return self.field(job, "JobState")

    def exit_code(self, job: int) -> int:
        """What the job's script ended with."""
        return int(self.field(job, "ExitCode").partition(":")[0])

    def restarts(self, job: int) -> int:
        """How often the job was requeued."""
        return int(self.field(job, "Restarts"))

    def field(self, job: int, name: str) -> str:
        """A value of `scontrol show job`."""
        return self._show("job", str(job), name)

    def node_field(self, node: str, name: str) -> str:
        """A value of `scontrol show node`."""
        return self._show("node", node, name)

    def _show(self, kind: str, which: str, name: str) -> str:
        shown = self.call("scontrol", "show", kind, which, "--oneliner")
        return dict(part.partition("=")[::2] for part in shown.split())[name]

    def wait(self, job: int, timeout_s: float = 120.0) -> str:
        """The state that the job ends in."""
        self.wait_while(job, WAITING, timeout_s)
        return self.state(job)

    def wait_for(self, job: int, state: str, timeout_s: float = 120.0) -> None:
        """Wait until the job is in a state."""
        self._until(lambda: self.state(job) == state, f"job {job} is {state}", timeout_s)

    def wait_while(self, job: int, states: tuple[str, ...], timeout_s: float = 120.0) -> None:
        """Wait until the job is in none of these states."""
        self._until(
            lambda: self.state(job) not in states,
            f"job {job} is none of {', '.join(states)}",
            timeout_s,
        )

    def requeue_now(self, job: int, timeout_s: float = 60.0) -> None:
        """Wait until the job is queued again, and spare it the two minutes of requeued jobs."""
        self.wait_for(job, "PENDING", timeout_s)
        # else SLURM takes what it hears late of the job's earlier life for its new one
        time.sleep(SETTLED_S)
        self.call("scontrol", "update", f"job={job}", "StartTime=now")

    def node_state(self, node: str) -> str:
        """What sinfo says of a node: idle, mixed, down*, and so on."""
        return self.call("sinfo", "--noheader", "--nodes", node, "--format", "%T").split()[0]

    def processes(self, node: str) -> set[int]:
        """All processes of a node."""
        pid = daemons.supervisors(self.folder).get(node)
        return set() if pid is None else daemons.descendants(pid)

    def kill_node(self, node: str) -> None:
        """Take its power: its slurmd and all that it started end at once; nobody is told."""
        self._check(node)
        if self.plan.settings.namespaces:
            network.limit(node, "down")  # else the kernel would close the connections of the dead
        pid = daemons.supervisors(self.folder).get(node)
        if pid is not None:
            daemons.kill_tree(pid)

    def notice_loss(self, node: str) -> None:
        """Let slurmctld know at once that a node is dead, which it sees late, in 15 to 25 s."""
        self.call("scontrol", "update", f"nodename={node}", "state=down", "reason=no power")

    def restore_node(self, node: str) -> None:
        """Give it power again, and wait until jobs may run on it."""
        self._check(node)
        if self.plan.settings.namespaces:
            network.limit(node, "up")
        since = ""
        if node not in daemons.supervisors(self.folder):
            since = time.strftime("%Y-%m-%dT%H:%M:%S")
            start_node(self.plan, node)

        def is_back() -> bool:
            # slurmctld may not even have noticed that it was gone
            if self.node_field(node, "SlurmdStartTime") < since:
                return False
            state = self.node_state(node)
            # `*`: it has not answered yet
            if state.startswith(("down", "drain")) and not state.endswith("*"):
                self.attempt("scontrol", "update", f"nodename={node}", "state=resume")
            return state in ("idle", "mixed", "allocated", "completing")

        self._until(is_back, f"{node} is back")

    def limit_link(self, node: str, rate: str) -> None:
        """Throttle a node's link (`100mbit`), cut (`down`), mend (`up`) or free it (`none`).

        It holds for both ways.
        """
        self._check(node)
        if not self.plan.settings.namespaces:
            raise LoopbackError(
                "all nodes share this machine's network: start the cluster with --namespaces"
            )
        network.limit(node, rate)

    def stop_controller(self) -> None:
        """End slurmctld; jobs run on, and SLURM's programs find nobody to ask."""
        daemons.stop(self.folder, "slurmctld")

    def start_controller(self) -> None:
        """Start slurmctld again, with what it knew, and wait until it answers."""
        if "slurmctld" not in daemons.supervisors(self.folder):
            start_controller(self.plan)
        self._until(lambda: self.attempt("sinfo").returncode == 0, "slurmctld answers")

    def end_jobs(self) -> None:
        """Cancel all jobs, for whoever waits outside the cluster, without a long wait."""
        if not {"slurmctld", "munged"} <= daemons.supervisors(self.folder).keys():
            return
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            jobs = self.attempt("squeue", "--noheader", "--format=%i", timeout_s=5).stdout.split()
            if jobs:
                self.attempt("scancel", *jobs, timeout_s=5)
                deadline_s = time.monotonic() + 2
                while (
                    self.attempt("squeue", "--noheader", timeout_s=5).stdout
                    and time.monotonic() < deadline_s
                ):
                    time.sleep(0.1)

    def logs(self) -> str:
        """The last lines of its daemons."""
        return last_lines(self.folder)

    def _check(self, node: str) -> None:
        if node not in self.nodes:
            raise LoopbackError(f"there is no node {node}: the nodes are {', '.join(self.nodes)}")

    def _until(self, condition: Condition, what: str, timeout_s: float = DEADLINE_S) -> None:
        try:
            wait_until(condition, what, timeout_s, every_s=0.2)
        except LoopbackError as error:
            raise LoopbackError(
                f"{error}\n{self.attempt('squeue').stdout}\n{self.logs()}"
            ) from error


def start_node(plan: Plan, name: str) -> None:
    """Start the slurmd of a node, within its namespace if it has one."""
    command = ["slurmd", "-D", "-f", str(plan.config), "-N", name]
    if plan.settings.namespaces:
        command = network.inside(name, *command)
    daemons.start(plan.folder, name, command, environment())


def start_controller(plan: Plan, *options: str) -> None:
    """Start slurmctld."""
    daemons.start(
        plan.folder,
        "slurmctld",
        ["slurmctld", "-D", "-f", str(plan.config), *options],
        environment(),
    )


def environment() -> dict[str, str]:
    """This process's environment without what a job or an older cluster has left in it."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
    }


def last_lines(folder: Path) -> str:
    """The ends of all logs of a cluster; what a daemon prints counts only if it has no log."""
    texts = {
        path.name: path.read_text(errors="replace")[-2000:] for path in sorted(folder.glob("*.log"))
    }
    doubled = {name.replace(".log", ".out.log") for name, text in texts.items() if text}
    return "\n".join(
        f"{name}:\n{text}" for name, text in texts.items() if text and name not in doubled
    )
