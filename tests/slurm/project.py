"""The project on the loopback cluster: real `snakemake --profile slurm`, and its jobs' ends."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline_lib.config.compile import run_digest
from pipeline_lib.core.events import read_events
from pipeline_lib.core.files import read_jsonl
from pipeline_lib.core.run_folder import PLAN_NAME
from pipeline_lib.core.stage import run_stage
from pipeline_lib.core.store import Spec
from pipeline_lib.plan import stage as plan
from pipeline_lib.records.plan import read_plan
from pipeline_lib.train.rank import RankJob
from tests.locks import hold
from tests.pipeline.conftest import Project
from tests.ranks import run_ranks
from tests.slurm.loopback import Loopback
from tests.train.helpers import digest_of, load_weights, train

# The plugin asks for the state of jobs after these many seconds, and then every ten seconds longer.
QUICK = ("--slurm-init-seconds-before-status-checks", "1", "--max-status-checks-per-second", "1")
DEADLINE_S = 720.0
SETTLED_S = 5.0


class SlurmProject(Project):
    """A working copy whose trainings are jobs of two nodes, a rank each, or as configured."""

    def __init__(
        self, root: Path, cluster: str = "{nodes: 2, cpu_ranks: 1, internode_gbit_s: 1}"
    ) -> None:
        """Copy the project to `root`, with the small config on that cluster."""
        super().__init__(root)
        self._trains: dict[str, Spec] = {}
        self.set_cluster(cluster)

    @property
    def train(self) -> Spec:
        """The training's spec; each config is compiled once, as it is asked for many times."""
        text = self.config.read_text()
        if text not in self._trains:
            self._trains[text] = self.experiment().specs["train"]
        return self._trains[text]

    @property
    def run_dir(self) -> Path:
        """Where the training works."""
        return self.store.run_dir(run_digest(self.train))

    def start_training(self) -> "subprocess.Popen[str]":
        """Start `snakemake --profile slurm` up to the training, and leave it running."""
        return self.start(*self.command)

    def finish_training(self) -> str:
        """The same to its end; what it said."""
        return self.snakemake(*self.command).stdout

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments of such a call."""
        return ("--profile", "slurm", *QUICK, self.target("train"))

    def said(self) -> str:
        """What the started snakemake has said."""
        path = self.root / "started.log"
        return path.read_text(errors="replace") if path.exists() else "(no log yet)"

    def job(self) -> int:
        """The SLURM job of the training, once it is submitted."""
        found = until(lambda: self._submitted(), "the training's job", self.said)
        return int(found)

    def _submitted(self) -> str | None:
        found = re.findall(r"SLURM jobid (\d+) \(log: \S*rule_train_stage", self.said())
        return found[-1] if found else None

    @property
    def job_log_path(self) -> Path:
        """The log of the training."""
        return self.root / "logs" / "train" / f"{self.train.digest}.log"

    def job_log(self) -> str:
        """What the training has said."""
        path = self.job_log_path
        return path.read_text(errors="replace") if path.exists() else "(no log yet)"

    def slurm_log(self, job: int) -> str:
        """What a job has said, in all its attempts."""
        return next(self.root.glob(f"logs/slurm/*/*/{job}.log")).read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """The events of that name."""
        return [
            event for event in read_events(self.run_dir / "events.jsonl") if event["event"] == name
        ]

    def rows(self) -> list[dict[str, Any]]:
        """The live metrics of all attempts, a row for each step, as they were made."""
        path = self.run_dir / "metrics.jsonl"
        return read_jsonl(path) if path.exists() else []

    def steps_done(self) -> list[int]:
        """Steps of all attempts, as they were made."""
        return [row["step"] for row in self.rows()]

    def wait_for_step(self, step: int) -> None:
        """Until an attempt has made `step`."""

        def is_there() -> bool:
            return any(done >= step for done in self.steps_done())

        until(is_there, f"step {step}", lambda: self.said() + self.job_log())

    def wait_for_event(self, name: str) -> None:
        """Until there is an event of that name."""
        until(lambda: self.events(name), name, lambda: self.said() + self.job_log())

    def trained_weights(self) -> str:
        """sha256 of all tensors of the finished training; its files describe them in any order."""
        return digest_of(load_weights(self.sealed("train")))


def plan_here(project: Project) -> None:
    """Make the plan of a project that has its data, in this process."""
    experiment = project.experiment()
    project.store.write_specs(experiment.specs.values())
    run_stage(plan.run, experiment.specs["plan"], project.store, lambda _: None)


def train_here(project: Project, folder: Path) -> str:
    """sha256 of the weights that two ranks here make from the first step, without a launcher.

    The ranks are forked. `project` has its plan; what it has in its folder of runs is removed.
    """
    shutil.rmtree(project.root / "runs", ignore_errors=True)
    experiment = project.experiment()
    found = read_plan(project.store.sealed(experiment.ref("plan")) / PLAN_NAME)
    folder.mkdir()
    lock = hold(folder / "lock")
    job = RankJob(
        experiment.specs["train"], project.store, found, folder / "out", 1, lock, resume_from=None
    )
    job.out.mkdir()
    run_ranks(train, 2, job, timeout_s=DEADLINE_S)
    return digest_of(load_weights(job.out))


def until(
    condition: Callable[[], Any], what: str, told: Callable[[], str], timeout_s: float = DEADLINE_S
) -> Any:
    """What `condition` gives once it holds; fail with what was `told` after a deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline_s, (
            f"{what} did not come within {timeout_s} s\n{told()[-6000:]}"
        )
        time.sleep(0.2)  # `condition` may read files, or ask SLURM
    return found


def ended(
    process: "subprocess.Popen[str]",
    project: SlurmProject,
    slurm: Loopback,
    timeout_s: float = DEADLINE_S,
) -> int:
    """The exit code of a started snakemake."""
    wait(process, project, slurm, lambda: False, timeout_s)
    return process.wait()


def completed(
    process: "subprocess.Popen[str]",
    project: SlurmProject,
    slurm: Loopback,
    timeout_s: float = DEADLINE_S,
) -> None:
    """Wait until the training is done, and see that a new snakemake finds nothing to do.

    The started one would look at the queue a minute later only.
    """
    pointer = project.root / project.target("train")
    wait(process, project, slurm, pointer.exists, timeout_s)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    output = project.finish_training()
    assert "Nothing to be done" in output or "1 of 1 steps (100%) done" in project.said(), output


def wait(
    process: "subprocess.Popen[str]",
    project: SlurmProject,
    slurm: Loopback,
    is_enough: Callable[[], bool],
    timeout_s: float = DEADLINE_S,
) -> None:
    """Wait until a started snakemake has ended or that is enough.

    Its jobs are spared most of the two minutes that they wait once requeued. Not all: SLURM would
    take what it hears late of a job's earlier life for its new one.
    """
    seen_s: dict[str, float] = {}

    def is_over() -> bool:
        for line in slurm.attempt(
            "squeue", "--noheader", "--states=PENDING", "--format=%i %r"
        ).stdout.splitlines():
            number, _, reason = line.partition(" ")
            if (
                reason == "BeginTime"
                and time.monotonic() - seen_s.setdefault(number, time.monotonic()) > SETTLED_S
            ):
                slurm.attempt("scontrol", "update", f"job={number}", "StartTime=now")
                del seen_s[number]
        return process.poll() is not None or is_enough()

    until(is_over, "the end", lambda: project.said() + project.job_log(), timeout_s)
